"""Loss per byte of a small GPT: every method with tuned settings, on simulated ranks, resumable across days.

    chrt -i 0 nice -n 19 python scripts/bench_frontier.py run            # continue the plan; once per free core
    python scripts/bench_frontier.py status                              # finished runs, and the next ones
    python scripts/bench_frontier.py table --plot docs/frontier.png      # the tables and the figure of docs/frontier.md

A finished run is one line of docs/frontier.jsonl. A run that is killed leaves nothing and is repeated; a run whose
settings are in the file is not. So `run` may be killed at any moment, and adding a method to METHODS extends the plan.
Processes share the plan by a lock for each run, which the system frees when they end.

The plan has stages. First a sweep of each method, all sweeps in turn so that each has a result soon: with seed 0 and
half the steps, of the learning rate, and for methods with an outer optimizer of its learning rate and momentum too,
until the best point of the grid has worse neighbours. Then the best settings at all steps with three seeds, of the
methods that no other beats by MARGIN with as few bytes. Then the same with eight ranks.

All ranks of a run train in one process and one thread. The weights of all ranks are stacked for the forward and
backward pass, so that eight ranks cost no more than one with eight times the batch. Everything else is the library's
own code: one optimizer per rank, wrapped for a simulated wire, whose telemetry counts the bytes. The same seed gives
all methods the same weights and batches, and a rank's batches do not depend on the number of ranks.
"""

from __future__ import annotations

import argparse
import fcntl
import hashlib
import json
import math
import os
import resource
import statistics
import subprocess
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from functools import cache, partial
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import dgcopt
from dgcopt.tasks.stdlib_gpt import CharGPT, StdlibText

ROOT = Path(__file__).resolve().parent.parent
RESULTS = ROOT / "docs" / "frontier.jsonl"

TASK = {"layers": 2, "heads": 2, "width": 64, "context": 64, "batch": 4, "text": 10_000_000, "version": 2}
"""Shape of the model, samples per rank and step, and bytes of text; raise `version` if training itself changes."""

STEPS = 3000
WARMUP = 0.2
"""Fraction of the steps during which the learning rate rises; then it falls to zero along a cosine.

Dense AdamW wants it: at a learning rate of 0.004 its loss was 1.867 with 5% and 1.679 with 20% (docs/frontier.md).
"""

CLIP = 1.0
"""Largest norm of a rank's own gradient."""

MARGIN = 0.01
"""A method whose loss is higher by more than this fraction than another's with as few bytes gets no further seeds."""


@dataclass(frozen=True)
class Method:
    """An exchange, and the optimizer of each rank.

    Args:
        exchange: expression of a compressor or an averaging rule, evaluated with the names of `dgcopt` and `outer`; its
            fields {outer_lr} and {momentum} are swept like the learning rate.
        optimizer: "adamw", "adamw0" without its first moment, "sgd", or "muon" with AdamW for all but the matrices.
        lr: learning rate at which the sweep starts.
        ranks: numbers of ranks: the first is for the sweep and the paired seeds, all others for the last stage.
    """

    exchange: str
    optimizer: str = "adamw"
    lr: float = 8e-3
    ranks: tuple[int, ...] = (4, 8)

    @property
    def grid(self) -> dict[str, dict[int, float]]:
        """The values of each swept setting by their place from the start of the sweep."""
        grid = {"lr": {place: self.lr * 2.0**place for place in range(-5, 6)}}
        if "{outer_lr" in self.exchange:
            grid["outer_lr"] = {place: 2.0**place for place in range(-3, 3)}
        if "{momentum" in self.exchange:
            grid["momentum"] = dict(enumerate((0.0, 0.5, 0.8, 0.9, 0.95), start=-1))
        return grid


def outer(lr: float, momentum: float) -> partial[torch.optim.SGD]:
    """The outer optimizer of DiLoCo."""
    return partial(torch.optim.SGD, lr=lr, momentum=momentum, nesterov=momentum > 0)


