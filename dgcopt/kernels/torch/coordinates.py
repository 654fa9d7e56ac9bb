"""Reads and writes of a flat tensor at few positions, int64, all within it."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from ..parts import Parts

__all__ = ["add_at", "clear_at", "gather", "step_at", "subtract_at"]


def gather(flat: Tensor, positions: Tensor) -> Tensor:
    """Return the elements of a flat tensor at some positions."""
    return flat.index_select(0, positions)


def subtract_at(flat: Tensor, positions: Tensor, values: Tensor) -> None:
    """Subtract float32 values at distinct positions, rounded once to the dtype of `flat`."""
    flat.index_copy_(0, positions, (flat.index_select(0, positions) - values).to(flat.dtype))


def clear_at(flat: Tensor, positions: Tensor) -> None:
    """Set the elements at some positions to zero."""
    flat.index_fill_(0, positions, 0)


def add_at(parts: Parts, positions: Tensor, values: Tensor) -> Tensor:
    """Add values, rounded to the dtype of the parts, at positions, in order if a position occurs twice.

    Values for a missing part are skipped. Returns the new element at each position; 0 for a missing part.
    """
    sums = torch.zeros_like(values)
    for place, within, which in _by_part(parts, positions):
        part = parts.tensors[place]
        if part is not None:
            part.index_add_(0, within, values[which].to(part.dtype))
            sums[which] = part.index_select(0, within).to(values.dtype)
    return sums


def step_at(weights: Parts, rates: Sequence[float], positions: Tensor, grads: Tensor) -> None:
    """Step weights at some positions: w <- w + rate * g, with each part's rate.

    A position may occur twice, with the same gradient, and takes one step. Missing parts are skipped.
    """
    for place, within, which in _by_part(weights, positions):
        w = weights.tensors[place]
        if w is not None:
            w.index_copy_(0, within, w.index_select(0, within).add_(grads[which].to(w.dtype), alpha=rates[place]))


def _by_part(parts: Parts, positions: Tensor) -> Iterator[tuple[int, Tensor, Tensor]]:
    """Yield each part's number, the positions in it from its start, and their indices among `positions`."""
    if not len(positions):
        return
    starts, stops = parts.starts.to(positions.device), parts.stops.to(positions.device)
    place = torch.bucketize(positions, starts, right=True) - 1
    if int(place.amin()) < 0 or not bool((positions < stops[place]).all()):
        raise IndexError("positions must lie within the parts")
    order = place.argsort(stable=True)
    ends = torch.bincount(place, minlength=len(starts)).cumsum(0).tolist()
    for part, (first, last) in enumerate(zip([0, *ends], ends, strict=False)):
        which = order[first:last]
        yield part, positions[which] - starts[part], which
