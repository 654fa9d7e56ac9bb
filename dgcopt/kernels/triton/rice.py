"""Rice codes in Triton, in parallel both ways.

Writing, each index finds by sums over those before it where its bits belong, and sets them in words that are zero at
first. Reading, remainders lie where their numbers say, and the unary parts of a row are one string of bits whose ones
end them: how many ones lie before a bit says which index it ends.
"""

from __future__ import annotations

import itertools

import torch
import triton
import triton.language as tl
from torch import Tensor

from ..rows import sent
from .floats import UNFUSED

__all__ = ["rice_measure", "rice_pack", "rice_unpack"]

_SIZE = 256
"""Indices that one program works on."""

_BYTES = 256
"""Bytes of unary parts that one program looks through."""

_VARIES = ["b"]
"""Arguments for whose values Triton is not to compile a kernel once more."""

_MOST: tl.constexpr = tl.constexpr(2**63 - 1)


@triton.jit
def _mine(counts, firsts, SIZE: tl.constexpr):
    """The row of this program, its first index and its count; and which of its indices are this program's."""
    row = tl.program_id(1).to(tl.int64)
    return row, tl.load(firsts + row), tl.load(counts + row), tl.program_id(0).to(tl.int64) * SIZE + tl.arange(0, SIZE)


@triton.jit
def _gaps(indices, first, at, there):
    """How many positions lie between indices of a row and those before them."""
    before = tl.load(indices + first + at - 1, mask=there & (at > 0), other=-1)
    return tl.load(indices + first + at, mask=there, other=0) - before - 1


@triton.jit
def _before(sums, first):
    """What the rows before one that starts at `first` add to running sums."""
    return tl.load(sums + first - 1, mask=first > 0, other=0)


@triton.jit(do_not_specialize=_VARIES)
def _measure(indices, counts, firsts, b, numel, smallest, quotients, SIZE: tl.constexpr):
    row, first, count, at = _mine(counts, firsts, SIZE)
    gaps = _gaps(indices, first, at, at < count)
    behind = numel - 1 - tl.load(indices + first + at, mask=at == count - 1, other=0)
    least = tl.minimum(gaps, tl.where(at == count - 1, behind, _MOST))
    tl.atomic_min(smallest + row, tl.min(tl.where(at < count, least, _MOST), 0))
    tl.atomic_add(quotients + row, tl.sum(tl.where(at < count, gaps >> b, 0), 0))


@triton.jit(do_not_specialize=_VARIES)
def _lengths(indices, counts, firsts, b, lengths, SIZE: tl.constexpr):
    _, first, count, at = _mine(counts, firsts, SIZE)
    tl.store(lengths + first + at, (_gaps(indices, first, at, at < count) >> b) + 1, mask=at < count)


@triton.jit
def _set(words, bit, field, there):
    """Set the bits of fields of a byte or less, from some bits on: words are the same by whatever order of programs."""
    shifted = field.to(tl.int64) << (bit & 31)
    low, high = (shifted & 0xFFFFFFFF).to(tl.uint32), (shifted >> 32).to(tl.uint32)
    tl.atomic_or(words + (bit >> 5), low.to(tl.int32, bitcast=True), mask=there & (low > 0))
    tl.atomic_or(words + (bit >> 5) + 1, high.to(tl.int32, bitcast=True), mask=there & (high > 0))


@triton.jit(do_not_specialize=_VARIES)
def _pack(indices, counts, firsts, unary, up_to, b, nbytes, words, SIZE: tl.constexpr):
    row, first, count, at = _mine(counts, firsts, SIZE)
    gaps = _gaps(indices, first, at, at < count)
    start, whole, rest = 8 * row * nbytes, b // 8, b % 8
    for byte in range(whole):
        _set(words, start + 8 * (at * whole + byte), (gaps >> (8 * byte)) & 255, at < count)
    _set(words, start + 8 * count * whole + at * rest, (gaps >> (8 * whole)) & ((1 << rest) - 1), at < count)
    longest = tl.load(up_to + first + at, mask=at < count, other=0) - _before(up_to, first)
    end = 8 * tl.load(unary + row) + longest - 1
    _set(words, start + end, tl.full(at.shape, 1, tl.int64), (at < count) & (longest > 0) & (end < 8 * nbytes))


