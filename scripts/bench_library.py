"""Every compressor of the library in one table: bytes, accuracy, loss over seeds, and what it costs a CPU.

    python scripts/bench_library.py                        # digits
    python scripts/bench_library.py --task stdlib_gpt      # a small GPT
    python scripts/bench_library.py --compressors none dgc:ratio=0.01 topk:values=int2,indices=rice

Ranks are simulated, a process per run and a run per core, which gives the bits of real ranks. Tasks and compressors
come from configs/, with settings after a colon, also of the optimizer; all compressors of one seed start from the same
weights and see the same batches. Bytes are all that one rank sends, biases, norms and warm-ups included. CPU time is
what compressing and decoding take per million parameters and step, among two ranks, measured apart on a model of 4
million before anything else runs.

Prints a table, writes it as JSON under runs/, and draws loss over bytes with --plot. Runs whose results are under runs/
are not repeated.
"""

from __future__ import annotations

import argparse
import copy
import json
import math
import multiprocessing
import os
import re
import statistics
import sys
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

import dgcopt
from dgcopt.gradients.synchronised import synchronised

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))
from train import cross_entropy, make_parser  # noqa: E402

PLANS: dict[str, dict[str, Any]] = {
    "digits": {"workers": 4, "batch_size": 16, "steps": 330, "warmup": 33},
    "stdlib_gpt": {"workers": 2, "batch_size": 16, "steps": 300, "warmup": 0},
}
"""What a run of a task is: learning rates warm up over so many steps, and then fall to zero along a cosine."""

COMPRESSORS: dict[str, list[str]] = {
    "digits": [
        "none",
        "bf16",
        "dgc",
        "dgc_compact",
        "topk",
        "randomk",
        "randomk:ratio=0.1,optimizer.momentum=0,optimizer.nesterov=false,optimizer.lr=0.05",
        "threshold",
        "chunked",
        "cltk",
        "csc",
        "csc:chunk=32768,warmup=null",
        "demo",
        "powersgd",
        "powersgd_batched",
        "powersgd_batched:rank=1",
        "fp16_powersgd",
        "bytegrad",
        "onebit",
        "terngrad",
        "qsgd",
        "natural",
        "signsgd",
        "ef_signsgd",
        "signum",
    ],
    "stdlib_gpt": [
        "none",
        "none:optimizer.betas=[0.0,0.95]",
        "topk:source=gradient",
        "topk",
        "topk:optimizer.betas=[0.0,0.95]",
        "topk:optimizer.betas=[0.0,0.95],ratio=0.09,values=int2,indices=rice",
        "topk:optimizer.betas=[0.0,0.95],ratio=0.009,values=int2,indices=rice",
        "chunked:optimizer.betas=[0.0,0.95]",
        "powersgd",
        "qadam",
        "onebit_adam",
    ],
}
"""What is compared, dense training first."""

Train = Callable[[str, str, int, dict[str, Any]], dict[str, Any]]
"""A run: what comes of a task, a method, a seed and a plan."""


def split(changes: str) -> list[str]:
    """Return the settings after the colon of a method, which commas outside brackets separate."""
    return re.split(r",(?![^\[]*\])", changes) if changes else []


def settings_of(task: str, method: str) -> Any:
    """The objects that the configs of a task and a method describe: a file of configs/compressors or configs/averaging,
    with settings after a colon, or "alone"."""
    name, _, changes = method.partition(":")
    kind = "averaging" if (ROOT / f"configs/averaging/{name}.yaml").exists() else "compressor"
    arguments = [f"--config={ROOT}/configs/tasks/{task}.yaml"]
    if name != "alone":
        arguments.append(f"--config={ROOT}/configs/{kind.replace('compressor', 'compressors')}/{name}.yaml")
    for change in split(changes):
        arguments.append(f"--{change}" if change.startswith("optimizer.") else f"--{kind}.init_args.{change}")
    parser = make_parser()
    return parser.instantiate(parser.parse_args(arguments))


