"""Values in few bits each, in Triton: one program for each block."""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from ..reductions.triton import sum_of_rows
from ..triton.floats import UNFUSED, finite, nearest, negated, rounded, wide
from ..triton.lengths import check_length
from .torch import SPAN

__all__ = ["means", "nearest_levels", "of_levels", "of_steps", "round_steps"]

_SPAN: tl.constexpr = tl.constexpr(SPAN)


@triton.jit
def _places(cuts, numel, block, CUTS: tl.constexpr, WIDTH: tl.constexpr):
    """Return the places of this program's block, and a mask of those in use."""
    number = tl.program_id(0).to(tl.int64)
    if CUTS:
        start, stop = tl.load(cuts + number), tl.load(cuts + number + 1)
    else:
        start = number * block
        stop = tl.minimum(start + block, numel)
    at = start + tl.arange(0, WIDTH)
    return at, at < stop


@triton.jit
def _round_steps(values, cuts, numel, block, most, steps, multiples, CUTS: tl.constexpr, WIDTH: tl.constexpr):
    at, there = _places(cuts, numel, block, CUTS, WIDTH)
    v = finite(tl.load(values + at, mask=there, other=0))
    step = rounded(tl.div_rn(tl.max(tl.abs(v), 0), tl.zeros((), tl.float32) + most), steps.dtype.element_ty)
    tl.store(steps + tl.program_id(0), step)
    multiple = tl.div_rn(v, tl.zeros(v.shape, tl.float32) + wide(step))
    multiple = nearest(tl.where(multiple == multiple, multiple, 0.0))
    multiple = tl.where(multiple > most, most, tl.where(multiple < -most, -most, multiple))
    tl.store(multiples + at, multiple.to(tl.int32).to(tl.int8), mask=there)


@triton.jit
def _of_steps(multiples, steps, cuts, numel, block, values, CUTS: tl.constexpr, WIDTH: tl.constexpr):
    at, there = _places(cuts, numel, block, CUTS, WIDTH)
    multiple = tl.load(multiples + at, mask=there, other=0).to(tl.float32)
    tl.store(values + at, multiple * tl.load(steps + tl.program_id(0)), mask=there)


@triton.jit
def _nearest_levels(values, levels, count, cuts, numel, block, fields, CUTS: tl.constexpr, WIDTH: tl.constexpr):
    at, there = _places(cuts, numel, block, CUTS, WIDTH)
    v = finite(tl.load(values + at, mask=there, other=0))
    found, mine = (v < 0).to(tl.int32), levels + tl.program_id(0).to(tl.int64) * count
    for j in range(1, count):
        between = (tl.load(mine + j) + tl.load(mine + j - 1)) * 0.5
        found += tl.where(tl.abs(v) > between, 2, 0)
    tl.store(fields + at, found.to(tl.uint8), mask=there)


@triton.jit
def _of_levels(fields, levels, count, cuts, numel, block, values, CUTS: tl.constexpr, WIDTH: tl.constexpr):
    at, there = _places(cuts, numel, block, CUTS, WIDTH)
    field = tl.load(fields + at, mask=there, other=0).to(tl.int32)
    number = (field >> 1) & (count - 1)
    size = tl.load(levels + tl.program_id(0).to(tl.int64) * count + number, mask=there, other=0)
    tl.store(values + at, tl.where((field & 1) > 0, negated(size), size), mask=there)


@triton.jit
def _sum_above(sizes, there, least, DOUBLINGS: tl.constexpr):
    """Return the sum and the number of the magnitudes above `least`."""
    above = there & (sizes > least)
    part = tl.sum(sum_of_rows(tl.where(above, sizes, 0.0)[None, :], 1, DOUBLINGS), 0)
    return part, tl.sum(above.to(tl.int32), 0).to(tl.float32)


