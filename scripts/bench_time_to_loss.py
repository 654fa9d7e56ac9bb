"""Seconds until the final loss of dense training is first reached, by exchange, link and number of ranks.

    python scripts/bench_time_to_loss.py losses   # loss over steps, of simulated ranks: hours, on a busy machine too
    python scripts/bench_time_to_loss.py steps    # seconds of a step over shaped links: as root, minutes, quiet cores
    python scripts/bench_time_to_loss.py check    # some runs of real ranks over real links, from start to end
    python scripts/bench_time_to_loss.py table --plot docs/time_to_loss.png

A time is a product of two measurements. Loss over steps does not depend on the link: it is that of simulated ranks,
which compute the bits of real ones. Seconds of a step do not depend on the loss: real ranks, each in a network
namespace of its own with links that tc shapes, exchange gradients of the model's shapes. Their forward and backward
are sleeps of the time that one core takes for them alone, divided by --speeds, since 8 ranks on 2 cores would slow
each other; all else runs. `check` trains for real, and prints its loss beside the simulated one, and its seconds.

Every method gets the same number of learning rates to choose from, and the same number of steps: seed 0 leaves two
rates, of which the mean loss of all seeds chooses one. A method that has not reached the loss of dense training by then
may take 1.5 and 2 times as many steps, along the same schedule stretched. The loss to reach is the final one of dense
training with the same seed, at its own best learning rate.
`auto` has the loss of the exchange that it has chosen in the cell, and its seconds include those until the choice.

Records are appended to docs/time_to_loss.jsonl, and those there are not repeated: any command may be ended at any time.
"""

from __future__ import annotations

import argparse
import copy
import fcntl
import itertools
import json
import math
import os
import signal
import statistics
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import bench_advice
import torch
import torch.distributed as dist
from bench_step import start_horovod
from links import Loopback, Namespaces, lacking
from naive_dgc import NaiveDGC
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.optim import SGD, AdamW, Optimizer

import dgcopt
from dgcopt.tasks.digits import Digits, DigitsCNN
from dgcopt.tasks.stdlib_gpt import CharGPT, StdlibText
from dgcopt.tuning.doctor import profile_model
from dgcopt.tuning.models import Model

ROOT = Path(__file__).resolve().parent.parent
RECORDS = ROOT / "docs" / "time_to_loss.jsonl"
LINKS = ("100mbit", "1gbit", "none")
SIZES = (4, 8)
SEEDS = (0, 1, 2)
LENGTHS = (1.0, 1.5, 2.0)
EVERY = 10
"""Steps from one measurement of the loss to the next."""
OVER = 3
"""Measurements whose mean counts as the loss at the last of them."""

Record = dict[str, Any]


@dataclass(frozen=True)
class Task:
    """A model, its data and its training.

    Attributes:
        model: returns the model.
        data: returns training and validation data.
        optimizer: returns the optimizer of parameters and learning rate.
        rates: learning rates to choose from; those of SGD for the original DGC, which knows no other optimizer.
        batch: samples of a rank in a step.
        steps: of dense training.
        methods: the exchanges whose losses are computed.
    """

    model: Callable[[], nn.Module]
    data: Callable[[], tuple[Any, Any]]
    optimizer: Callable[[Any, float], Optimizer]
    rates: Sequence[float]
    sgd_rates: Sequence[float]
    batch: int
    steps: int
    methods: Sequence[str]


DENSE = "NoCompression()"
POWERSGD, ORIGINAL, AUTO = "DDP PowerSGD", "original DGC", "auto"
SYSTEMS = {
    "DDP fp32": DENSE,
    "Horovod": DENSE,
    "DDP bf16": "BF16()",
    POWERSGD: POWERSGD,
    ORIGINAL: ORIGINAL,
}
"""Peers by name, and the method that has their loss over steps."""

