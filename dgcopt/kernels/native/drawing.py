"""Positions drawn at random, in C."""

from __future__ import annotations

import torch
from torch import Tensor

from ..torch import halves
from .library import Int, Length, Pointer, check_flat, function

__all__ = ["draw_from_spans"]


def draw_from_spans(starts: Tensor, lengths: Tensor, key: int) -> Tensor:
    """See `dgcopt.kernels.torch.draw_from_spans`."""
    check_flat(len(starts), starts, lengths, dtype=torch.int64)
    positions = torch.empty(len(starts), dtype=torch.int64)
    loop = function("draw_from_spans", Pointer, Pointer, Length, Int, Int, Pointer)
    loop(starts.data_ptr(), lengths.data_ptr(), len(starts), *halves(key), positions.data_ptr())
    return positions
