"""One rank among others that would send just what it sends: what a rank computes, without the others.

A message travels by a copy on a stream of its own, on which the device waits before it uses the result, as with NCCL.
Where a rank receives those of all others, it gets its own so many times, and decodes them all.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor

from dgcopt import Comm
from dgcopt.collectives import Collective, Link
from dgcopt.comm import Handle
from dgcopt.tuning.costs import echo

__all__ = ["Echo"]


class _Copied(Handle):
    """A message that a stream has taken; no host waits for it."""

    def __init__(self, collective: Collective, output: Tensor, event: Any) -> None:
        self.collective = collective
        self.output = output
        self.event = event

    def done(self) -> bool:
        return True

    def result(self) -> Tensor:
        if self.event is not None:
            self.event.wait()
            self.output.record_stream(torch.cuda.current_stream())
        return self.output


class Echo(Comm):
    """Rank 0 of `size`, whose others are its echo."""

    wire = "echo"
    link = Link()

    def __init__(self, size: int) -> None:
        super().__init__(0, size)
        self.stream: Any = None

    def _start(self, collective: Collective, ranks: tuple[int, ...]) -> Handle:
        if not collective.tensor.is_cuda:
            return _Copied(collective, echo(collective, len(ranks)), None)
        if self.stream is None:
            self.stream = torch.cuda.Stream()
        self.stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(self.stream):
            output = echo(collective, len(ranks))
            collective.tensor.record_stream(self.stream)
            return _Copied(collective, output, self.stream.record_event())

    def _among(self, members: tuple[int, ...], given: Iterable[int] | Any) -> Comm:
        return Echo(len(members))