@triton.jit
def _means(
    values,
    cuts,
    numel,
    block,
    lows,
    highs,
    COUNT: tl.constexpr,
    DOUBLINGS: tl.constexpr,
    CUTS: tl.constexpr,
    WIDTH: tl.constexpr,
):
    at, there = _places(cuts, numel, block, CUTS, WIDTH)
    sizes = tl.abs(finite(tl.load(values + at, mask=there, other=0)))
    total, number = _sum_above(sizes, there, -1.0, DOUBLINGS)
    mean = tl.div_rn(total, number)
    low, high = mean, mean
    if COUNT > 1:
        low, high = tl.min(tl.where(there, sizes, float("inf")), 0), tl.max(sizes, 0)
        split = tl.sqrt_rn(tl.maximum(low, high * (1 / _SPAN))) * tl.sqrt_rn(high)
        for _ in tl.static_range(3):
            part, above = _sum_above(sizes, there, split, DOUBLINGS)
            high = tl.where(above > 0, tl.div_rn(part, above), mean)
            low = tl.where(above < number, tl.div_rn(total - part, number - above), high)
            split = (low + high) * 0.5
    tl.store(lows + tl.program_id(0), low)
    tl.store(highs + tl.program_id(0), high)


def round_steps(values: Tensor, block: int, most: int, cuts: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """See `round_steps` in torch.py."""
    blocks, settings = _blocks(len(values), block, cuts)
    steps, multiples = values.new_empty(blocks, dtype=torch.bfloat16), torch.empty_like(values, dtype=torch.int8)
    if blocks:
        operands = (values, values if cuts is None else cuts, len(values), block, float(most), steps, multiples)
        _round_steps[(blocks,)](*operands, **settings)
    return steps, multiples


def of_steps(multiples: Tensor, steps: Tensor, block: int, cuts: Tensor | None = None) -> Tensor:
    """See `of_steps` in torch.py."""
    blocks, settings = _blocks(len(multiples), block, cuts)
    values = torch.empty_like(multiples, dtype=torch.float32)
    check_length(blocks, steps)
    if blocks:
        operands = (multiples, steps, steps if cuts is None else cuts, len(multiples), block, values)
        _of_steps[(blocks,)](*operands, **settings)
    return values


def nearest_levels(values: Tensor, levels: Tensor, block: int, cuts: Tensor | None = None) -> Tensor:
    """See `nearest_levels` in torch.py."""
    blocks, settings = _blocks(len(values), block, cuts)
    fields = torch.empty_like(values, dtype=torch.uint8)
    check_length(blocks * levels.shape[1], levels)
    if blocks:
        operands = (values, levels, levels.shape[1], values if cuts is None else cuts, len(values), block, fields)
        _nearest_levels[(blocks,)](*operands, **settings)
    return fields


def of_levels(fields: Tensor, levels: Tensor, block: int, cuts: Tensor | None = None) -> Tensor:
    """See `of_levels` in torch.py."""
    blocks, settings = _blocks(len(fields), block, cuts)
    values = torch.empty_like(fields, dtype=torch.float32)
    check_length(blocks * levels.shape[1], levels)
    if blocks:
        operands = (fields, levels, levels.shape[1], levels if cuts is None else cuts, len(fields), block, values)
        _of_levels[(blocks,)](*operands, **settings)
    return values


def means(values: Tensor, block: int, count: int, cuts: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """See `means` in torch.py."""
    blocks, settings = _blocks(len(values), block, cuts)
    low, high = values.new_empty(blocks), values.new_empty(blocks)
    if blocks:
        doublings = settings["WIDTH"].bit_length() - 1
        settings["num_warps"] = 4  # two have not enough registers for the halves of so many sums
        operands = (values, values if cuts is None else cuts, len(values), block, low, high)
        _means[(blocks,)](*operands, COUNT=count, DOUBLINGS=doublings, **settings)
    return low, high


def _blocks(numel: int, block: int, cuts: Tensor | None) -> tuple[int, dict[str, Any]]:
    """Return the number of blocks and the shape of one in a program."""
    width = triton.next_power_of_2(block)
    settings = {"CUTS": cuts is not None, "WIDTH": width, "num_warps": 2 if width <= 512 else 4, **UNFUSED}
    return triton.cdiv(numel, block) if cuts is None else len(cuts) - 1, settings
