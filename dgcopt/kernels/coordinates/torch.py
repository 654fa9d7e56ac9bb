"""Reads and writes of a flat tensor at selected positions (int64, all within it), and the positions' owners.

Owners share positions: each row of as many neighbours as ranks has one position for every rank.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from ..parts import Parts
from ..rows import sent

__all__ = [
    "MIX",
    "add_at",
    "by_owner",
    "clear_at",
    "gather",
    "of_owners",
    "owner_of",
    "position_of",
    "step_at",
    "subtract_at",
]


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


MIX = 2654435761
"""2^32 over the golden ratio: neighbouring rows get unrelated remainders (Knuth, TAOCP 3, 6.4)."""


def owner_of(positions: Tensor, size: int) -> Tensor:
    """The owner of each position, among `size`."""
    return (positions + _turn(positions // size)) % size


def position_of(places: Tensor, owner: int | Tensor, size: int) -> Tensor:
    """The positions of places in the share of one owner, or of an owner each."""
    return places * size + (owner - _turn(places)) % size


def by_owner(positions: Tensor, size: int) -> tuple[Tensor, Tensor, Tensor]:
    """Sort int64 positions, 0 or more, by their owner, those of one owner as they were.

    Returns the order of positions, their places in their owners' shards, and their number per owner; all int64, the
    last `[size]` and on the CPU.
    """
    owners = owner_of(positions, size)
    order = owners.argsort(stable=True)
    return order, positions[order] // size, torch.bincount(owners, minlength=size).cpu()


def of_owners(places: Tensor, counts: Tensor, size: int) -> Tensor:
    """The positions of int64 places, 0 or more, `counts` (int64, on the CPU) of which are of one owner after the other.

    There may be fewer owners than `size`: the first ones.
    """
    owners = torch.arange(len(counts)).repeat_interleave(counts)
    return position_of(places, sent(owners, places.device), size)


def _turn(rows: Tensor) -> Tensor:
    return (rows * MIX & 0xFFFFFFFF) >> 16
