"""Signs, one bit each, in Triton."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import triton
import triton.language as tl
from torch import Tensor
from torch.autograd.graph import increment_version

from ..blocks import BLOCK
from ..floats import Put
from ..memory.triton import mix
from ..packing.triton import GROUPS, pack, unpack
from ..parts import Mixture
from ..reductions.triton import ROWS, sum_of_rows
from ..triton.floats import UNFUSED, finite, put
from ..triton.lengths import blocks_of, check_length

__all__ = ["mix_signs", "pack_signs", "put_signs", "split_signs", "split_sum", "split_sum_of_signs"]

_PER_BLOCK: tl.constexpr = tl.constexpr(BLOCK // 8)


@triton.jit
def _signs(x, keep, y, add, out, numel, packed, MIXES: tl.constexpr, ZERO_IS_MINUS: tl.constexpr, GROUPS: tl.constexpr):
    group = tl.program_id(0).to(tl.int64) * GROUPS + tl.arange(0, GROUPS)
    at = group[:, None] * 8 + tl.arange(0, 8)[None, :]
    v = tl.load(x + at, mask=at < numel, other=0)
    if MIXES:
        v = tl.fma(tl.load(y + at, mask=at < numel, other=0), tl.full(at.shape, add, tl.float32), v * keep)
        tl.store(out + at, v, mask=at < numel)
    minus = (v <= 0) if ZERO_IS_MINUS else (v < 0)
    pack((minus & (at < numel)).to(tl.int32), packed, group, group * 8 < numel, 1)


@triton.jit
def _split(
    x,
    y,
    lengths,
    out,
    packed,
    sums,
    blocks,
    ADDS: tl.constexpr,
    CUTS: tl.constexpr,
    BLOCK: tl.constexpr,
    ROWS: tl.constexpr,
):
    rows = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    column = tl.arange(0, BLOCK)[None, :]
    at, there = rows[:, None] * BLOCK + column, (rows < blocks)[:, None]
    v = tl.load(x + at, mask=there, other=0)
    if ADDS:
        v += tl.load(y + at, mask=there, other=0)
    if CUTS:
        v = tl.where(column < tl.load(lengths + rows, mask=rows < blocks, other=0)[:, None], v, 0.0)
    if ADDS or CUTS:
        tl.store(out + at, v, mask=there)
    v = finite(v)
    minus, size = v < 0, tl.abs(v)
    bits = tl.reshape(minus.to(tl.int32), (ROWS * BLOCK // 8, 8))
    group = tl.program_id(0).to(tl.int64) * (ROWS * BLOCK // 8) + tl.arange(0, ROWS * BLOCK // 8)
    pack(bits, packed, group, group < blocks * (BLOCK // 8), 1)
    tl.store(sums + rows, sum_of_rows(tl.where(minus, 0.0, size), ROWS, 6), mask=rows < blocks)
    tl.store(sums + blocks + rows, sum_of_rows(tl.where(minus, size, 0.0), ROWS, 6), mask=rows < blocks)
    tl.store(sums + 2 * blocks + rows, tl.sum(minus.to(tl.int32), 1).to(tl.float32), mask=rows < blocks)


@triton.jit
def _put_signs(packed, above, below, place, groups, before, out, HOW: tl.constexpr, GROUPS: tl.constexpr):
    group = tl.program_id(0).to(tl.int64) * GROUPS + tl.arange(0, GROUPS)
    there = group < groups
    at = group[:, None] * 8 + tl.arange(0, 8)[None, :]
    tensor = tl.load(place + group // _PER_BLOCK, mask=there, other=0)
    plus = tl.load(above + tensor, mask=there, other=0)[:, None]
    minus = -tl.load(below + tensor, mask=there, other=0)[:, None]
    x = tl.where(unpack(packed, group, there, 1) > 0, minus, plus)
    put(x, before, out, at, there[:, None], HOW)


def pack_signs(values: Tensor, zero_is_minus: bool = False) -> Tensor:
    """See `pack_signs` in torch.py."""
    return _packed(values, 1.0, values, 0.0, values, zero_is_minus, mixes=False)


def mix_signs(x: Tensor, keep: float, y: Tensor, add: float, out: Tensor, zero_is_minus: bool = False) -> Tensor:
    """See `mix_signs` in torch.py."""
    increment_version(out)
    return _packed(x, keep, y, add, out, zero_is_minus, mixes=True)


def _packed(x: Tensor, keep: float, y: Tensor, add: float, out: Tensor, zero_is_minus: bool, mixes: bool) -> Tensor:
    check_length(len(x), y, out)
    packed = torch.empty(triton.cdiv(len(x), 8), dtype=torch.uint8, device=x.device)
    if len(x):
        modes = {"MIXES": mixes, "ZERO_IS_MINUS": zero_is_minus, "GROUPS": GROUPS}
        grid = (triton.cdiv(len(packed), GROUPS),)
        _signs[grid](x, float(keep), y, float(add), out, len(x), packed, **modes, **UNFUSED)
    return packed


def split_signs(values: Tensor) -> tuple[Tensor, Tensor]:
    """See `split_signs` in torch.py."""
    return _parts(values, None, None, values)


def split_sum(x: Tensor, y: Tensor, out: Tensor, mixture: Mixture | None = None) -> tuple[Tensor, Tensor]:
    """See `split_sum` in torch.py."""
    if mixture is not None:
        mix(x, mixture)
    increment_version(out)
    return _parts(x, y, None, out)


def split_sum_of_signs(
    base: Tensor, packed: Sequence[Tensor], scales: Tensor, place: Tensor, lengths: Tensor, out: Tensor
) -> tuple[Tensor, Tensor]:
    """See `split_sum_of_signs` in torch.py."""
    increment_version(out)
    before = base
    for signs, magnitudes in zip(packed, scales, strict=True):
        _put(signs, magnitudes, magnitudes, place, before, out, "add")
        before = out
    return _parts(before, None, lengths, out)


def _parts(x: Tensor, y: Tensor | None, lengths: Tensor | None, out: Tensor) -> tuple[Tensor, Tensor]:
    blocks = blocks_of(out)
    check_length(len(out), x, *([] if y is None else [y]))
    packed = torch.empty(blocks * (BLOCK // 8), dtype=torch.uint8, device=x.device)
    sums = x.new_empty(3, blocks)
    if blocks:
        operands = (x, x if y is None else y, x if lengths is None else lengths, out, packed, sums, blocks)
        modes = {"ADDS": y is not None, "CUTS": lengths is not None, "BLOCK": BLOCK, "ROWS": ROWS}
        _split[(triton.cdiv(blocks, ROWS),)](*operands, **modes, **UNFUSED)
    return packed, sums


def put_signs(
    packed: Tensor,
    above: Tensor,
    below: Tensor,
    place: Tensor,
    out: Tensor,
    how: Put,
    mixture: Mixture | None = None,
) -> None:
    """See `put_signs` in torch.py."""
    increment_version(out)
    _put(packed, above, below, place, out, out, how)
    if mixture is not None:
        mix(out, mixture)


def _put(packed: Tensor, above: Tensor, below: Tensor, place: Tensor, before: Tensor, out: Tensor, how: Put) -> None:
    blocks = blocks_of(out)
    check_length(blocks, place)
    groups = blocks * (BLOCK // 8)
    check_length(groups, packed)
    check_length(len(out), before)
    if groups:
        _put_signs[(triton.cdiv(groups, GROUPS),)](
            packed, above, below, place, groups, before, out, HOW=how, GROUPS=GROUPS, **UNFUSED
        )
