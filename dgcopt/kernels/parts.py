"""Flat tensors of which the parts lie apart, as gradients do where autograd has left them."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor

__all__ = ["Parts", "tensors_in"]


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


def tensors_in(arguments: Iterable[Any]) -> Iterator[Tensor]:
    """All tensors among the arguments, and in their parts."""
    for x in arguments:
        if isinstance(x, Tensor):
            yield x
        elif isinstance(x, Parts):
            yield from (part for part in x.tensors if part is not None)
