"""A replica with an averaging thread, and ways to count, hold and watch its exchanges."""

from __future__ import annotations

import logging
import math
import threading
import time
from collections.abc import Callable
from pathlib import Path

import torch
from torch import Tensor, nn

from dgcopt import Comm
from dgcopt.averaging.asynchronous import AsyncAverage, AsyncRounds
from dgcopt.collectives import AllReduce, Exchange

INTERVAL = 0.01
PATIENCE = 30


class Counted(AsyncAverage):
    """Counts its exchanges, each of one bucket, and can hold them between their sum and their end."""

    def __init__(self, interval: float = INTERVAL, warmup_steps: int = 0) -> None:
        super().__init__(interval, warmup_steps)
        self._count = 0
        self._copies: list[Tensor] = []

    def exchange(self, x, ctx) -> Exchange:
        own = x.clone()
        result = yield from super().exchange(x, ctx)
        self._copies.append(own)
        self._count += 1
        for _ in range(100 * PATIENCE):
            if self._count <= OPEN[0]:
                break
            time.sleep(0.01)
        return result


OPEN = [math.inf]
"""So many exchanges may come to their end."""


class Replica:
    """Two layers, trained on gradients that differ over ranks and steps."""

    def __init__(self, comm: Comm, rule: AsyncAverage | None = None, lr: float = 0.1) -> None:
        torch.manual_seed(1)
        self.comm = comm
        self.model = nn.Sequential(nn.Linear(6, 5), nn.Tanh(), nn.Linear(5, 3)).double()
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=lr)
        (rule or Counted()).attach(self.optimizer, self.model.named_parameters(), comm)
        self.updates = torch.zeros_like(self.flat())

    @property
    def rounds(self) -> AsyncRounds:
        return self.optimizer.averaging

    @property
    def count(self) -> int:
        return self.rounds.rule._count

    def flat(self) -> Tensor:
        return torch.cat([param.detach().reshape(-1) for param in self.model.parameters()])

    def step(self, value: float | None = None) -> None:
        """A step along random gradients, or such as to add `value` to every weight; how far is kept in `updates`.

        A frozen parameter that has a gradient keeps it, zeroed, and gets none otherwise.
        """
        generator = torch.Generator().manual_seed(1000 * self.comm.rank + self.rounds.step)
        (group,) = self.optimizer.param_groups
        moves = []
        for param in self.model.parameters():
            has_none = not param.requires_grad and param.grad is None
            param.grad = torch.randn(param.shape, generator=generator, dtype=param.dtype)
            if value is not None:
                param.grad.fill_(-value / group["lr"])
            if not param.requires_grad:
                param.grad.zero_()
            moves.append(param.grad.reshape(-1))
            if has_none:
                param.grad = None
        self.updates -= group["lr"] * torch.cat(moves)
        self.optimizer.step()

    def until(self, condition: Callable[[], bool]) -> None:
        """Step without moving until it holds, as others' threads get there."""
        deadline = time.monotonic() + PATIENCE
        while not condition():
            assert time.monotonic() < deadline, "it never came"
            self.step(0.0)
            time.sleep(0.002)

    def wait_for_exchanges(self, number: int = 2) -> None:
        """Until so many have come to their end, without a step."""
        seen, deadline = self.count, time.monotonic() + PATIENCE
        while self.count < seen + number:
            assert time.monotonic() < deadline, "they never came"
            time.sleep(0.002)

    def mean(self, x: Tensor) -> Tensor:
        return self.comm.run(AllReduce(x.clone()))


class Told(logging.Handler):
    """What dgcopt logs from now on."""

    def __init__(self) -> None:
        super().__init__()
        self.lines: list[str] = []
        self.note: Path | None = None  # is there as soon as something is
        logging.getLogger("dgcopt").addHandler(self)

    def emit(self, record: logging.LogRecord) -> None:
        self.lines.append(record.getMessage().removeprefix("dgcopt: "))
        if self.note is not None:
            self.note.touch()


def impatient(comm: Comm, deadline: float) -> Comm:
    """The same ranks, which wait for each other no longer than that."""
    usual, comm.deadline = comm.deadline, deadline
    try:
        return comm.among(range(comm.size))
    finally:
        comm.deadline = usual


def threads() -> int:
    """How many threads of this process exchange weights."""
    return sum(thread.name == "dgcopt AsyncAverage" for thread in threading.enumerate())


def leave_while_others_exchange(comm: Comm) -> Replica:
    """A script that ends without `abort()`, the last rank's later than the others': those that are ready wait.

    Returns what must live as long as the script.
    """
    last = Replica(comm)
    for _ in range(100 if comm.rank == comm.size - 1 else 20):
        last.step()
        time.sleep(0.01)
    last.wait_for_exchanges()
    return last
