"""Maxima, norms and sums of blocks of 64 values and of tensors, in Triton."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor
from torch.autograd.graph import increment_version

from ..blocks import BLOCK, bits_of
from ..triton.floats import UNFUSED, finite, magnitudes
from ..triton.lengths import blocks_of, check_length
from ..triton.pieces import piece_of
from .torch import STRETCH

__all__ = ["ROWS", "add_and_maxima", "add_and_norms", "block_maxima", "sum_of_rows", "tensor_norms", "tensor_sums"]

ROWS = 32
"""Blocks of 64 that one program works on."""

_TENSORS = 128
"""Number of tensors that one program searches."""

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
def _find_starts(place, blocks, count, starts, stretches, STRETCH: tl.constexpr, SIZE: tl.constexpr):
    """At which block and at which stretch each tensor starts, and the last one ends."""
    tensor = tl.program_id(0) * SIZE + tl.arange(0, SIZE)
    low = tl.zeros((SIZE,), tl.int64)
    high = low + blocks
    left = blocks
    while left > 0:
        middle = (low + high) // 2
        open = low < high
        before = open & (tl.load(place + middle, mask=open, other=0) < tensor)
        low = tl.where(before, middle + 1, low)
        high = tl.where(before, high, middle)
        left = left // 2
    tl.store(starts + tensor, low, mask=tensor <= count)
    tl.store(stretches + tensor, low // STRETCH + tensor, mask=tensor <= count)


@triton.jit
def _stretch(starts, stretches, count, STRETCH: tl.constexpr):
    """Return the tensor of this program's stretch, its first block and its end."""
    tensor = piece_of(tl.program_id(0), stretches, count)
    first = tl.load(starts + tensor) + (tl.program_id(0) - tl.load(stretches + tensor)) * STRETCH
    return tensor, first, tl.minimum(first + STRETCH, tl.load(starts + tensor + 1))


@triton.jit
def _in_order(numbers, first, stop, AHEAD: tl.constexpr):
    total = tl.zeros((), numbers.dtype.element_ty)
    for at in range(first, stop, AHEAD):
        for i in tl.static_range(AHEAD):
            total += tl.load(numbers + at + i, mask=at + i < stop, other=0)
    return total


@triton.jit
def _add_stretches(numbers, blocks, starts, stretches, count, sums, STRETCH: tl.constexpr, AHEAD: tl.constexpr):
    _, first, stop = _stretch(starts, stretches, count, STRETCH)
    total = _in_order(numbers + tl.program_id(1).to(tl.int64) * blocks, first, stop, AHEAD)
    tl.store(sums + tl.program_id(1).to(tl.int64) * tl.num_programs(0) + tl.program_id(0), total)


@triton.jit
def _add_tensors(of_stretches, number, starts, stretches, count, sums, STRETCH: tl.constexpr, AHEAD: tl.constexpr):
    tensor = tl.program_id(0)
    first = tl.load(stretches + tensor)
    stop = first + tl.cdiv(tl.load(starts + tensor + 1) - tl.load(starts + tensor), STRETCH)
    total = _in_order(of_stretches + tl.program_id(1).to(tl.int64) * number, first, stop, AHEAD)
    tl.store(sums + tl.program_id(1).to(tl.int64) * count + tensor, total)


@triton.jit
def _largest(numbers, starts, stretches, count, largest, STRETCH: tl.constexpr):
    """The largest of each tensor's numbers, as the integers that positive floats are in memory."""
    tensor, first, stop = _stretch(starts, stretches, count, STRETCH)
    at = first + tl.arange(0, STRETCH)
    x = tl.load(numbers + at, mask=at < stop, other=0)
    tl.atomic_max(largest + tensor, tl.max(x.to(tl.int32, bitcast=True), 0))


def tensor_sums(numbers: Tensor, place: Tensor, count: int) -> Tensor:
    """See `tensor_sums` in torch.py."""
    kinds, blocks = numbers.shape
    check_length(blocks, place)
    return (
        _sums(numbers, _starts(place, blocks, count), count)
        if kinds * count
        else numbers.new_empty(kinds, count, dtype=torch.float64)
    )


