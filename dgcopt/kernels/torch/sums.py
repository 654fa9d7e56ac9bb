"""Statistics of blocks of 64 values and of their tensors, common to the quantisers."""

from __future__ import annotations

from typing import Literal, TypeAlias

import torch
from torch import Tensor

from ..blocks import BLOCK

__all__ = ["LARGEST", "STRETCH", "Put", "by_block", "finite", "put", "sum_of_rows", "tensor_norms", "tensor_sums"]

Put: TypeAlias = Literal["set", "add", "subtract"]
"""How decoded values change a tensor: they replace it, are added, or are subtracted."""

LARGEST = 2.0**100
"""Larger values travel as this, so that sums over a block stay finite."""


STRETCH = 1024
"""Number of a tensor's blocks in a stretch, which is summed in order, beside other stretches."""


def finite(values: Tensor) -> Tensor:
    """As float32 within +-LARGEST, NaN and Inf as zero; a copy."""
    return values.nan_to_num(nan=0, posinf=0, neginf=0).float().clamp_(-LARGEST, LARGEST)


def sum_of_rows(rows: Tensor) -> Tensor:
    """The sum of each row, a power of two long: its second half is added to the first, until one number is left."""
    while rows.shape[1] > 1:
        first, second = rows.chunk(2, dim=1)
        rows = first + second
    return rows.squeeze(1)


def tensor_sums(numbers: Tensor, place: Tensor, count: int) -> Tensor:
    """Sums of blocks' numbers `[kinds, blocks]`, each of one of `count` tensors: `[kinds, count]`.

    Block b is of the tensor `place[b]`, and places ascend. Each tensor's blocks are divided into stretches of `STRETCH`
    from its first block on. Numbers are added in order within stretches, and then the sums of stretches in order.
    """
    blocks = torch.arange(len(place), device=place.device)
    first = torch.searchsorted(place, torch.arange(count, device=place.device))[place]
    stretch = (blocks - first) // STRETCH + first // STRETCH + place  # ascending by at most 2, each of one tensor
    stretches = len(place) // STRETCH + count
    sums = numbers.new_zeros(len(numbers), stretches).index_add_(1, stretch, numbers)
    of = place.new_zeros(stretches).scatter_(0, stretch, place)  # stretches without blocks have a sum of zero
    return numbers.new_zeros(len(numbers), count).index_add_(1, of, sums)


def tensor_norms(values: Tensor, place: Tensor, count: int) -> tuple[Tensor, Tensor]:
    """The largest magnitude, float32, and the sum of squares, float64, of each of `count` tensors.

    Block b is of the tensor `place[b]`, and places ascend. Squares are added up within blocks, as in `sum_of_rows`, and
    then as in `tensor_sums`. NaN and Inf count as zero.
    """
    rows = finite(values).view(-1, BLOCK)
    squares = sum_of_rows(rows.double().square_())
    most = rows.new_zeros(count).scatter_reduce_(0, place, rows.abs().amax(1), "amax")
    return most, tensor_sums(squares.view(1, -1), place, count).view(-1)


def by_block(numbers: Tensor, place: Tensor) -> Tensor:
    """The number at `place[b]` for every element of block b. Shape `[64 * blocks]`."""
    return numbers.index_select(0, place).repeat_interleave(BLOCK)


def put(values: Tensor, out: Tensor, how: Put) -> None:
    """Let values take effect on `out`."""
    if how == "set":
        out.copy_(values)
    elif how == "add":
        out.add_(values)
    else:
        out.sub_(values)