OUTER = "outer=outer({outer_lr:g}, {momentum:g})"
CODED = "values='int2', indices='rice'"
METHODS: dict[str, Method] = {
    "dense": Method("NoCompression()"),
    "one rank": Method("NoCompression()", ranks=(1,)),
    "TopK of the update, 1%": Method(f"TopK(0.01, {CODED})", "adamw0", lr=16e-3),
    "DiLoCo as in its paper, H = 8": Method("DiLoCo(every=8)"),
    "DiLoCo as in its paper, without first moment, H = 8": Method("DiLoCo(every=8)", "adamw0", lr=2e-3),
    "LocalSGD, H = 8": Method("LocalSGD(every=8)"),
    "LocalSGD without first moment, H = 8": Method("LocalSGD(every=8)", "adamw0"),
    "TopK of the update, 0.1%": Method(f"TopK(0.001, {CODED})", "adamw0", lr=16e-3),
    "DiLoCo, TopK 1%, unsent local, H = 8": Method(
        f"DiLoCo(8, {OUTER}, compression=TopK(0.01, {CODED}), unsent='local')"
    ),
    "LocalSGD, moments on their own periods, H = 8": Method(
        "LocalSGD(every=8, state_every={{'exp_avg': 24, 'exp_avg_sq': 48}})"
    ),
    "DiLoCo, H = 8": Method(f"DiLoCo(8, {OUTER})"),
    "DiLoCo without first moment, H = 8": Method(f"DiLoCo(8, {OUTER})", "adamw0", lr=4e-3),
    "dense without first moment": Method("NoCompression()", "adamw0", ranks=(4,)),
    "TopK of the update, 1%, with first moment": Method(f"TopK(0.01, {CODED})", lr=16e-3),
    "LocalSGD, H = 32": Method("LocalSGD(every=32)"),
    "SparseLoCo, H = 32": Method("SparseLoCo(every=32, lr={outer_lr:g})"),
    "DiLoCo, H = 32": Method(f"DiLoCo(32, {OUTER})"),
    "DiLoCo, TopK 1%, unsent local, H = 32": Method(
        f"DiLoCo(32, {OUTER}, compression=TopK(0.01, {CODED}), unsent='local')"
    ),
    "DiLoCo, TopK 1%, unsent apart, H = 8": Method(f"DiLoCo(8, {OUTER}, compression=TopK(0.01, {CODED}))"),
    "DiLoCo, TopK 0.1%, unsent local, H = 8": Method(
        f"DiLoCo(8, {OUTER}, compression=TopK(0.001, {CODED}), unsent='local')"
    ),
    "DeMo": Method("DeMo()", "sgd", lr=2e-3),
    "PowerSGD, rank 4": Method("PowerSGD(rank=4)"),
    "dense, Muon": Method("NoCompression()", "muon"),
    "MuLoCo, H = 32": Method(f"DiLoCo(32, {OUTER})", "muon"),
    "DGC of the gradient, 1%": Method(f"DGC(0.01, {CODED}, vectors='int8', warmup=None, source='gradient')"),
    "DGC of the gradient, 0.1%": Method(f"DGC(0.001, {CODED}, vectors='int8', warmup=None, source='gradient')"),
    "OneBit of the gradient": Method("OneBit()"),
    "Signum": Method("Signum()", "sgd", lr=2e-3),
    "OneBitAdam": Method("OneBitAdam()"),
    "DiLoCo, TopK 0.1%, unsent local, H = 32": Method(
        f"DiLoCo(32, {OUTER}, compression=TopK(0.001, {CODED}), unsent='local')"
    ),
}
"""In order of value: the sweep of the first is made first."""

