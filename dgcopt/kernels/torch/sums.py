"""Numbers of blocks of 64 values, and of the tensors that the blocks belong to: what quantisers share."""

from __future__ import annotations

from typing import Literal, TypeAlias

from torch import Tensor

from ..blocks import BLOCK

__all__ = ["LARGEST", "Put", "by_block", "finite", "put", "sum_of_rows", "tensor_norms", "tensor_sums"]

Put: TypeAlias = Literal["set", "add", "subtract"]
"""What decoded values do to a tensor that is there: take its place, or be added to it, or be taken away from it."""

LARGEST = 2.0**100
"""Larger values travel as this, so that sums over a block stay finite."""


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
    """Sums of blocks' numbers, float32 `[kinds, blocks]`, in order: `[kinds, count]`, of block b in `place[b]`.

    Places ascend.
    """
    return numbers.new_zeros(len(numbers), count).index_add_(1, place, numbers)


def tensor_norms(values: Tensor, place: Tensor, count: int) -> tuple[Tensor, Tensor]:
    """The largest magnitude, float32, and the sum of squares, float64, of each of `count` tensors.

    Block b is of the tensor `place[b]`, and places ascend. Squares are added up within blocks, as in `sum_of_rows`, and
    then in order. NaN and Inf count as zero.
    """
    rows = finite(values).view(-1, BLOCK)
    squares = sum_of_rows(rows.double().square_())
    most = rows.new_zeros(count).scatter_reduce_(0, place, rows.abs().amax(1), "amax")
    return most, squares.new_zeros(count).index_add_(0, place, squares)


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