SMALL_RATES = (0.02, 0.05, 0.1, 0.2)
TASKS = {
    "digits": Task(
        *(lambda: DigitsCNN(width=32), lambda: (Digits("train"), Digits("test"))),
        lambda params, lr: SGD(params, lr, momentum=0.9, nesterov=True, weight_decay=1e-4),
        *(SMALL_RATES, SMALL_RATES, 8, 400),
        (DENSE, "BF16()", POWERSGD, ORIGINAL, "DGC.compact(warmup=None)", "DGC(ratio=0.01, warmup=None)", "OneBit()"),
    ),
    "stdlib_gpt": Task(
        lambda: CharGPT(),
        lambda: (StdlibText("train"), StdlibText("validation", max_bytes=16_000)),
        lambda params, lr: AdamW(params, lr, betas=(0.9, 0.95), weight_decay=0.1),
        *((1e-3, 2e-3, 4e-3, 8e-3), (0.05, 0.1, 0.2, 0.4), 2, 300),
        (DENSE, "BF16()", POWERSGD, ORIGINAL, "TopK(ratio=0.01, values='int2', indices='rice')", "OneBit()"),
    ),
}
"""Methods beside those of the peers are measured as they are, and whatever `auto` chooses needs its loss among them."""


# -- records -----------------------------------------------------------------------------------------------------------


def records(kind: str) -> list[Record]:
    """Return the records of a kind: a line that was not written to its end is left out."""
    found = []
    for line in RECORDS.read_text().splitlines() if RECORDS.exists() else ():
        try:
            found.append(json.loads(line))
        except json.JSONDecodeError:
            continue
    return [one for one in found if one["kind"] == kind]


def append(record: Record) -> None:
    """Append a record; other processes may do so too."""
    with RECORDS.open("a") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        file.write(json.dumps(record) + "\n")


def note(text: str) -> None:
    print(f"{time.strftime('%H:%M:%S')} {text}", file=sys.stderr, flush=True)


# -- loss over steps ---------------------------------------------------------------------------------------------------


def cross_entropy(outputs: Tensor, targets: Tensor) -> Tensor:
    return nn.functional.cross_entropy(outputs.flatten(0, -2), targets.flatten())


def batches(data: Any, size: int, seed: int) -> Iterator[tuple[Tensor, Tensor]]:
    """Yield batches for ever, in an order that is drawn anew each epoch."""
    for epoch in itertools.count():
        order = torch.randperm(len(data), generator=torch.Generator().manual_seed(1000 * seed + epoch)).tolist()
        for start in range(0, len(order) - size + 1, size):
            inputs, targets = zip(*(data[index] for index in order[start : start + size]), strict=True)
            yield torch.stack(inputs), torch.stack(targets)


@torch.no_grad()
def loss_of(model: nn.Module, data: Any) -> float:
    """Return the mean loss over validation data."""
    total, count = 0.0, 0
    for start in range(0, len(data), 64):
        pairs = [data[index] for index in range(start, min(start + 64, len(data)))]
        inputs, targets = (torch.stack(part) for part in zip(*pairs, strict=True))
        total += float(cross_entropy(model(inputs), targets)) * len(pairs)
        count += len(pairs)
    return total / count


def compressor_of(method: str) -> dgcopt.Compressor:
    """Return the compressor that a method names."""
    if method == POWERSGD:
        from torch.distributed.algorithms.ddp_comm_hooks.powerSGD_hook import PowerSGDState, powerSGD_hook

        state = PowerSGDState(None, matrix_approximation_rank=2, start_powerSGD_iter=2)
        return dgcopt.from_ddp_hook(state, powerSGD_hook)
    return eval(method, vars(dgcopt))


class Naive:
    """The original DGC among simulated ranks: one `step` for all."""

    def __init__(self, models: Sequence[nn.Module], lr: float) -> None:
        self.ranks = [NaiveDGC(model.parameters(), lr=lr, momentum=0.9) for model in models]

    @torch.no_grad()
    def step(self) -> None:
        """Exchange messages, and step every rank."""
        messages, vectors = zip(*(rank.compress() for rank in self.ranks), strict=True)
        total = torch.stack(vectors).sum(0)
        for rank in self.ranks:
            rank.decompress(messages, total.clone())
            for param in rank.params:
                param.add_(param.grad, alpha=-rank.param_groups[0]["lr"])


