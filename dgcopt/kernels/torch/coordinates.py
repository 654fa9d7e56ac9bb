"""Reading and changing a flat tensor at few positions; int64, each within it."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from ..parts import Parts

__all__ = ["add_at", "clear_at", "gather", "step_at", "subtract_at"]


def gather(flat: Tensor, positions: Tensor) -> Tensor:
    """What a flat tensor holds at some positions."""
    return flat.index_select(0, positions)


def subtract_at(flat: Tensor, positions: Tensor, values: Tensor) -> None:
    """Subtract float32 values at positions of which none is named twice; rounded once, to the dtype of `flat`."""
    flat.index_copy_(0, positions, (flat.index_select(0, positions) - values).to(flat.dtype))


def clear_at(flat: Tensor, positions: Tensor) -> None:
    """Make zero what lies at some positions."""
    flat.index_fill_(0, positions, 0)


def add_at(parts: Parts, positions: Tensor, values: Tensor) -> Tensor:
    """Add values, rounded to the dtype of the parts, at positions; one after the other where one is named twice.

    What would come to lie in a part that is missing is left out. Returns what lies at each position then; 0 there.
    """
    sums = torch.zeros_like(values)
    for place, where, which in _by_part(parts, positions):
        part = parts.tensors[place]
        if part is not None:
            part.index_add_(0, where, values[which].to(part.dtype))
            sums[which] = part.index_select(0, where).to(values.dtype)
    return sums


def step_at(weights: Parts, rates: Sequence[float], positions: Tensor, grads: Tensor) -> None:
    """w <- w + rate g at some positions, where the gradient is `grads`, at the rate of each part.

    A position may be named twice, with the same gradient, and takes one step. Parts that are missing take none.
    """
    for place, where, which in _by_part(weights, positions):
        w = weights.tensors[place]
        if w is not None:
            w.index_copy_(0, where, w.index_select(0, where).add_(grads[which].to(w.dtype), alpha=rates[place]))


def _by_part(parts: Parts, positions: Tensor) -> Iterator[tuple[int, Tensor, Tensor]]:
    """Of each part its number, the positions that lie in it, counted from its start, and which ones these are."""
    if not len(positions):
        return
    starts, stops = parts.starts.to(positions.device), parts.stops.to(positions.device)
    place = torch.bucketize(positions, starts, right=True) - 1
    if int(place.amin()) < 0 or not bool((positions < stops[place]).all()):
        raise IndexError("positions must lie within the parts that there are")
    order = place.argsort(stable=True)
    ends = torch.bincount(place, minlength=len(starts)).cumsum(0).tolist()
    for part, (first, last) in enumerate(zip([0, *ends], ends, strict=False)):
        which = order[first:last]
        yield part, positions[which] - starts[part], which
