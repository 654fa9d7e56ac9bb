"""Owners of positions, in C."""

from __future__ import annotations

import torch
from torch import Tensor

from .library import Length, Pointer, check_flat, function

__all__ = ["by_owner", "of_owners"]


def by_owner(positions: Tensor, size: int) -> tuple[Tensor, Tensor, Tensor]:
    """See `dgcopt.kernels.torch.by_owner`."""
    check_flat(len(positions), positions, dtype=torch.int64)
    order, places = torch.empty(2, len(positions), dtype=torch.int64).unbind()
    owners, counts = torch.empty(len(positions), dtype=torch.int32), torch.empty(size, dtype=torch.int64)
    loop = function("by_owner", Pointer, Length, Length, *[Pointer] * 4)
    results = [tensor.data_ptr() for tensor in (owners, order, places, counts)]
    if loop(positions.data_ptr(), len(positions), size, *results):
        raise ValueError(f"positions must be 0 or more, not {int(positions.amin())}")
    return order, places, counts


def of_owners(places: Tensor, counts: Tensor, size: int) -> Tensor:
    """See `dgcopt.kernels.torch.of_owners`."""
    check_flat(len(counts), counts, dtype=torch.int64)
    check_flat(int(counts.sum()), places, dtype=torch.int64)
    if len(counts) > size or (len(counts) and int(counts.amin()) < 0):
        raise ValueError(f"{counts.tolist()} places cannot be those of at most {size} owners")
    positions = torch.empty_like(places)
    loop = function("of_owners", Pointer, Pointer, Length, Length, Pointer)
    loop(places.data_ptr(), counts.data_ptr(), len(counts), size, positions.data_ptr())
    return positions
