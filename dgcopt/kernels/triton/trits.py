"""Minus one, zero or one, five in a byte, in Triton."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor
from torch.autograd.graph import increment_version

from ..blocks import BLOCK
from ..torch import PER_BYTE, Put, halves
from .floats import UNFUSED, finite, put
from .lengths import check_length
from .rounding import KEY, chances

__all__ = ["majority", "put_trits", "round_trits"]

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
    """See `dgcopt.kernels.torch.round_trits`."""
    check_length(triton.cdiv(len(values), BLOCK), place)
    packed = torch.empty(triton.cdiv(len(values), PER_BYTE), dtype=torch.uint8, device=values.device)
    if len(packed):
        operands = (values, scales, place, len(values), len(packed), *halves(key), packed)
        _round_trits[(triton.cdiv(len(packed), _SIZE),)](*operands, **_SIZES, **UNFUSED)
    return packed


def put_trits(packed: Tensor, scales: Tensor, place: Tensor, out: Tensor, how: Put) -> Tensor:
    """See `dgcopt.kernels.torch.put_trits`."""
    increment_version(out)
    check_length(triton.cdiv(len(out), BLOCK), place)
    check_length(triton.cdiv(len(out), PER_BYTE), packed)
    wrong = torch.zeros((), dtype=torch.int32, device=out.device)
    if len(packed):
        operands = (packed, scales, place, len(out), len(packed), out, wrong)
        _put_trits[(triton.cdiv(len(packed), _SIZE),)](*operands, HOW=how, **_SIZES, **UNFUSED)
    return wrong == 0


def majority(votes: Tensor) -> Tensor:
    """See `dgcopt.kernels.torch.majority`."""
    voters, bytes = votes.shape
    packed = torch.empty(triton.cdiv(8 * bytes, PER_BYTE), dtype=torch.uint8, device=votes.device)
    if len(packed):
        grid = (triton.cdiv(len(packed), _SIZE),)
        _majority[grid](votes, voters, bytes, len(packed), packed, FIVE=PER_BYTE, SIZE=_SIZE, **UNFUSED)
    return packed


_SIZES = {"BLOCK": BLOCK, "FIVE": PER_BYTE, "SIZE": _SIZE}
