"""A model of real shapes whose forward and backward are sleeps: ranks that share few cores do not slow each other.

A parameter's gradient is ready when the real one would be; late sleeps are made up for by the next ones.
"""

from __future__ import annotations

import functools
import os
import time

import torch
from synthetic import Layer
from torch import Tensor, nn

from dgcopt.tuning.costs import heavy_tailed
from dgcopt.tuning.models import Model

__all__ = ["Sleeping", "waited_for_core"]


@functools.cache
def of_this_thread() -> int:
    """Return the opened file of the scheduler's counts: read before and after each sleep, it is opened once."""
    return os.open("/proc/thread-self/schedstat", os.O_RDONLY)


def waited_for_core() -> float:
    """Return the seconds for which this thread could have run, and others did. Always called by the same thread."""
    return int(os.pread(of_this_thread(), 100, 0).split()[1]) / 1e9


class Sleeper:
    """The clock of a device that computes while the processor does something else.

    Sleeps overshoot, more so on a busy machine; the excess is taken off the next one. `queued` is the part of it for
    which this process could have run.
    """

    def __init__(self) -> None:
        self.credit, self.queued = 0.0, 0.0

    def sleep(self, seconds: float) -> None:
        """Sleep `seconds`, less the credit of earlier sleeps."""
        self.credit -= seconds
        if self.credit < 0:
            start, queued = time.perf_counter(), waited_for_core()
            time.sleep(-self.credit)
            self.credit += time.perf_counter() - start
            self.queued += waited_for_core() - queued


class Sleeping(nn.Module):
    """A model's parameters, whose gradients become ready at the times of the real model."""

    def __init__(self, model: Model, rank: int, seconds: float) -> None:
        super().__init__()
        self.params = nn.ParameterList(torch.zeros(shape) for shape in model.shapes.values())
        gradients = heavy_tailed(model.shapes, torch.device("cpu"))
        self.gradients = [gradient * (1 + rank / 16) for gradient in gradients.values()]
        self.before = seconds * model.forward
        total = sum(model.shares)
        self.shares = [seconds * (1 - model.forward) * share / total for share in model.shares]
        self.sleeper = Sleeper()

    def forward(self) -> Tensor:
        self.sleeper.sleep(self.before)
        signal = torch.zeros(())
        for param, gradient, share in zip(self.params, self.gradients, self.shares, strict=True):
            signal = Layer.apply(signal, param, functools.partial(self.give, gradient, share))
        return signal

    def give(self, gradient: Tensor, share: float) -> Tensor:
        """Sleep for the time of a layer's backward; returns its gradient."""
        self.sleeper.sleep(share)
        return gradient