def rate_at(step: int, steps: int) -> float:
    """Return the factor of the learning rate: a tenth of the steps rising, then falling to zero along a cosine."""
    return min(1.0, 10 * (step + 1) / steps) * (1 + math.cos(math.pi * step / steps)) / 2


def train(task: Task, method: str, size: int, lr: float, length: float, seed: int) -> list[float]:
    """Return the validation loss after every `EVERY` steps of simulated ranks."""
    torch.manual_seed(seed)
    models = [task.model()]
    models += [copy.deepcopy(models[0]) for _ in range(size - 1)]
    training, validation = task.data()
    if method == ORIGINAL:
        naive = Naive(models, lr)
        optimizers: list[Any] = list(naive.ranks)
    else:
        optimizers = [
            dgcopt.DistributedOptimizer(
                *(task.optimizer(model.parameters(), lr), model.named_parameters(), compressor_of(method)), comm=comm
            )
            for model, comm in zip(models, dgcopt.simulated_world(size), strict=True)
        ]
    losses, steps = [], round(task.steps * length)
    for step, (inputs, targets) in zip(range(steps), batches(training, task.batch * size, seed), strict=False):
        for rank, (model, optimizer) in enumerate(zip(models, optimizers, strict=True)):
            for group in optimizer.param_groups:
                group["lr"] = lr * rate_at(step, steps)
            optimizer.zero_grad()
            cross_entropy(model(inputs[rank::size]), targets[rank::size]).backward()
        if method == ORIGINAL:
            naive.step()
        else:
            for optimizer in optimizers:
                optimizer.step()
        if (step + 1) % EVERY == 0:
            losses.append(loss_of(models[0], validation))
    return losses


def smooth(losses: Sequence[float]) -> list[float]:
    """Return the mean over the last `OVER` measurements at each; infinite where there are fewer or a loss is NaN."""
    return [
        value
        if (value := sum(losses[place - OVER + 1 : place + 1]) / OVER) == value and place + 1 >= OVER
        else math.inf
        for place in range(len(losses))
    ]


class Losses:
    """The losses known so far of a task among some ranks, and the learning rate that they choose."""

    def __init__(self, task: str, size: int) -> None:
        self.name, self.task, self.size = task, TASKS[task], size
        self.known: dict[tuple[str, float, float, int], list[float]] = {
            (one["method"], one["lr"], one["length"], one["seed"]): one["losses"]
            for one in records("losses")
            if (one["task"], one["ranks"]) == (task, size)
        }

    def rates(self, method: str) -> Sequence[float]:
        """Return the learning rates to choose from."""
        return self.task.sgd_rates if method == ORIGINAL else self.task.rates

    def need(self, method: str, lr: float, length: float, seed: int) -> list[float]:
        """Return the losses of a run, which is made now if it is not known."""
        key = method, lr, length, seed
        if key not in self.known:
            start = time.process_time()
            self.known[key] = train(self.task, method, self.size, lr, length, seed)
            about = {"task": self.name, "ranks": self.size, "method": method, "lr": lr, "length": length, "seed": seed}
            append({"kind": "losses", **about, "losses": [round(loss, 5) for loss in self.known[key]]})
            note(f"{about}: {self.known[key][-1]:.4f}, {time.process_time() - start:.0f} CPU s")
        return self.known[key]

    def best_rate(self, method: str) -> float:
        """Return the learning rate with the lowest mean final loss, of the two that are best by seed 0.

        One seed would choose rates with which other seeds diverge. Raises KeyError if a run is missing.
        """

        def final(lr: float, seeds: Sequence[int]) -> float:
            return sum(smooth(self.known[method, lr, 1.0, seed])[-1] for seed in seeds)

        two = sorted(self.rates(method), key=lambda lr: final(lr, SEEDS[:1]))[:2]
        return min(two, key=lambda lr: final(lr, SEEDS))

    def steps_to_target(self, method: str, seed: int) -> tuple[int, float] | None:
        """Return the steps until dense training's final loss is reached, and the length of that run.

        None if it is not reached in the longest run; raises KeyError if a run is missing.
        """
        lr, dense = self.best_rate(method), self.best_rate(DENSE)
        target = smooth(self.known[DENSE, dense, 1.0, seed])[-1]
        for length in LENGTHS:
            losses = smooth(self.known[method, lr, length, seed])
            reached = next((place for place, loss in enumerate(losses) if loss <= target), None)
            if reached is not None:
                return EVERY * (reached + 1), length
        return None

    def complete(self, method: str, seeds: Sequence[int]) -> None:
        """Make all runs of a method that are missing."""
        for seed in seeds:
            while True:
                try:
                    self.steps_to_target(method, seed)
                    break
                except KeyError as missing:
                    self.need(*missing.args[0])


