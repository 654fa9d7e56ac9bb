"""Flat tensors in parts that lie apart in memory, such as autograd's gradients and optimizers' moments."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor

__all__ = ["Mixture", "Parts", "tensors_in"]


@dataclass(frozen=True, eq=False)
class Parts:
    """A flat tensor in parts that lie apart; None for a missing part.

    Attributes:
        tensors: flat tensors of one dtype; None for a missing part.
        starts, stops: their places in the whole, int64 on the CPU, ascending.
    """

    tensors: Sequence[Tensor | None]
    starts: Tensor
    stops: Tensor

    @property
    def spans(self) -> Iterator[tuple[int, int, Tensor | None]]:
        """Yield the start, the stop and the tensor of each part."""
        return zip(self.starts.tolist(), self.stops.tolist(), self.tensors, strict=True)


@dataclass(frozen=True, eq=False)
class Mixture:
    """The mixture keep * x + add * y of a flat x and a y in parts, such as momentum and gradient.

    Kernels apply it while they read x or write their result, which saves a pass.

    Attributes:
        keep, add: factors of x and y.
        parts: flat parts of y; elsewhere x is unchanged.
        starts: their positions in x, ascending.
    """

    keep: float
    add: float
    starts: Sequence[int]
    parts: Sequence[Tensor]

    @property
    def inverse(self) -> Mixture:
        """Return the inverse mixture, which restores x up to rounding; `keep` must not be zero."""
        return Mixture(1 / self.keep, -self.add / self.keep, self.starts, self.parts)

    def within(self, start: int, stop: int) -> Mixture:
        """Return the mixture of x from `start` to `stop`."""
        starts, parts = [], []
        for first, part in zip(self.starts, self.parts, strict=True):
            if first < stop and start < first + len(part):
                starts.append(max(first - start, 0))
                parts.append(part[max(start - first, 0) : stop - first])
        return Mixture(self.keep, self.add, starts, parts)


def tensors_in(arguments: Iterable[Any]) -> list[Tensor]:
    """Return all tensors among the arguments, in lists, parts and mixtures."""
    tensors: list[Tensor] = []
    for x in arguments:
        if isinstance(x, Tensor):
            tensors.append(x)
        elif isinstance(x, Parts):
            tensors += [part for part in x.tensors if part is not None]
        elif isinstance(x, Mixture):
            tensors += x.parts
        elif isinstance(x, list | tuple):
            tensors += tensors_in(x)
    return tensors
