"""The discrete cosine transform of a matrix, tile by tile, and its inverse, in C."""

from __future__ import annotations

import functools
from typing import Literal

import torch
from torch import Tensor
from torch.autograd.graph import increment_version

from ..blocks import BLOCK
from ..torch import Matrices, Put, waves
from .library import Int, Length, Pointer, check_flat, function
from .sums import HOW

__all__ = ["dct", "inverse_dct"]


def dct(flat: Tensor, matrices: Matrices, out: Tensor) -> None:
    """See `dgcopt.kernels.torch.dct`."""
    numbers = _checked(flat, matrices, out)
    loop = function("dct", *[Pointer] * 2, Length, *[Pointer] * 3)
    loop(flat.data_ptr(), matrices.table.data_ptr(), len(matrices.shapes), *numbers, out.data_ptr())
    increment_version(out)


def inverse_dct(frequencies: Tensor, matrices: Matrices, flat: Tensor, how: Put | Literal["sign"]) -> None:
    """See `dgcopt.kernels.torch.inverse_dct`."""
    numbers = _checked(flat, matrices, frequencies)
    loop = function("inverse_dct", *[Pointer] * 2, Length, *[Pointer] * 3, Int)
    loop(
        *(frequencies.data_ptr(), matrices.table.data_ptr(), len(matrices.shapes), *numbers),
        *(flat.data_ptr(), 3 if how == "sign" else HOW[how]),
    )
    increment_version(flat)


def _checked(flat: Tensor, matrices: Matrices, frequencies: Tensor) -> tuple[int, int]:
    """Where the numbers are that tiles of 64, 1, 2 ... 63 elements are multiplied by, and where each of them starts."""
    check_flat(len(flat), flat, frequencies, dtype=torch.float32)
    if any(start < 0 or start + rows * columns > len(flat) for start, rows, columns in matrices.shapes):
        raise ValueError(f"matrices reach beyond the {len(flat)} elements that there are")
    numbers, starts = _numbers()
    return numbers.data_ptr(), starts.data_ptr()


@functools.cache
def _numbers() -> tuple[Tensor, Tensor]:
    of_each = [waves(side or BLOCK, torch.float32, torch.device("cpu")) for side in range(BLOCK)]
    lengths = torch.tensor([len(numbers) for numbers in of_each])
    return torch.cat(of_each), lengths.cumsum(0) - lengths