def losses(arguments: argparse.Namespace) -> None:
    """Compute the losses over steps that are missing."""
    torch.set_num_threads(1)
    for size, name in itertools.product(arguments.ranks, arguments.tasks):
        known = Losses(name, size)
        for method in dict.fromkeys([DENSE, *(arguments.methods or known.task.methods)]):
            known.complete(method, arguments.seeds)


# -- seconds of a step -------------------------------------------------------------------------------------------------


def core_model(name: str) -> Model:
    """Return a task's model with the seconds that one core takes for its forward and backward, measured now."""
    task = TASKS[name]
    torch.manual_seed(0)
    inputs, _ = next(batches(task.data()[0], task.batch, 0))
    return profile_model(task.model(), [inputs], steps=20).model(name)


class Rank(bench_advice.Rank):
    """One rank that steps by any system, and trains for real for `check`."""

    def __init__(self, name: str, model: Model, seconds: float) -> None:
        super().__init__(model, seconds)
        self.name = name

    def system(self, name: str, module: nn.Module, lr: float = 1e-6) -> tuple[nn.Module, Optimizer]:
        """Return the module whose backward is run, and the optimizer that steps."""
        params = list(module.parameters())
        if name == ORIGINAL:
            return module, NaiveDGC(params, lr=lr, momentum=0.9)
        optimizer = TASKS[self.name].optimizer(params, lr)
        if name in bench_advice.BASELINES:
            return bench_advice.in_ddp(name, module), optimizer
        if name == POWERSGD:
            from torch.distributed.algorithms.ddp_comm_hooks.powerSGD_hook import PowerSGDState, powerSGD_hook

            # with several buckets the hook's exchanges meet those of the next bucket on Gloo, and it aborts
            ddp = DDP(module, bucket_cap_mb=1000)
            ddp.register_comm_hook(PowerSGDState(None, 2, start_powerSGD_iter=2), powerSGD_hook)
            return ddp, optimizer
        if name == "Horovod":
            return module, start_horovod().DistributedOptimizer(optimizer, module.named_parameters())
        method = dgcopt.Auto(allow=("exact", "rounded", "sparse", "delayed")) if name == AUTO else compressor_of(name)
        return module, dgcopt.DistributedOptimizer(optimizer, module.named_parameters(), method)

    def train(self, name: str, lr: float, length: float, seed: int) -> Any:
        """Train for real; return the validation loss and the seconds so far, after every `EVERY` steps."""
        torch.manual_seed(seed)
        task, size, rank = TASKS[self.name], self.comm.size, self.comm.rank
        model = task.model()
        module, optimizer = self.system(name, model, lr)
        training, validation = task.data()
        found, seconds, steps = [], 0.0, round(task.steps * length)
        for step, (inputs, targets) in zip(range(steps), batches(training, task.batch * size, seed), strict=False):
            start = time.perf_counter()
            for group in optimizer.param_groups:
                group["lr"] = lr * rate_at(step, steps)
            optimizer.zero_grad()
            cross_entropy(module(inputs[rank::size]), targets[rank::size]).backward()
            optimizer.step()
            seconds += time.perf_counter() - start
            if (step + 1) % EVERY == 0:
                found.append([loss_of(model, validation) if rank == 0 else 0.0, seconds])
                dist.barrier()
        return found


