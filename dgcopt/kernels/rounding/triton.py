"""Stochastic rounding to levels, powers of two and trits, in Triton: random numbers and rounding in one pass."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor
from torch.autograd.graph import increment_version

from ..blocks import BLOCK
from ..floats import Put
from ..hashing.torch import halves
from ..hashing.triton import KEY, drawn
from ..packing.triton import GROUPS, pack, unpack
from ..triton.floats import UNFUSED, finite, negated, put
from ..triton.lengths import blocks_of, check_length
from .torch import PER_BYTE

__all__ = [
    "chances",
    "majority",
    "put_levels",
    "put_powers",
    "put_trits",
    "round_levels",
    "round_powers",
    "round_trits",
]

_PER_BLOCK: tl.constexpr = tl.constexpr(BLOCK // 8)
_LARGEST_FLOAT: tl.constexpr = tl.constexpr(torch.finfo(torch.float32).max)


@triton.jit
def chances(at, first, second):
    """In [0, 1), multiples of 2^-24."""
    return (drawn(at, first, second) >> 8).to(tl.int32).to(tl.float32) * 5.9604644775390625e-08


@triton.jit(do_not_specialize=KEY)
def _round_levels(
    values, norms, place, groups, levels, first, second, packed, BITS: tl.constexpr, GROUPS: tl.constexpr
):
    group = tl.program_id(0).to(tl.int64) * GROUPS + tl.arange(0, GROUPS)
    there = group < groups
    at = group[:, None] * 8 + tl.arange(0, 8)[None, :]
    v = finite(tl.load(values + at, mask=there[:, None], other=0))
    norm = tl.load(norms + tl.load(place + group // _PER_BLOCK, mask=there, other=0), mask=there, other=1)
    scale = tl.div_rn(tl.zeros(norm.shape, tl.float32) + levels, norm)
    scale = tl.where(scale > _LARGEST_FLOAT, _LARGEST_FLOAT, scale)
    position = tl.abs(v) * scale[:, None]
    level = position.to(tl.int32).to(tl.float32)  # none is below zero
    level += tl.where(chances(at, first, second) < position - level, 1.0, 0.0)
    fields = tl.where(level > levels, levels, level).to(tl.int32) | ((v < 0).to(tl.int32) << BITS)
    if BITS == 7:
        tl.store(packed + at, fields.to(tl.uint8), mask=there[:, None])
    else:
        pack(fields, packed, group, there, 1 + BITS)


@triton.jit
def _put_levels(
    packed, scales, place, groups, out, highest, BITS: tl.constexpr, HOW: tl.constexpr, GROUPS: tl.constexpr
):
    group = tl.program_id(0).to(tl.int64) * GROUPS + tl.arange(0, GROUPS)
    there = group < groups
    at = group[:, None] * 8 + tl.arange(0, 8)[None, :]
    if BITS == 7:
        fields = tl.load(packed + at, mask=there[:, None], other=0).to(tl.int32)
    else:
        fields = unpack(packed, group, there, 1 + BITS)
    scale = tl.load(scales + tl.load(place + group // _PER_BLOCK, mask=there, other=0), mask=there, other=0)
    level = fields & ((1 << BITS) - 1)
    size = level.to(tl.float32) * scale[:, None]
    put(tl.where((fields >> BITS) > 0, negated(size), size), out, out, at, there[:, None], HOW)
    tl.atomic_max(highest, tl.max(level))


@triton.jit(do_not_specialize=KEY)
def _round_powers(values, first, second, numel, exponents, signs, GROUPS: tl.constexpr):
    group = tl.program_id(0).to(tl.int64) * GROUPS + tl.arange(0, GROUPS)
    at = group[:, None] * 8 + tl.arange(0, 8)[None, :]
    v = finite(tl.load(values + at, mask=at < numel, other=0))
    up = (drawn(at, first, second) >> 9).to(tl.int32)
    exponent = (tl.abs(v).to(tl.int32, bitcast=True) + up) >> 23
    tl.store(exponents + at, exponent.to(tl.uint8), mask=at < numel)
    pack((v < 0).to(tl.int32), signs, group, group * 8 < numel, 1)


@triton.jit
def _put_powers(exponents, signs, numel, out, highest, HOW: tl.constexpr, GROUPS: tl.constexpr):
    group = tl.program_id(0).to(tl.int64) * GROUPS + tl.arange(0, GROUPS)
    at = group[:, None] * 8 + tl.arange(0, 8)[None, :]
    exponent = tl.load(exponents + at, mask=at < numel, other=0).to(tl.int32)
    size = (exponent << 23).to(tl.float32, bitcast=True)
    minus = unpack(signs, group, group * 8 < numel, 1)
    put(tl.where(minus > 0, negated(size), size), out, out, at, at < numel, HOW)
    tl.atomic_max(highest, tl.max(exponent))


def round_levels(values: Tensor, norms: Tensor, place: Tensor, levels: int, key: int) -> Tensor:
    """See `round_levels` in torch.py."""
    blocks = blocks_of(values)
    check_length(blocks, place)
    bits, groups = levels.bit_length(), blocks * (BLOCK // 8)
    packed = torch.empty(groups * (1 + bits), dtype=torch.uint8, device=values.device)
    if groups:
        _round_levels[(triton.cdiv(groups, GROUPS),)](
            values, norms, place, groups, float(levels), *halves(key), packed, BITS=bits, GROUPS=GROUPS, **UNFUSED
        )
    return packed


def put_levels(packed: Tensor, bits: int, scales: Tensor, place: Tensor, out: Tensor, how: Put) -> Tensor:
    """See `put_levels` in torch.py."""
    increment_version(out)
    blocks = blocks_of(out)
    check_length(blocks, place)
    groups = blocks * (BLOCK // 8)
    check_length(groups * (1 + bits), packed)
    highest = torch.zeros((), dtype=torch.int32, device=out.device)
    if groups:
        _put_levels[(triton.cdiv(groups, GROUPS),)](
            packed, scales, place, groups, out, highest, BITS=bits, HOW=how, GROUPS=GROUPS, **UNFUSED
        )
    return highest


def round_powers(values: Tensor, key: int) -> Tensor:
    """See `round_powers` in torch.py."""
    numel, groups = len(values), triton.cdiv(len(values), 8)
    message = torch.empty(numel + groups, dtype=torch.uint8, device=values.device)
    if numel:
        exponents, signs = message.split((numel, groups))
        _round_powers[(triton.cdiv(groups, GROUPS),)](
            values, *halves(key), numel, exponents, signs, GROUPS=GROUPS, **UNFUSED
        )
    return message


def put_powers(message: Tensor, out: Tensor, how: Put) -> Tensor:
    """See `put_powers` in torch.py."""
    increment_version(out)
    numel = len(out)
    check_length(numel + triton.cdiv(numel, 8), message)
    highest = torch.zeros((), dtype=torch.int32, device=out.device)
    if numel:
        exponents, signs = message.split((numel, len(message) - numel))
        _put_powers[(triton.cdiv(numel, 8 * GROUPS),)](
            exponents, signs, numel, out, highest, HOW=how, GROUPS=GROUPS, **UNFUSED
        )
    return highest


_SIZE = 512
"""Bytes that one program works on."""


@triton.jit(do_not_specialize=KEY)
def _round_trits(
    values,
    scales,
    place,
    numel,
    length,
    first,
    second,
    packed,
    BLOCK: tl.constexpr,
    FIVE: tl.constexpr,
    SIZE: tl.constexpr,
):
    byte = tl.program_id(0).to(tl.int64) * SIZE + tl.arange(0, SIZE)
    digits = tl.zeros((SIZE,), tl.int32)
    for k in tl.static_range(FIVE):
        at = byte + k * length
        there = (byte < length) & (at < numel)
        v = finite(tl.load(values + at, mask=there, other=0))
        scale = tl.load(scales + tl.load(place + at // BLOCK, mask=there, other=0), mask=there, other=0)
        kept = chances(at, first, second) * scale < tl.abs(v)
        trit = tl.where(kept, tl.where(v < 0, 0, 2), 1)
        digits = digits * 3 + tl.where(there, trit, 0)
    tl.store(packed + byte, digits.to(tl.uint8), mask=byte < length)


@triton.jit
def _put_trits(
    packed,
    scales,
    place,
    numel,
    length,
    out,
    wrong,
    HOW: tl.constexpr,
    BLOCK: tl.constexpr,
    FIVE: tl.constexpr,
    SIZE: tl.constexpr,
):
    byte = tl.program_id(0).to(tl.int64) * SIZE + tl.arange(0, SIZE)
    rest = tl.load(packed + byte, mask=byte < length, other=0).to(tl.int32)
    tl.atomic_max(wrong, (tl.max(rest) > 242).to(tl.int32))
    for k in tl.static_range(FIVE):
        at = byte + (FIVE - 1 - k) * length
        there = (byte < length) & (at < numel)
        scale = tl.load(scales + tl.load(place + at // BLOCK, mask=there, other=0), mask=there, other=0)
        put((rest % 3 - 1).to(tl.float32) * scale, out, out, at, there, HOW)
        rest = rest // 3


@triton.jit
def _majority(votes, voters, bytes, length, packed, FIVE: tl.constexpr, SIZE: tl.constexpr):
    byte = tl.program_id(0).to(tl.int64) * SIZE + tl.arange(0, SIZE)
    digits = tl.zeros((SIZE,), tl.int32)
    for k in tl.static_range(FIVE):
        at = byte + k * length
        there = (byte < length) & (at < 8 * bytes)
        minuses = tl.zeros((SIZE,), tl.int32)
        theirs = votes + at // 8
        for _ in range(voters):
            minuses += (tl.load(theirs, mask=there, other=0).to(tl.int32) >> (at % 8).to(tl.int32)) & 1
            theirs += bytes
        trit = tl.where(2 * minuses < voters, 2, tl.where(2 * minuses > voters, 0, 1))
        digits = digits * 3 + tl.where(there, trit, 0)
    tl.store(packed + byte, digits.to(tl.uint8), mask=byte < length)


def round_trits(values: Tensor, scales: Tensor, place: Tensor, key: int) -> Tensor:
    """See `round_trits` in torch.py."""
    check_length(triton.cdiv(len(values), BLOCK), place)
    packed = torch.empty(triton.cdiv(len(values), PER_BYTE), dtype=torch.uint8, device=values.device)
    if len(packed):
        operands = (values, scales, place, len(values), len(packed), *halves(key), packed)
        _round_trits[(triton.cdiv(len(packed), _SIZE),)](*operands, **_SIZES, **UNFUSED)
    return packed


def put_trits(packed: Tensor, scales: Tensor, place: Tensor, out: Tensor, how: Put) -> Tensor:
    """See `put_trits` in torch.py."""
    increment_version(out)
    check_length(triton.cdiv(len(out), BLOCK), place)
    check_length(triton.cdiv(len(out), PER_BYTE), packed)
    wrong = torch.zeros((), dtype=torch.int32, device=out.device)
    if len(packed):
        operands = (packed, scales, place, len(out), len(packed), out, wrong)
        _put_trits[(triton.cdiv(len(packed), _SIZE),)](*operands, HOW=how, **_SIZES, **UNFUSED)
    return wrong == 0


def majority(votes: Tensor) -> Tensor:
    """See `majority` in torch.py."""
    voters, bytes = votes.shape
    packed = torch.empty(triton.cdiv(8 * bytes, PER_BYTE), dtype=torch.uint8, device=votes.device)
    if len(packed):
        grid = (triton.cdiv(len(packed), _SIZE),)
        _majority[grid](votes, voters, bytes, len(packed), packed, FIVE=PER_BYTE, SIZE=_SIZE, **UNFUSED)
    return packed


_SIZES = {"BLOCK": BLOCK, "FIVE": PER_BYTE, "SIZE": _SIZE}
