"""A hash of a tensor's memory, in C."""

from __future__ import annotations

import torch
from torch import Tensor

from ..torch import HASHED, hash_by
from .library import Length, Pointer, check_flat, function

__all__ = ["hash_of"]


def hash_of(data: Tensor) -> Tensor:
    """See `dgcopt.kernels.torch.hash_of`."""
    check_flat(len(data), data, dtype=torch.uint8)
    return hash_by(_sums_of_rows, data)


def _sums_of_rows(words: Tensor, factors: Tensor) -> Tensor:
    sums = torch.empty(len(words) // HASHED + 1, 2, dtype=torch.int64)
    loop = function("hash_rows", Pointer, Length, Pointer, Length, Pointer)
    loop(words.data_ptr(), len(words), factors.data_ptr(), HASHED, sums.data_ptr())
    return sums
