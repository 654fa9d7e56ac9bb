"""The discrete cosine transform of a matrix, tile by tile, and its inverse, in C."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.autograd.graph import increment_version

from ..blocks import BLOCK
from ..torch import Put, waves
from .library import Int, Length, Pointer, check_flat, function, is_flat
from .sums import HOW

__all__ = ["dct", "inverse_dct"]


def dct(matrix: Tensor, out: Tensor) -> None:
    """See `dgcopt.kernels.torch.dct`."""
    numbers = _checked(matrix, out)
    loop = function("dct", Pointer, Length, Length, *[Pointer] * 4)
    loop(matrix.data_ptr(), *matrix.shape, *numbers, out.data_ptr())
    increment_version(out)


def inverse_dct(frequencies: Tensor, matrix: Tensor, how: Put) -> None:
    """See `dgcopt.kernels.torch.inverse_dct`."""
    numbers = _checked(matrix, frequencies)
    loop = function("inverse_dct", Pointer, Pointer, Length, Length, *[Pointer] * 3, Int)
    loop(frequencies.data_ptr(), matrix.data_ptr(), *matrix.shape, *numbers, HOW[how])
    increment_version(matrix)


def _checked(matrix: Tensor, frequencies: Tensor) -> list[int]:
    """Where the numbers are that tiles are multiplied by: for a side of 64, and at the lower and at the right edge."""
    if matrix.dim() != 2 or matrix.dtype != torch.float32 or not is_flat(matrix):
        raise ValueError(f"a matrix of float32 is needed, not {tuple(matrix.shape)} of {matrix.dtype}")
    check_flat(matrix.numel(), frequencies, dtype=torch.float32)
    sides = (BLOCK, *(side % BLOCK or BLOCK for side in matrix.shape))
    return [waves(side, matrix.dtype, matrix.device).data_ptr() for side in sides]
