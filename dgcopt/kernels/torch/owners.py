"""Owners of positions: each row of as many neighbours as owners has one position for every owner.

Who has which is rotated from row to row by a hash of the row.
"""

from __future__ import annotations

import torch
from torch import Tensor

from ..rows import sent

__all__ = ["MIX", "by_owner", "of_owners", "owner_of", "position_of"]

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
