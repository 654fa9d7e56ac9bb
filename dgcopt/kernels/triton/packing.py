"""Fields of a few bits, side by side, in Triton."""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from .floats import UNFUSED
from .lengths import check_length

__all__ = ["GROUPS", "pack", "pack_small", "unpack", "unpack_small"]

GROUPS = 256
"""Groups of eight fields that one program works on."""


@triton.jit
def pack(fields, packed, group, there, WIDTH: tl.constexpr):
    """Write fields, `[groups, 8]`, each group to its place; as `dgcopt.kernels.torch.pack_small` has them."""
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
    """See `dgcopt.kernels.torch.pack_small`."""
    packed = fields.new_empty(triton.cdiv(len(fields), 8) * width)
    if len(packed):
        _pack_small[(triton.cdiv(len(fields), 8 * GROUPS),)](
            fields, packed, len(fields), WIDTH=width, GROUPS=GROUPS, **UNFUSED
        )
    return packed


def unpack_small(packed: Tensor, count: int, width: int) -> Tensor:
    """See `dgcopt.kernels.torch.unpack_small`."""
    if not width:
        return packed.new_zeros(count)
    check_length(triton.cdiv(count, 8) * width, packed)
    fields = packed.new_empty(count)
    if count:
        _unpack_small[(triton.cdiv(count, 8 * GROUPS),)](packed, fields, count, WIDTH=width, GROUPS=GROUPS, **UNFUSED)
    return fields
