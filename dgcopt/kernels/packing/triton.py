"""Fields of a few bits, and Rice codes, in Triton: in parallel both ways."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from ..triton.floats import UNFUSED
from ..triton.lengths import check_length

__all__ = ["GROUPS", "pack", "pack_small", "rice_measure", "rice_pack", "rice_unpack", "unpack", "unpack_small"]

GROUPS = 256
"""Groups of eight fields that one program works on."""


@triton.jit
def pack(fields, packed, group, there, WIDTH: tl.constexpr):
    """Write fields, `[groups, 8]`, each group to its place; as `pack_small` in torch.py."""
    shift = WIDTH * tl.arange(0, 8)[None, :]
    word = tl.sum(fields.to(tl.int32 if WIDTH <= 3 else tl.int64) << shift, 1)
    if WIDTH == 1:
        tl.store(packed + group, word.to(tl.uint8), mask=there)
    else:
        byte = tl.arange(0, 8)[None, :]
        bits = (word[:, None] >> 8 * tl.minimum(byte, WIDTH - 1)) & 0xFF
        tl.store(packed + group[:, None] * WIDTH + byte, bits.to(tl.uint8), mask=there[:, None] & (byte < WIDTH))


@triton.jit
def unpack(packed, group, there, WIDTH: tl.constexpr):
    """The fields of some groups, int32 `[groups, 8]`."""
    if WIDTH == 1:
        word = tl.load(packed + group, mask=there, other=0).to(tl.int32)
    else:
        byte = tl.arange(0, 8)[None, :]
        bits = tl.load(packed + group[:, None] * WIDTH + byte, mask=there[:, None] & (byte < WIDTH), other=0)
        word = tl.sum(bits.to(tl.int64) << 8 * byte, 1)
    return ((word[:, None] >> WIDTH * tl.arange(0, 8)[None, :]) & ((1 << WIDTH) - 1)).to(tl.int32)


@triton.jit
def _pack_small(fields, packed, count, WIDTH: tl.constexpr, GROUPS: tl.constexpr):
    group = tl.program_id(0).to(tl.int64) * GROUPS + tl.arange(0, GROUPS)
    at = group[:, None] * 8 + tl.arange(0, 8)[None, :]
    pack(tl.load(fields + at, mask=at < count, other=0), packed, group, group * 8 < count, WIDTH)


@triton.jit
def _unpack_small(packed, fields, count, WIDTH: tl.constexpr, GROUPS: tl.constexpr):
    group = tl.program_id(0).to(tl.int64) * GROUPS + tl.arange(0, GROUPS)
    at = group[:, None] * 8 + tl.arange(0, 8)[None, :]
    found = unpack(packed, group, group * 8 < count, WIDTH)
    tl.store(fields + at, found.to(tl.uint8), mask=at < count)


def pack_small(fields: Tensor, width: int) -> Tensor:
    """See `pack_small` in torch.py."""
    packed = fields.new_empty(triton.cdiv(len(fields), 8) * width)
    if len(packed):
        _pack_small[(triton.cdiv(len(fields), 8 * GROUPS),)](
            fields, packed, len(fields), WIDTH=width, GROUPS=GROUPS, **UNFUSED
        )
    return packed


def unpack_small(packed: Tensor, count: int, width: int) -> Tensor:
    """See `unpack_small` in torch.py."""
    if not width:
        return packed.new_zeros(count)
    check_length(triton.cdiv(count, 8) * width, packed)
    fields = packed.new_empty(count)
    if count:
        _unpack_small[(triton.cdiv(count, 8 * GROUPS),)](packed, fields, count, WIDTH=width, GROUPS=GROUPS, **UNFUSED)
    return fields


_SIZE = 256
"""Indices that one program works on."""

_BYTES = 256
"""Bytes of unary parts that one program looks through."""

_VARIES = ["b"]
"""Arguments for which Triton must not compile another kernel per value."""

_MOST: tl.constexpr = tl.constexpr(2**63 - 1)


@triton.jit
def _mine(counts, length, SIZE: tl.constexpr):
    """Return the row of this program, its start and count, and this program's indices in it."""
    row = tl.program_id(1).to(tl.int64)
    return row, row * length, tl.load(counts + row), tl.program_id(0).to(tl.int64) * SIZE + tl.arange(0, SIZE)