def ranks_of(name: str, model: Model, speed: float, network: Loopback) -> bench_advice.Ranks:
    """Start the ranks of a task."""
    given = json.dumps([name, model.shapes, list(model.shares), model.seconds, model.forward])
    return bench_advice.Ranks([__file__, "--serve", given, str(model.seconds / speed)], network)


def serve(given: str, seconds: str) -> None:
    """Carry out the commands of standard input, one line each."""
    name, shapes, *rest = json.loads(given)
    model = Model(name, {one: tuple(shape) for one, shape in shapes.items()}, *rest)
    bench_advice.serve(lambda: Rank(name, model, float(seconds)))


def cells(
    arguments: argparse.Namespace, wanted: Mapping[str, Sequence[str]]
) -> Iterator[tuple[str, int, float, str, str]]:
    """Yield every task, number of ranks, speed, system and link."""
    for name, size, speed in itertools.product(arguments.tasks, arguments.ranks, arguments.speeds):
        for system, link in itertools.product(wanted[name], arguments.links):
            yield name, size, speed, system, link


def systems_of(task: str) -> list[str]:
    """Return the systems whose steps are measured."""
    own = [method for method in TASKS[task].methods if method not in SYSTEMS.values()]
    return [*SYSTEMS, DENSE, *own, AUTO]


def steps(arguments: argparse.Namespace) -> None:
    """Measure the seconds of a step in the cells that are missing, as long as --limit allows."""
    end = time.monotonic() + arguments.limit
    known = {(one["task"], one["ranks"], one["speed"], one["system"], one["link"]) for one in records("steps")}
    wanted = {name: arguments.systems or systems_of(name) for name in arguments.tasks}
    missing = [cell for cell in cells(arguments, wanted) if cell not in known]
    for (name, size, speed), group in itertools.groupby(missing, key=lambda cell: cell[:3]):
        model = core_model(name)
        with Namespaces(size) as network, ranks_of(name, model, speed, network) as ranks:
            for *_, system, link in group:
                if time.monotonic() > end:
                    return note("the time is up: start this again for the rest")
                note(f"{name}, {size} ranks, speed {speed:g}, {link}: {system}")
                network.shape("none" if system != AUTO else link)
                built = ranks.call("build", system)[0]
                network.shape(link)
                taken = ranks.call("steps", arguments.seconds, arguments.steps)
                about = {"task": name, "ranks": size, "speed": speed, "system": system, "link": link}
                seconds = [max(one for one, _ in each) for each in zip(*taken, strict=True)]
                more = {"compute": model.seconds / speed, "load": round(os.getloadavg()[0], 1)}
                if system == AUTO:
                    more |= {
                        "choice": ranks.call("choice")[0][0],
                        "until": sum(one for one, _ in built),
                        "in": len(built),
                    }
                append({"kind": "steps", **about, "seconds": [round(one, 5) for one in seconds], **more})


def check(arguments: argparse.Namespace) -> None:
    """Train for real in some cells, with the learning rate and the length that the simulated losses have chosen."""
    for name, size, _, system, link in cells(arguments, dict.fromkeys(arguments.tasks, arguments.systems)):
        known, method = Losses(name, size), SYSTEMS.get(system, system)
        lr, reached = known.best_rate(method), known.steps_to_target(method, 0)
        if reached is None:
            note(f"{system}: {name} among {size} ranks does not reach the loss of dense training")
            continue
        with Namespaces(size) as network, ranks_of(name, core_model(name), 1.0, network) as ranks:
            network.shape(link)
            found = ranks.call("train", system, lr, reached[1], 0)[0]
        values = smooth([loss for loss, _ in found])
        at = reached[0] // EVERY - 1
        about = {"task": name, "ranks": size, "system": system, "link": link, "load": round(os.getloadavg()[0], 1)}
        about |= {"steps": reached[0], "seconds": found[at][1], "loss": values[at], "curve": found}
        append({"kind": "check", **about})
        simulated = smooth(known.known[method, lr, reached[1], 0])[at]
        print(f"{name}, {size} ranks, {link}, {system}: loss {values[at]:.4f} (simulated {simulated:.4f}) after "
              f"{reached[0]} steps and {found[at][1]:.1f} s")  # fmt: skip


