"""The losses of bench_time_to_loss.py over steps, of simulated ranks, and the records of all that it has measured.

Every method gets the same number of learning rates to choose from, and the same number of steps: seed 0 leaves two
rates, of which the mean loss of all seeds chooses one. A method that has not reached the loss of dense training by then
may take 1.5 and 2 times as many steps, along the same schedule stretched. The loss to reach is the final one of dense
training with the same seed, at its own best learning rate.
"""

from __future__ import annotations

import copy
import fcntl
import itertools
import json
import math
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from frontier.training import outer
from naive_dgc import NaiveDGC
from torch import Tensor, nn
from torch.optim import SGD, AdamW, Optimizer

import dgcopt
from dgcopt.tasks.digits import Digits, DigitsCNN
from dgcopt.tasks.stdlib_gpt import CharGPT, StdlibText

RECORDS = Path(__file__).resolve().parents[2] / "docs" / "time_to_loss.jsonl"
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
        (
            *(DENSE, "BF16()", POWERSGD, ORIGINAL, "OneBit()", "LocalSGD(every=10)", "LocalSGD(every=50)"),
            *("DGC.compact(warmup=None)", "DGC(ratio=0.01, warmup=None)"),
            "DiLoCo(50, outer(1, 0), compression=OneBit(), unsent='local')",
        ),
    ),
    "stdlib_gpt": Task(
        lambda: CharGPT(),
        lambda: (StdlibText("train"), StdlibText("validation", max_bytes=16_000)),
        lambda params, lr: AdamW(params, lr, betas=(0.9, 0.95), weight_decay=0.1),
        *((1e-3, 2e-3, 4e-3, 8e-3), (0.05, 0.1, 0.2, 0.4), 2, 300),
        (
            *(DENSE, "BF16()", POWERSGD, ORIGINAL, "OneBit()", "LocalSGD(every=10)"),
            "TopK(ratio=0.01, values='int2', indices='rice')",
            "TopK(ratio=0.01, values='int2', indices='rice', first_moment='residual')",
        ),
    ),
}
"""Methods beside those of the peers are measured as they are, and whatever `auto` chooses needs its loss among them."""


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


def exchange_of(method: str) -> dgcopt.Compressor | dgcopt.Averaging:
    """Return the compressor or the averaging rule that a method names."""
    if method == POWERSGD:
        from torch.distributed.algorithms.ddp_comm_hooks.powerSGD_hook import PowerSGDState, powerSGD_hook

        state = PowerSGDState(None, matrix_approximation_rank=2, start_powerSGD_iter=2)
        return dgcopt.from_ddp_hook(state, powerSGD_hook)
    return eval(method, {**vars(dgcopt), "outer": outer})


def wrapped(task: Task, method: str, model: nn.Module, lr: float, comm: dgcopt.Comm | None = None) -> Optimizer:
    """Return a rank's optimizer with the exchange that a method names."""
    optimizer, exchange = task.optimizer(model.parameters(), lr), exchange_of(method)
    if isinstance(exchange, dgcopt.Averaging):
        return exchange.attach(optimizer, model.named_parameters(), comm)
    return dgcopt.DistributedOptimizer(optimizer, model.named_parameters(), exchange, comm=comm)


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
    """Return the validation loss after every `EVERY` steps of simulated ranks, NaN from where weights diverge."""
    torch.manual_seed(seed)
    models = [task.model()]
    models += [copy.deepcopy(models[0]) for _ in range(size - 1)]
    training, validation = task.data()
    if method == ORIGINAL:
        naive = Naive(models, lr)
        optimizers: list[Any] = list(naive.ranks)
    else:
        optimizers = [
            wrapped(task, method, model, lr, comm)
            for model, comm in zip(models, dgcopt.simulated_world(size), strict=True)
        ]
    losses, steps = [], round(task.steps * length)
    for step, (inputs, targets) in zip(range(steps), batches(training, task.batch * size, seed), strict=False):
        for rank, (model, optimizer) in enumerate(zip(models, optimizers, strict=True)):
            for group in optimizer.param_groups:
                group["lr"] = lr * rate_at(step, steps)
            optimizer.zero_grad()
            cross_entropy(model(inputs[rank::size]), targets[rank::size]).backward()
        try:
            for optimizer in [naive] if method == ORIGINAL else optimizers:
                optimizer.step()
        except dgcopt.DivergenceError:  # averages of NaN are refused, and sums of NaN are not
            return losses + [math.nan] * (steps // EVERY - len(losses))
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