def batches(data: Any, per_step: int, steps: int, seed: int) -> Iterator[tuple[Tensor, Tensor]]:
    """As many batches, in an order drawn anew each epoch."""
    epoch, left = 0, []
    for _ in range(steps):
        if len(left) < per_step:
            left = torch.randperm(len(data), generator=torch.Generator().manual_seed(seed + epoch)).tolist()
            epoch += 1
        chosen, left = left[:per_step], left[per_step:]
        inputs, targets = zip(*(data[index] for index in chosen), strict=True)
        yield torch.stack(inputs), torch.stack(targets)


def run_all(train: Train, jobs: list[tuple[str, str, int, dict[str, Any]]], folder: Path, at_a_time: int) -> list[Any]:
    """What `train` returns for each task, method, seed and plan, unless it is there already; a process per run."""
    folder.mkdir(parents=True, exist_ok=True)
    if earlier := len(list(folder.glob("*-[0-9]*.json"))):
        print(f"{earlier} earlier runs in {folder} are kept: delete those of changed code or configs", file=sys.stderr)
    began, runs = time.perf_counter(), []
    with ProcessPoolExecutor(at_a_time, multiprocessing.get_context("spawn")) as pool:  # which hands on SystemExit
        for run in pool.map(run_once, [(train, job, folder) for job in jobs]):
            runs.append(run)
            took = time.perf_counter() - began
            print(f"{len(runs)}/{len(jobs)} {run['method']} seed {run['seed']}, {took:.0f} s", file=sys.stderr)
    return runs


def run_once(given: tuple[Train, tuple[str, str, int, dict[str, Any]], Path]) -> dict[str, Any]:
    train, (task, method, seed, plan), folder = given
    path = folder / f"{re.sub('[^a-z0-9_.]+', '-', method)}-{seed}.json"
    if not path.exists():
        torch.set_num_threads(1)
        torch.manual_seed(seed)
        path.write_text(json.dumps({"method": method, "seed": seed, **train(task, method, seed, plan)}))
    return json.loads(path.read_text())


def train(task: str, method: str, seed: int, plan: dict[str, Any]) -> dict[str, Any]:
    """What comes of a compressor with a seed."""
    settings, workers, steps = settings_of(task, method), plan["workers"], plan["steps"]
    models = [copy.deepcopy(settings["model"]) for _ in range(workers)]
    epoch = len(settings["train_data"]) // (plan["batch_size"] * workers)
    settings["compressor"].set_steps_per_epoch(epoch)
    optimizers: list[Any] = [
        dgcopt.DistributedOptimizer(
            settings["optimizer"](model.parameters()), model.named_parameters(), settings["compressor"], comm=comm
        )
        for model, comm in zip(models, dgcopt.simulated_world(workers), strict=True)
    ]
    curve = learn(models, optimizers, settings, plan, seed)
    telemetry = optimizers[0].telemetry
    return {
        "sent_bytes": telemetry.sent_bytes / steps,
        "ratio_bf16": telemetry.dense_bytes / 2 / max(1, telemetry.sent_bytes),
        "curve": curve,
        **evaluate(models[0], settings["test_data"]),
    }


def learn(
    models: list[nn.Module], optimizers: list[Any], settings: Any, plan: dict[str, Any], seed: int
) -> list[float]:
    """Take a model per rank through a run, and return the mean loss of each step."""
    workers, steps, warmup = plan["workers"], plan["steps"], plan["warmup"]
    peak = optimizers[0].param_groups[0]["lr"] * (workers if settings["scale_lr"] else 1)
    curve = []
    for step, (inputs, targets) in enumerate(
        batches(settings["train_data"], plan["batch_size"] * workers, steps, seed)
    ):
        warm = min(1.0, (step + 1) / warmup) if warmup else 1.0
        lr = peak * warm * (1 + math.cos(math.pi * step / steps)) / 2
        losses = []
        for rank, (model, optimizer) in enumerate(zip(models, optimizers, strict=True)):
            optimizer.param_groups[0]["lr"] = lr
            optimizer.zero_grad()
            loss = cross_entropy(model(inputs[rank::workers]), targets[rank::workers])
            loss.backward()
            losses.append(loss.item())
        for optimizer in optimizers:
            optimizer.step()
        curve.append(statistics.mean(losses))
    return curve


