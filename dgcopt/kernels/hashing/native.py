"""Random positions, and a hash of a tensor's memory, in C."""

from __future__ import annotations

import torch
from torch import Tensor

from ..native.library import Int, Length, Pointer, check_flat, function
from .torch import HASHED, halves, hash_by

__all__ = ["draw_from_spans", "hash_of"]


def hash_of(data: Tensor) -> Tensor:
    """See `hash_of` in torch.py."""
    check_flat(len(data), data, dtype=torch.uint8)
    return hash_by(_sums_of_rows, data)


def _sums_of_rows(words: Tensor, factors: Tensor) -> Tensor:
    sums = torch.empty(len(words) // HASHED + 1, 2, dtype=torch.int64)
    loop = function("hash_rows", Pointer, Length, Pointer, Length, Pointer)
    loop(words.data_ptr(), len(words), factors.data_ptr(), HASHED, sums.data_ptr())
    return sums


def draw_from_spans(starts: Tensor, lengths: Tensor, key: int) -> Tensor:
    """See `draw_from_spans` in torch.py."""
    check_flat(len(starts), starts, lengths, dtype=torch.int64)
    positions = torch.empty(len(starts), dtype=torch.int64)
    loop = function("draw_from_spans", Pointer, Pointer, Length, Int, Int, Pointer)
    loop(starts.data_ptr(), lengths.data_ptr(), len(starts), *halves(key), positions.data_ptr())
    return positions