@triton.jit
def _bits(packed, unary, nbytes, BYTES: tl.constexpr):
    """The unary bits that this program looks through, `[bytes, 8]`, and where they lie in their row."""
    row = tl.program_id(1).to(tl.int64)
    byte = tl.load(unary + row) + tl.program_id(0).to(tl.int64) * BYTES + tl.arange(0, BYTES)
    bits = tl.load(packed + row * nbytes + byte, mask=byte < nbytes, other=0).to(tl.int32)
    bit = tl.arange(0, 8)[None, :]
    return (bits[:, None] >> bit) & 1, 8 * byte[:, None] + bit


@triton.jit
def _count_ones(packed, unary, nbytes, ones, BYTES: tl.constexpr):
    bits, _ = _bits(packed, unary, nbytes, BYTES)
    tl.store(ones + tl.program_id(1) * tl.num_programs(0) + tl.program_id(0), tl.sum(tl.sum(bits, 1), 0))


@triton.jit
def _find_ends(packed, unary, nbytes, counts, firsts, ones, up_to, ends, wrong, BYTES: tl.constexpr):
    bits, where = _bits(packed, unary, nbytes, BYTES)
    row = tl.program_id(1)
    tile = row * tl.num_programs(0) + tl.program_id(0)
    count, found = tl.load(counts + row), tl.load(up_to + tile)
    of_byte = tl.sum(bits, 1)
    before = found - tl.load(ones + tile) + tl.cumsum(of_byte, 0) - of_byte
    number = before[:, None] + tl.cumsum(bits, 1) - 1
    tl.store(ends + tl.load(firsts + row) + number, where, mask=(bits > 0) & (number < count))
    if tl.program_id(0) == tl.num_programs(0) - 1:
        tl.atomic_min(wrong, tl.where(found == count, tl.num_programs(1), row))


@triton.jit(do_not_specialize=_VARIES)
def _steps(packed, unary, nbytes, counts, firsts, ends, b, steps, SIZE: tl.constexpr):
    row, first, count, at = _mine(counts, firsts, SIZE)
    end = tl.load(ends + first + at, mask=at < count, other=0)
    before = tl.load(ends + first + at - 1, mask=(at < count) & (at > 0), other=0)
    before = tl.where(at > 0, before, 8 * tl.load(unary + row) - 1)
    whole, rest = b // 8, b % 8
    start = packed + row * nbytes
    remainder = tl.zeros((SIZE,), tl.int64)
    for byte in range(whole):
        place = at * whole + byte
        remainder |= tl.load(start + place, mask=(at < count) & (place < nbytes), other=0).to(tl.int64) << (8 * byte)
    place = count * whole + (at * rest >> 3)
    field = tl.load(start + place, mask=(at < count) & (place < nbytes), other=0).to(tl.int32)
    field |= tl.load(start + place + 1, mask=(at < count) & (place + 1 < nbytes), other=0).to(tl.int32) << 8
    field = (field >> (at * rest & 7).to(tl.int32)) & ((1 << rest) - 1)
    remainder |= field.to(tl.int64) << (8 * whole)
    tl.store(steps + first + at, ((end - before - 1) << b) + remainder + 1, mask=at < count)


@triton.jit
def _indices(up_to, counts, firsts, numel, indices, wrong, SIZE: tl.constexpr):
    _, first, count, at = _mine(counts, firsts, SIZE)
    index = tl.load(up_to + first + at, mask=at < count, other=0) - _before(up_to, first) - 1
    tl.store(indices + first + at, index, mask=at < count)
    beyond = tl.max(((at < count) & (index >= numel)).to(tl.int32), 0)
    tl.atomic_min(wrong, tl.where(beyond > 0, tl.program_id(1), tl.num_programs(1)))


