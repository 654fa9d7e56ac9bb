"""Flat tensors of which the parts lie apart, as gradients and moments do where autograd and optimizers keep them."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor

__all__ = ["Mixture", "Parts", "tensors_in"]


@dataclass(frozen=True, eq=False)
class Parts:
    """A flat tensor of which the parts lie apart; None where there is none.

    Attributes: `tensors`, all flat and of one dtype; `starts` and `stops`, int64 on the CPU, ascending: their places in
    the whole.
    """

    tensors: Sequence[Tensor | None]
    starts: Tensor
    stops: Tensor

    @property
    def spans(self) -> Iterator[tuple[int, int, Tensor | None]]:
        """Where each part starts and stops, and the part."""
        return zip(self.starts.tolist(), self.stops.tolist(), self.tensors, strict=True)


@dataclass(frozen=True, eq=False)
class Mixture:
    """keep * x + add * y in the place of a flat x, as momentum is one of a gradient; of y the parts lie apart.

    Kernels make it of x when they read it, or of what they write, and so spare a pass of its own.

    Attributes: `starts`, ascending, where in x each of the `parts` of y begins, all flat. Elsewhere x stays as it is.
    """

    keep: float
    add: float
    starts: Sequence[int]
    parts: Sequence[Tensor]

    @property
    def inverse(self) -> Mixture:
        """What makes x of this mixture again, up to rounding; `keep` must not be zero."""
        return Mixture(1 / self.keep, -self.add / self.keep, self.starts, self.parts)

    def within(self, start: int, stop: int) -> Mixture:
        """The same of x from `start` to `stop`."""
        starts, parts = [], []
        for first, part in zip(self.starts, self.parts, strict=True):
            if first < stop and start < first + len(part):
                starts.append(max(first - start, 0))
                parts.append(part[max(start - first, 0) : stop - first])
        return Mixture(self.keep, self.add, starts, parts)


def tensors_in(arguments: Iterable[Any]) -> Iterator[Tensor]:
    """All tensors among the arguments, in their parts, and in what they are mixed with."""
    for x in arguments:
        if isinstance(x, Tensor):
            yield x
        elif isinstance(x, Parts):
            yield from (part for part in x.tensors if part is not None)
        elif isinstance(x, Mixture):
            yield from x.parts