# -- the product -------------------------------------------------------------------------------------------------------


def rows(arguments: argparse.Namespace) -> Iterator[Record]:
    """Yield, for every cell with both measurements, the seconds until the loss is reached, seed by seed."""
    for one in records("steps"):
        known = Losses(one["task"], one["ranks"])
        method = SYSTEMS.get(one["system"], one["system"])
        start, before = 0.0, 0
        if one["system"] == AUTO:
            method, start, before = one["choice"], one["until"], one["in"]
        step = statistics.median(one["seconds"])
        times: list[float] = []
        for seed in arguments.seeds:
            try:
                reached = known.steps_to_target(method, seed)
            except KeyError:
                continue
            times.append(math.inf if reached is None else start + step * max(0, reached[0] - before))
        yield {**one, "method": method, "step": step, "times": times}


def words(times: Sequence[float]) -> str:
    """Return the median of seconds with their range."""
    if not times:
        return "no losses yet"
    if not math.isfinite(statistics.median(times)):
        return f"not reached ({sum(map(math.isinf, times))} of {len(times)})"
    return f"{statistics.median(times):.1f} ({min(times):.1f} - {max(times):.1f})"


def show(systems: Sequence[str], cell: Callable[[str, str], str]) -> None:
    """Print a table with a row for each system and a column for each link."""
    print("| system |" + "".join(f" {link} |" for link in LINKS))
    print("|---" * (1 + len(LINKS)) + "|")
    for system in systems:
        print(f"| {system} | " + " | ".join(cell(system, link) for link in LINKS) + " |")


def show_steps(known: Losses, methods: Sequence[str], seeds: Sequence[int]) -> None:
    """Print the steps that each method takes to the loss, seed by seed, at its learning rate."""
    print("| method | learning rate |" + "".join(f" seed {seed} |" for seed in seeds))
    print("|---" * (2 + len(seeds)) + "|")
    for method in methods:
        try:
            reached = [known.steps_to_target(method, seed) for seed in seeds]
        except KeyError:
            continue
        cells = ["not reached" if one is None else f"{one[0]} of {one[1] * known.task.steps:.0f}" for one in reached]
        print(f"| {method} | {known.best_rate(method):g} | " + " | ".join(cells) + " |")


def table(arguments: argparse.Namespace) -> None:
    """Print the tables of each task and number of ranks, and draw the figure."""
    found = list(rows(arguments))
    for task, size, speed in sorted({(one["task"], one["ranks"], one["speed"]) for one in found}):
        group = [one for one in found if (one["task"], one["ranks"], one["speed"]) == (task, size, speed)]
        mine = {(one["system"], one["link"]): one for one in group}
        systems = list(dict.fromkeys(system for system, _ in mine))

        def step(system: str, link: str, mine: Mapping[tuple[str, str], Record] = mine) -> str:
            one = mine.get((system, link))
            chosen = f" {one['choice']} after {one['until']:.0f} s" if one and system == AUTO else ""
            return f"{1e3 * one['step']:.0f}{chosen}" if one else ""

        def seconds(system: str, link: str, mine: Mapping[tuple[str, str], Record] = mine) -> str:
            one, bf16 = mine.get((system, link)), mine.get(("DDP bf16", link))
            text = words(one["times"]) if one else ""
            if one and bf16 and one["times"] and bf16["times"]:
                gain = statistics.median(bf16["times"]) / statistics.median(one["times"])
                text += f", {gain:.1f}x" if gain > 0 and math.isfinite(gain) else ""
            return text

        print(f"\n**{task}, {size} ranks, forward and backward {1e3 * group[0]['compute']:.3g} ms**")
        print("\nMilliseconds of a step:\n")
        show(systems, step)
        print("\nSeconds to the loss, and how many times faster than with DDP's bf16:\n")
        show(systems, seconds)
        print("\nSteps to the loss, of those of the run:\n")
        show_steps(Losses(task, size), list(dict.fromkeys(one["method"] for one in group)), arguments.seeds)
    for one in records("check"):
        where = f"{one['task']}, {one['ranks']} ranks, {one['link']}, {one['system']}"
        print(f"check: {where}: loss {one['loss']:.4f} after {one['steps']} steps, {one['seconds']:.1f} s")
    if arguments.plot is not None:
        plot(found, arguments.plot)


