"""The largest magnitudes, in C."""

from __future__ import annotations

import torch
from torch import Tensor

from ...flat.segments import BLOCK
from ..torch import Groups
from .library import FLOATS, Length, Pointer, function, is_flat

__all__ = ["select"]


def select(flat: Tensor, maxima: Tensor, groups: Groups) -> Tensor:
    """See `dgcopt.kernels.torch.select`."""
    if maxima.dtype != flat.dtype or len(maxima) != len(flat) // BLOCK or not is_flat(maxima):
        raise ValueError(f"{len(flat)} elements have {len(flat) // BLOCK} block maxima, not {len(maxima)}")
    starts, stops, pieces, counts = groups.table
    if len(stops) and int(stops.amax()) > len(flat):
        raise ValueError(f"groups reach beyond the {len(flat)} elements that there are")
    positions = torch.empty(sum(groups.counts), dtype=torch.int64)
    loop = function(f"select_{FLOATS[flat.dtype]}", *[Pointer] * 6, Length, Pointer)
    places = [tensor.data_ptr() for tensor in (flat, maxima, starts, stops, pieces, counts)]
    if loop(*places, len(counts), positions.data_ptr()):
        raise MemoryError("there is no memory left to select in")
    return positions