OPTIMIZERS: dict[str, Any] = {
    "adamw": partial(torch.optim.AdamW, betas=(0.9, 0.95), weight_decay=0.1, fused=True),
    "adamw0": partial(torch.optim.AdamW, betas=(0.0, 0.95), weight_decay=0.1, fused=True),
    "sgd": partial(torch.optim.SGD, weight_decay=0.1),
    "muon": partial(dgcopt.MuonAdamW, betas=(0.9, 0.95), weight_decay=0.1),
}


@dataclass(frozen=True)
class Run:
    """The settings of one run, which identify its result."""

    exchange: str
    optimizer: str
    lr: float
    ranks: int
    steps: int
    seed: int
    task: str

    @property
    def key(self) -> str:
        return json.dumps(asdict(self), sort_keys=True)


# -- training ----------------------------------------------------------------------------------------------------------


@cache
def texts() -> dict[str, Tensor]:
    """The training and the validation text."""
    return {
        "train": StdlibText("train", TASK["context"], TASK["text"]).text,
        "validation": StdlibText("validation", TASK["context"], TASK["text"]).text,
    }


@cache
def task_id() -> str:
    """The version of the task: its settings and the text, which depends on the version of Python."""
    digest = hashlib.sha256(json.dumps(TASK, sort_keys=True).encode())
    for text in texts().values():
        digest.update(text.numpy().tobytes())
    return digest.hexdigest()[:12]


def model_of(seed: int) -> CharGPT:
    """The model with GPT-2's initialisation: N(0, 0.02), less by the square root of the depth for what is added up."""
    torch.manual_seed(seed)
    model = CharGPT(TASK["layers"], TASK["heads"], TASK["width"], TASK["context"])
    for name, param in model.named_parameters():
        if param.dim() == 2:
            added = name.endswith(("project.weight", "mlp.2.weight"))
            nn.init.normal_(param, std=0.02 / math.sqrt(2 * TASK["layers"]) if added else 0.02)
    return model


def batch(text: Tensor, random: torch.Generator, count: int) -> Tensor:
    """Windows of text from anywhere, with one character more than the context: `[count, context + 1]`."""
    starts = torch.randint(len(text) - TASK["context"], (count, 1), generator=random)
    return text[starts + torch.arange(TASK["context"] + 1)].long()


def logits(weights: dict[str, Tensor], tokens: Tensor, heads: int) -> Tensor:
    """The logits of N replicas of CharGPT: stacked weights `[N, ...]`, tokens `[N, B, T]`, result `[N, B * T, V]`."""
    (replicas, count, length), table = tokens.shape, weights["token.weight"]
    vocabulary, width = table.shape[1:]

    def norm(x: Tensor, name: str) -> Tensor:
        gain, bias = weights[f"{name}.weight"], weights[f"{name}.bias"]
        return torch.addcmul(bias[:, None], F.layer_norm(x, (width,)), gain[:, None])

    def linear(x: Tensor, name: str) -> Tensor:
        return torch.baddbmm(weights[f"{name}.bias"][:, None], x, weights[f"{name}.weight"].transpose(1, 2))

    rows = tokens + torch.arange(replicas).view(-1, 1, 1) * vocabulary
    x = F.embedding(rows, table.flatten(0, 1)) + weights["position"][:, None, :length]
    x = x.flatten(1, 2)
    for block in sorted({name.split(".")[1] for name in weights if name.startswith("blocks.")}, key=int):
        at = f"blocks.{block}."
        parts = linear(norm(x, at + "norm1"), at + "attend").view(replicas * count, length, 3, heads, -1)
        query, key, value = parts.permute(2, 0, 3, 1, 4)
        mixed = F.scaled_dot_product_attention(query, key, value, is_causal=True)
        x = x + linear(mixed.transpose(1, 2).reshape(x.shape), at + "project")
        x = x + linear(F.gelu(linear(norm(x, at + "norm2"), at + "mlp.0")), at + "mlp.2")
    return torch.bmm(norm(x, "norm"), table.transpose(1, 2))