def tensor_norms(values: Tensor, place: Tensor, count: int) -> tuple[Tensor, Tensor]:
    """See `tensor_norms` in torch.py."""
    blocks = blocks_of(values)
    check_length(blocks, place)
    maxima, squares = values.new_empty(blocks), values.new_empty(1, blocks, dtype=torch.float64)
    if blocks:
        _block_norms[(triton.cdiv(blocks, ROWS),)](values, maxima, squares, blocks, BLOCK=BLOCK, ROWS=ROWS, **UNFUSED)
    most = values.new_zeros(count)
    if not count:
        return most, squares.new_empty(0)
    starts = _starts(place, blocks, count)
    _largest[(blocks // STRETCH + count,)](maxima, *starts, count, most.view(torch.int32), STRETCH=STRETCH, **UNFUSED)
    return most, _sums(squares, starts, count).squeeze(0)


def _starts(place: Tensor, blocks: int, count: int) -> tuple[Tensor, Tensor]:
    """At which block and at which stretch each tensor starts, and the last one ends."""
    starts, stretches = place.new_empty(2, count + 1).unbind()
    size = {"STRETCH": STRETCH, "SIZE": _TENSORS}
    _find_starts[(triton.cdiv(count + 1, _TENSORS),)](place, blocks, count, starts, stretches, **size, **UNFUSED)
    return starts, stretches


def _sums(numbers: Tensor, starts: tuple[Tensor, Tensor], count: int) -> Tensor:
    (kinds, blocks), modes = numbers.shape, {"STRETCH": STRETCH, "AHEAD": _AHEAD, "num_warps": 1, **UNFUSED}
    stretches = blocks // STRETCH + count
    of_stretches, sums = (numbers.new_empty(kinds, n, dtype=torch.float64) for n in (stretches, count))
    _add_stretches[(stretches, kinds)](numbers, blocks, *starts, count, of_stretches, **modes)
    _add_tensors[(count, kinds)](of_stretches, stretches, *starts, count, sums, **modes)
    return sums


@triton.jit
def _add_and(
    g, e, decay, out, numbers, blocks, ADDS: tl.constexpr, NORMS: tl.constexpr, BLOCK: tl.constexpr, ROWS: tl.constexpr
):
    rows = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    at, there = rows[:, None] * BLOCK + tl.arange(0, BLOCK)[None, :], (rows < blocks)[:, None]
    v = tl.load(g + at, mask=there, other=0)
    if ADDS:
        v = tl.fma(tl.load(e + at, mask=there, other=0), tl.full(at.shape, decay, tl.float32), v)
        tl.store(out + at, v, mask=there)
    if NORMS:
        found = sum_of_rows(tl.abs(v), ROWS, 6)
    else:
        found = tl.max(magnitudes(v), 1).to(numbers.dtype.element_ty)
    tl.store(numbers + rows, found, mask=rows < blocks)


def add_and_maxima(g: Tensor, e: Tensor, decay: float, out: Tensor) -> Tensor:
    """See `add_and_maxima` in torch.py."""
    increment_version(out)
    return _of_blocks(g, e, decay, out, out.new_empty(len(out) // BLOCK), adds=True, norms=False)


def add_and_norms(g: Tensor, e: Tensor, decay: float, out: Tensor) -> Tensor:
    """See `add_and_norms` in torch.py."""
    increment_version(out)
    return _of_blocks(g, e, decay, out, out.new_empty(len(out) // BLOCK), adds=True, norms=True)


def block_maxima(flat: Tensor, out: Tensor | None = None) -> Tensor:
    """See `block_maxima` in torch.py."""
    maxima = flat.new_empty(flat.numel() // BLOCK) if out is None else out
    return _of_blocks(flat, flat, 1.0, flat, maxima, adds=False, norms=False)


def _of_blocks(g: Tensor, e: Tensor, decay: float, out: Tensor, numbers: Tensor, adds: bool, norms: bool) -> Tensor:
    blocks = blocks_of(out)
    check_length(out.numel(), g, e)
    check_length(blocks, numbers)
    if blocks:
        operands = (g, e, float(decay), out, numbers if norms else bits_of(numbers), blocks)
        _add_and[(triton.cdiv(blocks, ROWS),)](*operands, ADDS=adds, NORMS=norms, BLOCK=BLOCK, ROWS=ROWS, **UNFUSED)
    return numbers