@torch.no_grad()
def evaluate(model: nn.Module, data: Any) -> dict[str, float]:
    """Loss and accuracy over the test data."""
    model.eval()
    loss = correct = count = 0.0
    for start in range(0, len(data), 64):
        pairs = [data[index] for index in range(start, min(start + 64, len(data)))]
        inputs, targets = (torch.stack(part) for part in zip(*pairs, strict=True))
        output = model(inputs)
        loss += cross_entropy(output, targets, reduction="sum").item()
        correct += (output.argmax(-1) == targets).sum().item()
        count += targets.numel()
    return {"test_loss": loss / count, "accuracy": correct / count}


class Timed(dgcopt.compressors.Wrapper):
    """Adds up the seconds that a compressor takes between its collectives."""

    seconds = 0.0

    def exchange(self, grad: Tensor, ctx: dgcopt.Context) -> dgcopt.compressors.GradientExchange:
        exchange, result = self.inner.exchange(grad, ctx), None
        while True:
            start = time.perf_counter()
            try:
                collective = exchange.send(result)
            except StopIteration as stop:
                return stop.value
            finally:
                self.seconds += time.perf_counter() - start
            result = yield collective


def cpu_milliseconds(task: str, compressor: str, warmups: int = 4, steps: int = 10) -> float:
    """What a rank takes to compress and decode, per million parameters and step."""
    torch.set_num_threads(1)
    optimizers, models = [], []
    for comm in dgcopt.simulated_world(2):
        settings = settings_of(task, compressor)
        settings["compressor"].set_steps_per_epoch(1)
        torch.manual_seed(0)
        model = nn.Sequential(*(nn.Linear(1000, 1000) for _ in range(4)))
        made = settings["optimizer"](model.parameters())
        timed = Timed(settings["compressor"])
        optimizers.append(dgcopt.DistributedOptimizer(made, model.named_parameters(), timed, comm=comm))
        models.append(model)
    elements, times = sum(p.numel() for p in models[0].parameters()), []
    for step in range(warmups + steps):
        before = optimizers[0].compressor.seconds
        for rank, (model, optimizer) in enumerate(zip(models, optimizers, strict=True)):
            if step == warmups:  # go to where every warm-up is over
                engine = synchronised(optimizer).engine
                engine.restore({**engine.state(), "step": 10**6})
                for state in optimizer.state.values():
                    if "step" in state:
                        state["step"].fill_(10**6)
            optimizer.zero_grad()
            torch.manual_seed(10 * step + rank)
            model(torch.randn(4, 1000)).square().mean().backward()
        for optimizer in optimizers:
            optimizer.step()
        times.append(optimizers[0].compressor.seconds - before)
    return statistics.median(times[warmups:]) * 1e3 / (elements / 1e6)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--task", default="digits", choices=sorted(PLANS))
    parser.add_argument("--compressors", nargs="+", help="files of configs/compressors, with settings after a colon")
    parser.add_argument("--seeds", nargs="+", type=int, default=[0, 1, 2])
    parser.add_argument("--steps", type=int, help="of each run")
    parser.add_argument("--workers", type=int, help="simulated ranks")
    parser.add_argument("--batch-size", type=int, help="samples per worker and step")
    parser.add_argument("--jobs", type=int, default=os.cpu_count(), help="runs at a time")
    parser.add_argument("--plot", type=Path, help="file for a picture of loss over bytes")
    parser.add_argument("--curves", type=Path, help="file for a picture of training loss over steps")
    arguments = parser.parse_args()
    plan = dict(PLANS[arguments.task])
    plan |= {key: value for key in ("steps", "workers", "batch_size") if (value := getattr(arguments, key))}
    plan["warmup"] = min(plan["warmup"], plan["steps"] // 10)
    names = arguments.compressors or COMPRESSORS[arguments.task]

    folder = ROOT / "runs" / "bench_library" / "-".join([arguments.task, *map(str, plan.values())])
    milliseconds = {name: cpu_milliseconds(arguments.task, name) for name in names}
    jobs = [(arguments.task, name, seed, plan) for name in names for seed in arguments.seeds]
    runs = run_all(train, jobs, folder, arguments.jobs)
    rows = [
        {"compressor": name, "cpu_ms": milliseconds[name], "runs": [r for r in runs if r["method"] == name]}
        for name in names
    ]
    path = folder / "table.json"
    path.write_text(json.dumps({"task": arguments.task, "plan": plan, "rows": rows}))

    title = f"{arguments.task}, {plan['workers']} workers, {plan['steps']} steps"
    print(f"{title}, seeds {arguments.seeds}: mean (range)\n")
    print("| compressor | bytes per step | vs bf16 | accuracy | final loss | CPU ms per million |")
    print("|---|---|---|---|---|---|")
    for row in rows:
        of = {key: [run[key] for run in row["runs"]] for key in ("sent_bytes", "ratio_bf16", "accuracy", "test_loss")}
        print(
            f"| {row['compressor']} | {statistics.mean(of['sent_bytes']):,.0f} "
            f"| {statistics.mean(of['ratio_bf16']):.1f}x | {spread(of['accuracy'], '{:.2%}')} "
            f"| {spread(of['test_loss'], '{:.3f}')} | {row['cpu_ms']:.1f} |"
        )
    print(f"\n{path.relative_to(ROOT)}")
    if arguments.plot:
        plot(rows, title, arguments.plot)
    if arguments.curves:
        plot_curves(rows, title, arguments.curves)


def spread(values: list[float], form: str) -> str:
    """Mean and range."""
    return f"{form.format(statistics.mean(values))} ({form.format(min(values))} - {form.format(max(values))})"


def plot(rows: list[dict[str, Any]], title: str, path: Path) -> None:
    """Final loss over bytes: a point per compressor, its bar from the best seed to the worst."""
    import matplotlib

    matplotlib.use("Agg")  # no display needed
    import matplotlib.pyplot as plt

    figure, panel = plt.subplots(figsize=(9, 5.5))
    for row in rows:
        losses, sent = [run["test_loss"] for run in row["runs"]], row["runs"][0]["sent_bytes"]
        mean = statistics.mean(losses)
        bar = [[mean - min(losses)], [max(losses) - mean]]
        panel.errorbar(sent, mean, yerr=bar, fmt="o", capsize=3)
        label = row["compressor"].replace("optimizer.", "")
        panel.annotate(label, (sent, mean), xytext=(5, 4), textcoords="offset points", fontsize=7)
    panel.set(title=title, xlabel="bytes sent per rank and step, warm-up included", ylabel="final test loss")
    panel.margins(x=0.2)
    panel.set_xscale("log")
    all_losses = [run["test_loss"] for row in rows for run in row["runs"]]
    if max(all_losses) > 3 * min(all_losses):
        panel.set_yscale("log")
    panel.grid(alpha=0.3, which="both")
    figure.tight_layout()
    figure.savefig(path, dpi=120)


def plot_curves(rows: list[dict[str, Any]], title: str, path: Path, over: int = 50) -> None:
    """Training loss of the first seed, the mean `over` so many steps."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    figure, panel = plt.subplots(figsize=(8, 4.5))
    for row in rows:
        run = row["runs"][0]
        starts = range(0, len(run["curve"]), over)
        means = [statistics.mean(run["curve"][start : start + over]) for start in starts]
        label = f"{row['compressor']}: {run['sent_bytes']:,.0f} bytes per step"
        panel.plot([start + over / 2 for start in starts], means, label=label)
    panel.set(title=title, xlabel="step", ylabel=f"training loss, mean of {over} steps")
    panel.grid(alpha=0.3)
    panel.legend(fontsize=8)
    figure.tight_layout()
    figure.savefig(path, dpi=120)


if __name__ == "__main__":
    main()