@triton.jit
def _unary(count, b):
    """At which byte of a row the unary parts start."""
    return count * (b // 8) + (count + 7) // 8 * (b % 8)


@triton.jit
def _gaps(indices, first, at, there):
    """Return the gap between each index of a row and its predecessor."""
    before = tl.load(indices + first + at - 1, mask=there & (at > 0), other=-1)
    return tl.load(indices + first + at, mask=there, other=0) - before - 1


@triton.jit(do_not_specialize=_VARIES)
def _measure(indices, counts, length, b, numel, smallest, quotients, SIZE: tl.constexpr):
    row, first, count, at = _mine(counts, length, SIZE)
    gaps = _gaps(indices, first, at, at < count)
    behind = numel - 1 - tl.load(indices + first + at, mask=at == count - 1, other=0)
    least = tl.minimum(gaps, tl.where(at == count - 1, behind, _MOST))
    least = tl.min(tl.where(at < count, least, _MOST), 0)
    tl.atomic_min(smallest + row, tl.where(count > 0, least, 0))
    tl.atomic_add(quotients + row, tl.sum(tl.where(at < count, gaps >> b, 0), 0))


@triton.jit(do_not_specialize=_VARIES)
def _lengths(indices, counts, length, b, lengths, SIZE: tl.constexpr):
    _, first, count, at = _mine(counts, length, SIZE)
    longest = (_gaps(indices, first, at, at < count) >> b) + 1
    tl.store(lengths + first + at, tl.where(at < count, longest, 0), mask=at < length)


@triton.jit
def _set(words, bit, field, there):
    """Set the bits of fields of a byte or less, from some bits on; words are the same for any order of programs."""
    shifted = field.to(tl.int64) << (bit & 31)
    low, high = (shifted & 0xFFFFFFFF).to(tl.uint32), (shifted >> 32).to(tl.uint32)
    tl.atomic_or(words + (bit >> 5), low.to(tl.int32, bitcast=True), mask=there & (low > 0))
    tl.atomic_or(words + (bit >> 5) + 1, high.to(tl.int32, bitcast=True), mask=there & (high > 0))


@triton.jit(do_not_specialize=_VARIES)
def _pack(indices, counts, length, up_to, b, nbytes, words, SIZE: tl.constexpr):
    row, first, count, at = _mine(counts, length, SIZE)
    there = at < tl.where(_unary(count, b) <= nbytes, count, 0)
    gaps = _gaps(indices, first, at, there)
    start, whole, rest = 8 * row * nbytes, b // 8, b % 8
    for byte in range(whole):
        _set(words, start + 8 * (at * whole + byte), (gaps >> (8 * byte)) & 255, there)
    _set(words, start + 8 * count * whole + at * rest, (gaps >> (8 * whole)) & ((1 << rest) - 1), there)
    end = 8 * _unary(count, b) + tl.load(up_to + first + at, mask=there, other=0) - 1
    _set(words, start + end, tl.full(at.shape, 1, tl.int64), there & (end < 8 * nbytes))


@triton.jit
def _bits(packed, counts, b, nbytes, BYTES: tl.constexpr):
    """Return this program's unary bits, `[bytes, 8]`, and their places in their row."""
    row = tl.program_id(1).to(tl.int64)
    byte = tl.program_id(0).to(tl.int64) * BYTES + tl.arange(0, BYTES)
    bits = tl.load(packed + row * nbytes + byte, mask=byte < nbytes, other=0).to(tl.int32)
    bits = tl.where(byte < _unary(tl.load(counts + row), b), 0, bits)
    bit = tl.arange(0, 8)[None, :]
    return (bits[:, None] >> bit) & 1, 8 * byte[:, None] + bit


@triton.jit(do_not_specialize=_VARIES)
def _count_ones(packed, counts, b, nbytes, ones, BYTES: tl.constexpr):
    bits, _ = _bits(packed, counts, b, nbytes, BYTES)
    tl.store(ones + tl.program_id(1) * tl.num_programs(0) + tl.program_id(0), tl.sum(tl.sum(bits, 1), 0))


@triton.jit(do_not_specialize=_VARIES)
def _find_ends(packed, counts, b, nbytes, length, ones, up_to, ends, wrong, BYTES: tl.constexpr):
    bits, position = _bits(packed, counts, b, nbytes, BYTES)
    row = tl.program_id(1)
    tile = row * tl.num_programs(0) + tl.program_id(0)
    count, found = tl.load(counts + row), tl.load(up_to + tile)
    of_byte = tl.sum(bits, 1)
    before = found - tl.load(ones + tile) + tl.cumsum(of_byte, 0) - of_byte
    number = before[:, None] + tl.cumsum(bits, 1) - 1
    tl.store(ends + row.to(tl.int64) * length + number, position, mask=(bits > 0) & (number < count))
    if tl.program_id(0) == tl.num_programs(0) - 1:
        tl.store(wrong + row, (found != count).to(tl.int32))


@triton.jit(do_not_specialize=_VARIES)
def _steps(packed, counts, b, nbytes, length, ends, steps, SIZE: tl.constexpr):
    row, first, count, at = _mine(counts, length, SIZE)
    end = tl.load(ends + first + at, mask=at < count, other=0)
    before = tl.load(ends + first + at - 1, mask=(at < count) & (at > 0), other=0)
    before = tl.where(at > 0, before, 8 * _unary(count, b) - 1)
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
    step = ((end - before - 1) << b) + remainder + 1
    tl.store(steps + first + at, tl.where(at < count, step, 0), mask=at < length)


@triton.jit
def _beyond(up_to, counts, length, numel, wrong, SIZE: tl.constexpr):
    row, first, count, at = _mine(counts, length, SIZE)
    index = tl.load(up_to + first + at, mask=at < count, other=0) - 1
    tl.atomic_or(wrong + row, tl.max(((at < count) & (index >= numel)).to(tl.int32), 0))


def rice_measure(indices: Tensor, counts: Tensor, b: int, numel: int) -> tuple[Tensor, Tensor]:
    """See `rice_measure` in torch.py."""
    length = indices.shape[1]
    smallest, quotients = torch.full_like(counts, 2**63 - 1 if length else 0), torch.zeros_like(counts)
    if len(counts) and length:
        _measure[_grid(indices)](indices, counts, length, b, numel, smallest, quotients, SIZE=_SIZE, **UNFUSED)
    return smallest, quotients


def rice_pack(indices: Tensor, counts: Tensor, b: int, nbytes: int) -> Tensor:
    """See `rice_pack` in torch.py."""
    rows, length = indices.shape
    words = torch.zeros(triton.cdiv(rows * nbytes, 4), dtype=torch.int32, device=indices.device)
    if rows and length:
        lengths = torch.empty_like(indices)
        _lengths[_grid(indices)](indices, counts, length, b, lengths, SIZE=_SIZE, **UNFUSED)
        operands = (indices, counts, length, lengths.cumsum(1), b, nbytes, words)
        _pack[_grid(indices)](*operands, SIZE=_SIZE, **UNFUSED)
    return words.view(torch.uint8).narrow(0, 0, rows * nbytes).view(rows, nbytes)


def rice_unpack(packed: Tensor, counts: Tensor, b: int, numel: int, length: int) -> tuple[Tensor, Tensor]:
    """See `rice_unpack` in torch.py."""
    (rows, nbytes), device = packed.shape, packed.device
    tiles = max(1, triton.cdiv(nbytes, _BYTES))
    ones = torch.empty(rows, tiles, dtype=torch.int32, device=device)
    ends, steps = (torch.zeros(rows, length, dtype=torch.int64, device=device) for _ in range(2))
    wrong = torch.empty(rows, dtype=torch.int32, device=device)
    if not rows:
        return steps, wrong > 0
    place = (packed, counts, b, nbytes)
    _count_ones[(tiles, rows)](*place, ones, BYTES=_BYTES, **UNFUSED)
    _find_ends[(tiles, rows)](*place, length, ones, ones.cumsum(1), ends, wrong, BYTES=_BYTES, **UNFUSED)
    if length:
        _steps[_grid(steps)](*place, length, ends, steps, SIZE=_SIZE, **UNFUSED)
        steps = steps.cumsum(1)
        _beyond[_grid(steps)](steps, counts, length, numel, wrong, SIZE=_SIZE, **UNFUSED)
    return steps - 1, wrong > 0


def _grid(indices: Tensor) -> tuple[int, int]:
    """Programs for each row."""
    return triton.cdiv(indices.shape[1], _SIZE), len(indices)
