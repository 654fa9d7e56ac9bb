"""The largest magnitudes of every chunk, in C."""

from __future__ import annotations

import torch
from torch import Tensor

from ..torch import Chunks
from .library import FLOATS, Length, Pointer, check_flat, function

__all__ = ["select_chunks"]


def select_chunks(flat: Tensor, chunks: Chunks) -> Tensor:
    """See `dgcopt.kernels.torch.select_chunks`."""
    check_flat(len(flat), flat)
    starts, stops, counts = chunks.table
    if len(stops) and int(stops.amax()) > len(flat):
        raise ValueError(f"chunks reach beyond the {len(flat)} elements that there are")
    positions = torch.empty(chunks.count, dtype=torch.int64)
    loop = function(f"select_chunks_{FLOATS[flat.dtype]}", *[Pointer] * 4, Length, Pointer)
    if loop(*(x.data_ptr() for x in (flat, starts, stops, counts)), len(counts), positions.data_ptr()):
        raise MemoryError("there is no memory left to select in")
    return positions
