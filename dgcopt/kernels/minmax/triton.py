"""256 levels between the smallest and the largest value of a row, in Triton."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor
from torch.autograd.graph import increment_version

from ..floats import Put
from ..memory.triton import mix
from ..parts import Mixture
from ..triton.floats import UNFUSED, finite, nearest, put
from ..triton.lengths import check_length

__all__ = ["minmax_codes", "minmax_ends", "minmax_of_mean", "put_minmax"]

_SIZE = 2048
"""Values that one program works on."""


@triton.jit
def _levels(ends):
    """Return the factor of a row's values, and its highest level."""
    low, high = tl.load(ends), tl.load(ends + 1)
    scale = tl.div_rn(tl.zeros(high.shape, tl.float32) + 255.0, (high - low) + 1e-7)
    most = tl.div_rn(tl.zeros(high.shape, tl.float32) + 1.7014118346046923e38, tl.maximum(tl.abs(low), tl.abs(high)))
    scale = tl.minimum(scale, most)
    return scale, nearest(high * scale)


@triton.jit
def _write_ends(v, there, ends, row, parts):
    """The smallest and the largest of a part of a row."""
    to = ends + (row * parts + tl.program_id(0)) * 2
    tl.store(to, tl.min(tl.where(there, v, float("inf")), 0))
    tl.store(to + 1, tl.max(tl.where(there, v, float("-inf")), 0))


@triton.jit
def _ends(rows, stride, numel, ends, parts, SIZE: tl.constexpr):
    at, row = tl.program_id(0).to(tl.int64) * SIZE + tl.arange(0, SIZE), tl.program_id(1).to(tl.int64)
    v = finite(tl.load(rows + row * stride + at, mask=at < numel, other=0))
    _write_ends(v, at < numel, ends, row, parts)


@triton.jit
def _codes(rows, stride, numel, ends, codes, codes_stride, SIZE: tl.constexpr):
    at, row = tl.program_id(0).to(tl.int64) * SIZE + tl.arange(0, SIZE), tl.program_id(1).to(tl.int64)
    scale, upper = _levels(ends + 2 * row)
    level = nearest(finite(tl.load(rows + row * stride + at, mask=at < numel, other=0)) * scale)
    level = tl.where(level > upper, upper, level) - (upper - 255)
    level = tl.where(level > 255, 255.0, tl.where(level < 0, 0.0, level))
    tl.store(codes + row * codes_stride + at, level.to(tl.int32).to(tl.uint8), mask=at < numel)


@triton.jit
def _value(codes, ends, at, there):
    scale, upper = _levels(ends)
    level = tl.load(codes + at, mask=there, other=0).to(tl.float32) + (upper - 255)
    return tl.div_rn(level, tl.zeros(level.shape, tl.float32) + scale)


@triton.jit
def _put_minmax(codes, ends, numel, out, HOW: tl.constexpr, SIZE: tl.constexpr):
    at = tl.program_id(0).to(tl.int64) * SIZE + tl.arange(0, SIZE)
    put(_value(codes, ends, at, at < numel), out, out, at, at < numel, HOW)


@triton.jit
def _mean(codes, stride, ranks, ends, numel, divisor, mean, new_ends, parts, SIZE: tl.constexpr):
    at = tl.program_id(0).to(tl.int64) * SIZE + tl.arange(0, SIZE)
    there = at < numel
    total = _value(codes, ends, at, there)
    for _ in range(1, ranks):
        codes += stride
        ends += 2
        total += _value(codes, ends, at, there)
    total = tl.div_rn(total, tl.zeros(total.shape, tl.float32) + divisor)
    tl.store(mean + at, total, mask=there)
    _write_ends(finite(total), there, new_ends, 0, parts)


def minmax_ends(rows: Tensor, mixture: Mixture | None = None) -> Tensor:
    """See `minmax_ends` in torch.py."""
    if mixture is not None:
        mix(rows.view(-1), mixture)
    count, numel = rows.shape
    parts = triton.cdiv(numel, _SIZE)
    ends = torch.empty(count, parts, 2, dtype=torch.float32, device=rows.device)
    if count:
        _ends[(parts, count)](rows, rows.stride(0), numel, ends, parts, SIZE=_SIZE, **UNFUSED)
    return _outermost(ends)


def minmax_codes(rows: Tensor, ends: Tensor, codes: Tensor) -> None:
    """See `minmax_codes` in torch.py."""
    increment_version(codes)
    count, numel = rows.shape
    check_length(count * numel, codes)
    if count:
        operands = (rows, rows.stride(0), numel, ends.contiguous(), codes, codes.stride(0))
        _codes[(triton.cdiv(numel, _SIZE), count)](*operands, SIZE=_SIZE, **UNFUSED)


def put_minmax(codes: Tensor, ends: Tensor, out: Tensor, how: Put, mixture: Mixture | None = None) -> None:
    """See `put_minmax` in torch.py."""
    increment_version(out)
    check_length(len(out), codes)
    if len(out):
        _put_minmax[(triton.cdiv(len(out), _SIZE),)](codes, ends, len(out), out, HOW=how, SIZE=_SIZE, **UNFUSED)
    if mixture is not None:
        mix(out, mixture)


def minmax_of_mean(codes: Tensor, ends: Tensor, divisor: int, out: Tensor) -> Tensor:
    """See `minmax_of_mean` in torch.py."""
    numel, parts = len(out), triton.cdiv(len(out), _SIZE)
    mean, found = ends.new_empty(numel), ends.new_empty(1, parts, 2)
    check_length(len(codes) * numel, codes)
    operands = (codes, codes.stride(0), len(codes), ends.contiguous(), numel, float(divisor), mean, found, parts)
    _mean[(parts,)](*operands, SIZE=_SIZE, **UNFUSED)
    new_ends = _outermost(found)
    minmax_codes(mean.unsqueeze(0), new_ends, out.unsqueeze(0))
    return new_ends.squeeze(0)


def _outermost(ends: Tensor) -> Tensor:
    """Return the extremes of each row from those of its parts; -0 as 0."""
    smallest, largest = ends.unbind(2)
    return torch.stack((smallest.amin(1), largest.amax(1)), 1) + 0.0