def loss_of(weights: dict[str, Tensor], windows: Tensor) -> Tensor:
    """The sum over replicas of the mean loss of each, so that gradients are those of every replica alone."""
    found = logits(weights, windows[..., :-1], TASK["heads"])
    return F.cross_entropy(found.flatten(0, 1), windows[..., 1:].flatten()) * len(windows)


def backward(replicas: list[dict[str, nn.Parameter]], windows: Tensor) -> float:
    """Give each replica the clipped gradient of its own windows, `[N, B, T + 1]`; return the mean loss."""
    stacks = {name: torch.stack([replica[name] for replica in replicas]) for name in replicas[0]}
    leaves = {name: stack.detach().requires_grad_() for name, stack in stacks.items()}
    loss = loss_of(leaves, windows)
    loss.backward()
    grads = [leaf.grad for leaf in leaves.values() if leaf.grad is not None]
    norms = torch.stack([grad.flatten(1).norm(dim=1) for grad in grads]).norm(dim=0)
    scale = (CLIP / (norms + 1e-6)).clamp(max=1.0)
    # only now do gradients arrive at the parameters, whose hooks may launch exchanges
    torch.autograd.backward(list(stacks.values()), [g * scale.view(-1, *[1] * (g.dim() - 1)) for g in grads])
    return float(loss.detach()) / len(replicas)


@torch.no_grad()
def validation(weights: dict[str, Tensor], count: int) -> float:
    """The loss of one replica on the same windows each time."""
    windows = batch(texts()["validation"], torch.Generator().manual_seed(1), count)
    one = {name: tensor[None] for name, tensor in weights.items()}
    return statistics.mean(float(loss_of(one, part[None])) for part in windows.split(256))


def rate(step: int, run: Run) -> float:
    """The learning rate of a step, counted from 0."""
    warm = max(1, round(WARMUP * run.steps))
    if step < warm:
        return run.lr * (step + 1) / warm
    return run.lr * 0.5 * (1 + math.cos(math.pi * (step - warm) / (run.steps - warm)))


def wrapped(run: Run, replicas: list[dict[str, nn.Parameter]]) -> list[Any]:
    """Return each rank's optimizer with the exchange of the run."""
    chosen = eval(run.exchange, {**vars(dgcopt), "outer": outer})
    optimizers: list[Any] = []
    for replica, comm in zip(replicas, dgcopt.simulated_world(run.ranks), strict=True):
        given = replica.items() if run.optimizer == "muon" else replica.values()
        optimizer = OPTIMIZERS[run.optimizer](given, lr=run.lr)
        if isinstance(chosen, dgcopt.Averaging):
            optimizers.append(chosen.attach(optimizer, replica.items(), comm))
        else:
            optimizers.append(dgcopt.DistributedOptimizer(optimizer, replica.items(), chosen, comm=comm))
    return optimizers


def train(run: Run) -> dict[str, Any]:
    """Train one run; return its losses, bytes and seconds."""
    started, cpu = time.time(), time.process_time()
    model = model_of(run.seed)
    replicas = [
        {name: nn.Parameter(param.detach().clone()) for name, param in model.named_parameters()}
        for _ in range(run.ranks)
    ]
    optimizers = wrapped(run, replicas)
    randoms = [torch.Generator().manual_seed(1000 * run.seed + rank + 1) for rank in range(run.ranks)]
    curve, recent = [], 0.0
    every = run.steps // 10
    for step in range(run.steps):
        windows = torch.stack([batch(texts()["train"], random, TASK["batch"]) for random in randoms])
        found = backward(replicas, windows)
        if not math.isfinite(found):
            return {"loss": None, "error": f"the training loss is {found} at step {step}"}
        for optimizer in optimizers:
            for group in optimizer.param_groups:
                group["lr"] = rate(step, run)
        for optimizer in optimizers:
            optimizer.step()
        for optimizer in optimizers:
            optimizer.zero_grad()
        recent += found / every
        if (step + 1) % every == 0:
            curve.append([step + 1, round(recent, 4), round(validation(mean_of(replicas), 256), 4)])
            recent = 0.0
    sender = getattr(optimizers[0], "averaging", optimizers[0])
    sent = sender.telemetry.sent_bytes if run.ranks > 1 else 0
    elements = sum(param.numel() for param in model.parameters())
    return {
        "loss": validation(mean_of(replicas), 2048),
        "loss_of_rank_0": validation(replicas[0], 2048),
        "distance": distance(replicas),
        "bytes_per_sample": sent / run.steps / TASK["batch"],
        "dense_bytes_per_sample": 2 * 4 * elements * (run.ranks - 1) / run.ranks / TASK["batch"],
        "parameters": elements,
        "curve": curve,
        "cpu_seconds": round(time.process_time() - cpu, 1),
        "seconds": round(time.time() - started, 1),
    }