def rice_measure(indices: Tensor, counts: Tensor, b: int, numel: int) -> tuple[Tensor, Tensor]:
    """See `dgcopt.kernels.torch.rice_measure`. What it returns is waited for."""
    rows = _rows(counts, b)
    at_first = [[2**63 - 1 if count else 0 for count in rows[0]], [0] * len(rows[0])]
    table, measures = sent(torch.tensor([*rows, *at_first]), indices.device).split((3, 2))
    if len(indices):
        _measure[_grid(rows)](indices, *table.unbind()[:2], b, numel, *measures.unbind(), SIZE=_SIZE, **UNFUSED)
    smallest, quotients = measures.cpu().unbind()
    return smallest, quotients


def rice_pack(indices: Tensor, counts: Tensor, b: int, nbytes: int) -> Tensor:
    """See `dgcopt.kernels.torch.rice_pack`.

    Of rows whose remainders fit, ends of gaps that do not are left out, and nobody waits to hear of it: who packs has
    measured, and who unpacks finds too few.
    """
    rows = _rows(counts, b)
    if any(unary > nbytes for unary in rows[2]):
        raise ValueError(f"{rows[0]} indices do not fit into rows of {nbytes} bytes")
    words = torch.zeros(triton.cdiv(len(counts) * nbytes, 4), dtype=torch.int32, device=indices.device)
    if len(indices):
        of_row, firsts, unary = sent(torch.tensor(rows), indices.device).unbind()
        lengths = torch.empty_like(indices)
        _lengths[_grid(rows)](indices, of_row, firsts, b, lengths, SIZE=_SIZE, **UNFUSED)
        operands = (indices, of_row, firsts, unary, lengths.cumsum(0), b, nbytes, words)
        _pack[_grid(rows)](*operands, SIZE=_SIZE, **UNFUSED)
    return words.view(torch.uint8).narrow(0, 0, len(counts) * nbytes).view(len(counts), nbytes)


def rice_unpack(packed: Tensor, counts: Tensor, b: int, numel: int) -> tuple[Tensor, int]:
    """See `dgcopt.kernels.torch.rice_unpack`. The number that it returns is waited for."""
    (number, nbytes), device, rows = packed.shape, packed.device, _rows(counts, b)
    of_row, firsts, unary = sent(torch.tensor(rows), device).unbind()
    tiles, total = max(1, triton.cdiv(nbytes - min(rows[2], default=0), _BYTES)), sum(rows[0])
    ones = torch.empty(number, tiles, dtype=torch.int32, device=device)
    ends, steps, indices = (torch.empty(total, dtype=torch.int64, device=device) for _ in range(3))
    wrong = torch.full((), number, dtype=torch.int32, device=device)
    if number:
        place = (packed, unary, nbytes)
        _count_ones[(tiles, number)](*place, ones, BYTES=_BYTES, **UNFUSED)
        found = (of_row, firsts, ones, ones.cumsum(1), ends, wrong)
        _find_ends[(tiles, number)](*place, *found, BYTES=_BYTES, **UNFUSED)
        if total:
            _steps[_grid(rows)](*place, of_row, firsts, ends, b, steps, SIZE=_SIZE, **UNFUSED)
            operands = (steps.cumsum(0), of_row, firsts, numel, indices, wrong)
            _indices[_grid(rows)](*operands, SIZE=_SIZE, **UNFUSED)
    first_wrong = int(wrong)
    return indices, first_wrong if first_wrong < number else -1


def _rows(counts: Tensor, b: int) -> list[list[int]]:
    """Of each row its count, its first index, and the byte where its unary parts start."""
    of_row = counts.tolist()
    *firsts, _ = itertools.accumulate(of_row, initial=0)
    return [of_row, firsts, [count * (b // 8) + -(-count // 8) * (b % 8) for count in of_row]]


def _grid(rows: list[list[int]]) -> tuple[int, int]:
    """So many programs for the longest row, and as many for all others."""
    return triton.cdiv(max(rows[0]), _SIZE), len(rows[0])
