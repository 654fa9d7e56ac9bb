"""The magnitudes that reach a threshold, in C."""

from __future__ import annotations

import torch
from torch import Tensor

from .library import Float, Length, Pointer, check_flat, function

__all__ = ["positions_above"]


def positions_above(flat: Tensor, least: float, most: int) -> Tensor:
    """See `dgcopt.kernels.torch.positions_above`."""
    check_flat(len(flat), flat, dtype=torch.float32)
    most = min(most, len(flat))
    positions, count = torch.empty(most, dtype=torch.int64), torch.empty((), dtype=torch.int64)
    loop = function("positions_above", Pointer, Length, Float, Length, Pointer, Pointer)
    if loop(flat.data_ptr(), len(flat), least, most, positions.data_ptr(), count.data_ptr()):
        raise MemoryError("there is no memory left to select in")
    return positions[: int(count)]