def mean_of(replicas: list[dict[str, Tensor]]) -> dict[str, Tensor]:
    """The mean of the ranks' weights, which every method trains for: most hold it on every rank."""
    return {name: torch.stack([replica[name].detach() for replica in replicas]).mean(0) for name in replicas[0]}


def distance(replicas: list[dict[str, Tensor]]) -> float:
    """The distance of the ranks' weights from their mean, root mean square, as a fraction of the mean's norm."""
    mean = torch.cat([tensor.flatten() for tensor in mean_of(replicas).values()])
    each = [torch.cat([tensor.detach().flatten() for tensor in replica.values()]) for replica in replicas]
    return float(torch.stack([(one - mean).norm() for one in each]).square().mean().sqrt() / mean.norm())


# -- results and the plan ----------------------------------------------------------------------------------------------


class Results:
    """Finished runs, one line of JSON each.

    Args:
        path: their file.
        task: version of the task of which runs are planned and reported; by default the current one.
    """

    def __init__(self, path: Path, task: str | None = None) -> None:
        self.path = path
        self.task = task or task_id()
        self.runs: dict[str, dict[str, Any]] = {}
        self.read()

    def read(self) -> None:
        """Read what has been added to the file, by other processes too."""
        if not self.path.exists():
            return
        with self.path.open("r+b") as file:
            fcntl.lockf(file, fcntl.LOCK_EX)
            whole = file.read()
            if not whole.endswith(b"\n"):  # killed while it wrote
                whole = whole[: whole.rfind(b"\n") + 1]
                file.truncate(len(whole))
        for line in whole.decode().splitlines():
            entry = json.loads(line)
            self.runs[Run(**entry["run"]).key] = entry

    def add(self, run: Run, result: dict[str, Any], commit: str) -> None:
        entry = {"run": asdict(run), **result, "commit": commit}
        self.runs[run.key] = entry
        with self.path.open("a") as file:
            fcntl.lockf(file, fcntl.LOCK_EX)
            file.write(json.dumps(entry) + "\n")
            file.flush()
            os.fsync(file.fileno())

    @contextmanager
    def claimed(self, run: Run) -> Iterator[bool]:
        """Whether this process alone may make the run: neither does another one now, nor is it finished.

        The claim is a lock on one byte of a file in the temporary folder; the byte is the hash of the run.
        """
        with (Path(tempfile.gettempdir()) / "dgcopt-frontier.lock").open("ab") as file:
            byte = int.from_bytes(hashlib.sha256(run.key.encode()).digest()[:6], "big")
            try:
                fcntl.lockf(file, fcntl.LOCK_EX | fcntl.LOCK_NB, 1, byte)
            except OSError:
                yield False
                return
            self.read()  # the run may have ended a moment ago
            yield self.loss(run) is None

    def loss(self, run: Run) -> float | None:
        """The final loss, infinite for a run that diverged, None for one that is not there."""
        entry = self.runs.get(run.key)
        return None if entry is None else math.inf if entry["loss"] is None else entry["loss"]


