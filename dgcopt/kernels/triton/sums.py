"""Numbers of blocks of 64 values, and of the tensors that the blocks belong to, in Triton."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from ..blocks import BLOCK
from .floats import UNFUSED, finite
from .lengths import blocks_of, check_length

__all__ = ["ROWS", "sum_of_rows", "tensor_norms", "tensor_sums"]

ROWS = 32
"""Blocks of 64 that one program works on."""

_AHEAD = 32
"""Numbers that a program reads before it adds the first of them: each sum waits for the one before it."""


@triton.jit
def sum_of_rows(x, ROWS: tl.constexpr, DOUBLINGS: tl.constexpr):
    """The sum of each row of 2^DOUBLINGS: its second half is added to the first, until one number is left."""
    for i in tl.static_range(DOUBLINGS):
        halves = tl.permute(tl.reshape(x, (ROWS, 2, 1 << (DOUBLINGS - 1 - i))), (0, 2, 1))
        first, second = tl.split(halves)
        x = first + second
    return tl.reshape(x, (ROWS,))


@triton.jit
def _block_norms(values, maxima, squares, blocks, BLOCK: tl.constexpr, ROWS: tl.constexpr):
    rows = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    at = rows[:, None] * BLOCK + tl.arange(0, BLOCK)[None, :]
    v = finite(tl.load(values + at, mask=(rows < blocks)[:, None], other=0))
    wide = v.to(tl.float64)
    tl.store(maxima + rows, tl.max(tl.abs(v), 1), mask=rows < blocks)
    tl.store(squares + rows, sum_of_rows(wide * wide, ROWS, 6), mask=rows < blocks)


@triton.jit
def _in_order(numbers, starts, sums, blocks, count, AHEAD: tl.constexpr):
    tensor = tl.program_id(0)
    row = numbers + tl.program_id(1).to(tl.int64) * blocks
    stop = tl.load(starts + tensor + 1)
    total = tl.zeros((), numbers.dtype.element_ty)
    for first in range(tl.load(starts + tensor), stop, AHEAD):
        for i in tl.static_range(AHEAD):
            total += tl.load(row + first + i, mask=first + i < stop, other=0)
    tl.store(sums + tl.program_id(1) * count + tensor, total)


@triton.jit
def _largest_of_each(numbers, starts, largest, SIZE: tl.constexpr):
    tensor = tl.program_id(0)
    stop = tl.load(starts + tensor + 1)
    most = tl.zeros((SIZE,), tl.float32)
    for first in range(tl.load(starts + tensor), stop, SIZE):
        at = first + tl.arange(0, SIZE)
        most = tl.maximum(most, tl.load(numbers + at, mask=at < stop, other=0))
    tl.store(largest + tensor, tl.max(most, 0))


def tensor_sums(numbers: Tensor, place: Tensor, count: int) -> Tensor:
    """See `dgcopt.kernels.torch.tensor_sums`."""
    kinds, blocks = numbers.shape
    check_length(blocks, place)
    sums = numbers.new_empty(kinds, count)
    if sums.numel():
        _in_order[(count, kinds)](
            numbers, _starts(place, count), sums, blocks, count, AHEAD=_AHEAD, num_warps=1, **UNFUSED
        )
    return sums


def tensor_norms(values: Tensor, place: Tensor, count: int) -> tuple[Tensor, Tensor]:
    """See `dgcopt.kernels.torch.tensor_norms`."""
    blocks = blocks_of(values)
    check_length(blocks, place)
    maxima, squares = values.new_empty(blocks), values.new_empty(1, blocks, dtype=torch.float64)
    if blocks:
        _block_norms[(triton.cdiv(blocks, ROWS),)](values, maxima, squares, blocks, BLOCK=BLOCK, ROWS=ROWS, **UNFUSED)
    most = values.new_empty(count)
    if count:
        _largest_of_each[(count,)](maxima, _starts(place, count), most, SIZE=1024, **UNFUSED)
    return most, tensor_sums(squares, place, count).squeeze(0)


def _starts(place: Tensor, count: int) -> Tensor:
    """At which block each tensor starts, and the last one ends."""
    return torch.searchsorted(place, torch.arange(count + 1, device=place.device))