def plot(found: Sequence[Record], path: Path) -> None:
    """Bars of seconds: a panel for each task, number of ranks and speed, a group for each link."""
    import matplotlib

    matplotlib.use("Agg")  # no display needed
    import matplotlib.pyplot as plt

    kinds = sorted({(one["task"], one["ranks"], one["speed"]) for one in found})
    systems = list(dict.fromkeys(one["system"] for one in found))
    figure, panels = plt.subplots(1, len(kinds), figsize=(2 + 3.2 * len(kinds), 4), squeeze=False, sharey=True)
    for panel, kind in zip(panels[0], kinds, strict=True):
        for place, system in enumerate(systems):
            heights = []
            for link in LINKS:
                times = [
                    statistics.median(one["times"])
                    for one in found
                    if (one["task"], one["ranks"], one["speed"]) == kind
                    and (one["system"], one["link"]) == (system, link)
                    and one["times"]
                ]
                heights.append(times[0] if times and math.isfinite(times[0]) else 0.0)
            at = [group + 0.8 * place / len(systems) for group in range(len(LINKS))]
            panel.bar(at, heights, 0.8 / len(systems), label=system)
        panel.set(title=f"{kind[0]}, {kind[1]} ranks, speed {kind[2]:g}", yscale="log")
        panel.set_xticks(
            [group + 0.4 for group in range(len(LINKS))], [link.replace("none", "unshaped") for link in LINKS]
        )
    panels[0][0].set_ylabel("seconds until the dense run's final loss")
    panels[0][-1].legend(fontsize=7)
    figure.tight_layout()
    figure.savefig(path, dpi=120)


COMMANDS = {"losses": losses, "steps": steps, "check": check, "table": table}


def main() -> None:
    if sys.argv[1:2] == ["--serve"]:
        return serve(*sys.argv[2:])
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("command", choices=COMMANDS)
    parser.add_argument("--tasks", nargs="+", default=[*TASKS], choices=TASKS)
    parser.add_argument("--ranks", nargs="+", type=int, default=SIZES)
    parser.add_argument("--seeds", nargs="+", type=int, default=SEEDS)
    parser.add_argument("--links", nargs="+", default=LINKS, help="rates as tc writes them")
    parser.add_argument("--methods", nargs="+", help="of losses: expressions such as 'OneBit()'")
    parser.add_argument("--systems", nargs="+", help="of steps; of check: those to train for real")
    parser.add_argument("--speeds", nargs="+", type=float, default=[1.0], help="of a device over one core here")
    parser.add_argument("--steps", type=int, default=10, help="most steps of a system in a cell")
    parser.add_argument("--seconds", type=float, default=2, help="fewer steps where they would take longer than this")
    parser.add_argument("--limit", type=float, default=540, help="seconds after which no cell is begun")
    parser.add_argument("--plot", type=Path, help="file for the figure of `table`")
    arguments = parser.parse_args()
    # an exit by signal, too, must leave the blocks that remove processes and namespaces
    signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(128 + number))
    if arguments.command in ("steps", "check") and (reason := lacking()):
        parser.error(f"no shaped links: {reason}")
    if arguments.command == "check" and not arguments.systems:
        arguments.systems, arguments.links, arguments.ranks = ["DDP bf16", "DGC.compact(warmup=None)"], ["100mbit"], [4]
        arguments.tasks = ["digits"]
    COMMANDS[arguments.command](arguments)


if __name__ == "__main__":
    main()