def run_of(method: Method, settings: dict[str, float], ranks: int, steps: int, seed: int, task: str) -> Run:
    """Return the run of a method with the values of its swept settings."""
    return Run(method.exchange.format(**settings), method.optimizer, settings["lr"], ranks, steps, seed, task)


def swept(method: Method, results: Results) -> tuple[dict[Run, dict[str, float]], Run | None]:
    """Return the finished runs of the sweep with their settings, best first, and the next run, None if it is done.

    The sweep starts in the middle of the grid and goes on from the best point: to its neighbours in each setting.
    """
    start, losses, points = dict.fromkeys(method.grid, 0), dict[Run, float](), dict[Run, dict[str, int]]()

    def run_at(point: dict[str, int]) -> Run:
        settings = {name: method.grid[name][place] for name, place in point.items()}
        return run_of(method, settings, method.ranks[0], STEPS // 2, 0, results.task)

    def finished() -> dict[Run, dict[str, float]]:
        return {
            run: {name: method.grid[name][place] for name, place in points[run].items()}
            for run in sorted(losses, key=losses.__getitem__)
        }

    while True:
        best = points[min(losses, key=losses.__getitem__)] if losses else start
        moves = [(name, best[name] + by) for name in best for by in (-1, 1) if best[name] + by in method.grid[name]]
        ahead = [best, *({**best, name: place} for name, place in moves)]
        unseen = [point for point in ahead if run_at(point) not in losses]
        run_before = [point for point in unseen if results.loss(run_at(point)) is not None]
        if not run_before:
            return finished(), run_at(unseen[0]) if unseen else None
        run, point = run_at(run_before[0]), run_before[0]
        loss = results.loss(run)
        assert loss is not None
        losses[run], points[run] = loss, point


def best_settings(method: Method, results: Results) -> dict[str, float]:
    """Return the best settings of the sweep so far."""
    return next(iter(swept(method, results)[0].values()), {})


def survivors(results: Results) -> list[str]:
    """Return the methods that no other one beats by MARGIN with as few bytes, at the best settings of their sweeps."""
    best = {}
    for name, method in METHODS.items():
        for run in list(swept(method, results)[0])[:1]:
            entry = results.runs[run.key]
            best[name] = (entry.get("bytes_per_sample", 0), loss_in(entry), method.ranks != (1,))
    return [
        name
        for name, (sent, loss, exchanges) in best.items()
        if not exchanges
        or not any(other <= sent and less < loss * (1 - MARGIN) for other, less, also in best.values() if also)
    ]


def ready(results: Results) -> Iterator[Run]:
    """Yield the runs that can be made now, in order: the next of each sweep, or those of the first stage left."""
    sweeps = [
        (len(finished), place, run)
        for place, method in enumerate(METHODS.values())
        for finished, run in [swept(method, results)]
        if run is not None
    ]
    yield from (run for *_, run in sorted(sweeps, key=lambda sweep: sweep[:2]))
    if sweeps:
        return
    left = [METHODS[name] for name in survivors(results)]
    for stage in range(max(len(method.ranks) for method in left)):
        runs = [
            run_of(method, best_settings(method, results), method.ranks[stage], STEPS, seed, results.task)
            for method in left
            if stage < len(method.ranks)
            for seed in range(3)
        ]
        yield from (run for run in runs if results.loss(run) is None)


def work(results: Results, seconds: float) -> None:
    """Make the runs of the plan that no other process makes, and wait for those on which the next ones depend."""
    torch.set_num_threads(1)
    command = ["git", "-C", str(ROOT), "describe", "--always", "--dirty", "--abbrev=10"]
    commit = subprocess.run(command, capture_output=True, text=True).stdout.strip()
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        results.read()
        runs = [*ready(results)]
        if not runs:
            return
        for run in runs:
            with results.claimed(run) as ours:
                if ours:
                    make(run, results, commit)
                    break
        else:
            time.sleep(10)


def make(run: Run, results: Results, commit: str) -> None:
    """Make one run and add its result."""
    print(f"{time.strftime('%H:%M:%S')} {run.exchange} {run.optimizer} lr={run.lr:g} ", end="", flush=True)
    print(f"ranks={run.ranks} steps={run.steps} seed={run.seed}", end=": ", flush=True)
    try:
        result = train(run)
    except dgcopt.DivergenceError as error:
        result = {"loss": None, "error": str(error)[:200]}
    results.add(run, result, commit)
    memory = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20
    print(f"{result['loss']} in {result.get('cpu_seconds')} s of CPU, {memory:.1f} GB", flush=True)


# -- reports -----------------------------------------------------------------------------------------------------------


def loss_in(entry: dict[str, Any]) -> float:
    return math.inf if entry["loss"] is None else float(entry["loss"])


def status(results: Results) -> None:
    """Print the losses of all sweeps, and the next run."""
    print(f"{len(results.runs)} runs in {results.path}; task {results.task}")
    for name, method in METHODS.items():
        print(f"{name:45} {told(swept(method, results)[0], results)}")
    print(f"next: {next(ready(results), 'nothing')}")


def told(runs: dict[Run, dict[str, float]], results: Results) -> str:
    """The settings of runs and their losses."""
    return ", ".join(f"{shown(settings)}: {loss_in(results.runs[run.key]):.3f}" for run, settings in runs.items())


def shown(settings: dict[str, float]) -> str:
    """The learning rate, then the outer one and the momentum if there are any."""
    return " / ".join(f"{value:g}" for value in settings.values())


def fewer(entry: dict[str, Any]) -> str:
    """The cells of bytes per sample, and how many times fewer they are than with fp32 and bf16."""
    sent, dense = entry["bytes_per_sample"], entry["dense_bytes_per_sample"]
    return f"{sent:,.0f} | {dense / sent:,.0f}x | {dense / 2 / sent:,.1f}x" if sent else "0 | | "


def table_of_sweeps(results: Results) -> str:
    """All sweeps in markdown; best settings that have a neighbour which has not run yet are marked with "..."."""
    lines = [
        f"{STEPS // 2} steps, seed 0; settings are lr, or lr / outer lr / outer momentum\n",
        "| method | ranks | bytes per sample | vs fp32 | vs bf16 | best | loss | vs dense | all settings: loss |",
        "|---|---|---|---|---|---|---|---|---|",
    ]
    dense = min((loss_in(results.runs[run.key]) for run in swept(METHODS["dense"], results)[0]), default=math.nan)
    for name, method in METHODS.items():
        found, ahead = swept(method, results)
        if not found:
            continue
        best, settings = next(iter(found.items()))
        entry, open_end = results.runs[best.key], "" if ahead is None else " ..."
        cells = f"{fewer(entry)} | {shown(settings)}{open_end} | {loss_in(entry):.3f}"
        lines.append(
            f"| {name} | {method.ranks[0]} | {cells} | {loss_in(entry) / dense - 1:+.1%} | {told(found, results)} |"
        )
    return "\n".join(lines)


def paired(method: Method, results: Results, ranks: int) -> list[dict[str, Any]]:
    """Return the entries of the best settings at all steps, by seed."""
    if not (settings := best_settings(method, results)):
        return []
    runs = [run_of(method, settings, ranks, STEPS, seed, results.task) for seed in range(3)]
    return [results.runs[run.key] for run in runs if run.key in results.runs]


def table_of_seeds(results: Results, ranks: int) -> str:
    """The best settings in markdown: mean loss, and mean (range) of the change against dense, paired by seed."""
    lines = [
        f"{ranks} ranks, {STEPS} steps\n",
        "| method | settings | seeds | bytes per sample | vs fp32 | vs bf16 | loss | vs dense, paired |",
        "|---|---|---|---|---|---|---|---|",
    ]
    dense = {entry["run"]["seed"]: loss_in(entry) for entry in paired(METHODS["dense"], results, ranks)}
    for name, method in METHODS.items():
        at = 1 if method.ranks == (1,) else ranks  # training alone is the other end of the scale
        if not (found := paired(method, results, at)):
            continue
        gaps = [loss_in(e) / dense[e["run"]["seed"]] - 1 for e in found if e["run"]["seed"] in dense]
        gap = f"{statistics.mean(gaps):+.1%} ({min(gaps):+.1%} to {max(gaps):+.1%})" if gaps else ""
        loss = statistics.mean(map(loss_in, found))
        settings = shown(best_settings(method, results))
        lines.append(f"| {name} | {settings} | {len(found)} | {fewer(found[0])} | {loss:.3f} | {gap} |")
    return "\n".join(lines)


def plot(results: Results, path: Path) -> None:
    """Loss over bytes per sample at the best settings: of the sweeps, and of the paired seeds above them."""
    import matplotlib

    matplotlib.use("Agg")  # no display needed
    import matplotlib.pyplot as plt

    figure, panel = plt.subplots(figsize=(9, 5.5))
    for number, (name, method) in enumerate(METHODS.items()):
        best = [results.runs[run.key] for run in list(swept(method, results)[0])[:1]]
        seeds = paired(method, results, method.ranks[0])
        colour = f"C{number % 10}"
        for entries, style in ((best, "o"), (seeds, "D")):
            losses = [loss_in(entry) for entry in entries if entry["loss"] is not None]
            if not losses:
                continue
            mean, sent = statistics.mean(losses), entries[0]["bytes_per_sample"]
            if not sent:
                line, told = "--" if style == "o" else "-", f"{name}, {entries[0]['run']['steps']} steps"
                panel.axhline(mean, color="gray", linestyle=line, linewidth=1, label=told)
                continue
            bar = [[mean - min(losses)], [max(losses) - mean]]
            fill = "none" if style == "o" else colour
            panel.errorbar(sent, mean, yerr=bar, fmt=style, color=colour, markerfacecolor=fill, capsize=3)
            panel.annotate(name, (sent, mean), xytext=(5, 4), textcoords="offset points", fontsize=7)
    panel.set_xscale("log")
    panel.margins(x=0.2)  # room for names
    panel.set(xlabel="bytes sent per rank and sample", ylabel="validation loss")
    panel.set_title(f"Best settings. Circles: {STEPS // 2} steps, one seed; diamonds: {STEPS} steps", fontsize=10)
    panel.grid(alpha=0.3, which="both")
    if panel.get_legend_handles_labels()[0]:
        panel.legend(fontsize=8)
    figure.tight_layout()
    figure.savefig(path, dpi=120)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("command", choices=["run", "status", "table"])
    parser.add_argument("--results", type=Path, default=RESULTS, help="file of finished runs")
    parser.add_argument("--seconds", type=float, default=math.inf, help="start no run after so many seconds")
    parser.add_argument("--task", help="report an earlier version of the task, by the id in its lines")
    parser.add_argument("--plot", type=Path, help="file for a picture of loss over bytes")
    arguments = parser.parse_args()
    if arguments.task and arguments.command == "run":
        parser.error("--task is for reports: runs are of the current version")
    results = Results(arguments.results, arguments.task)
    if arguments.command == "run":
        work(results, arguments.seconds)
    elif arguments.command == "status":
        status(results)
    else:
        print(table_of_sweeps(results))
        for ranks in sorted({ranks for method in METHODS.values() for ranks in method.ranks} - {1}):
            print(f"\n{table_of_seeds(results, ranks)}")
    if arguments.plot:
        plot(results, arguments.plot)


if __name__ == "__main__":
    main()
