"""The magnitudes that reach a threshold, in Triton: counted in one pass, and written in another.

How many they are is waited for, as the tensors that are returned have that length.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor
from torch.autograd.graph import increment_version

from .floats import UNFUSED
from .lengths import check_length
from .selection import largest

__all__ = ["add_and_select_above", "select_above"]

_SIZE = 2048
"""Elements that one program works on."""


@triton.jit
def _add_and_count(g, e, decay, out, numel, least, counts, ADDS: tl.constexpr, SIZE: tl.constexpr):
    at = tl.program_id(0).to(tl.int64) * SIZE + tl.arange(0, SIZE)
    v = tl.load(g + at, mask=at < numel, other=0)
    if ADDS:
        v = tl.fma(tl.load(e + at, mask=at < numel, other=0), tl.full(at.shape, decay, tl.float32), v)
        tl.store(out + at, v, mask=at < numel)
    tl.store(counts + tl.program_id(0), tl.sum(((at < numel) & (tl.abs(v) >= least)).to(tl.int32), 0))


@triton.jit
def _write(flat, numel, least, counts, up_to, positions, values, SIZE: tl.constexpr):
    at = tl.program_id(0).to(tl.int64) * SIZE + tl.arange(0, SIZE)
    v = tl.load(flat + at, mask=at < numel, other=0)
    reach = (at < numel) & (tl.abs(v) >= least)
    before = tl.load(up_to + tl.program_id(0)) - tl.load(counts + tl.program_id(0))
    to = before + tl.cumsum(reach.to(tl.int32), 0) - 1
    tl.store(positions + to, at, mask=reach)
    tl.store(values + to, v, mask=reach)


def select_above(flat: Tensor, least: float, most: int) -> tuple[Tensor, Tensor]:
    """See `dgcopt.kernels.torch.select_above`."""
    return _select(flat, flat, 0.0, flat, least, most, adds=False)


def add_and_select_above(
    g: Tensor, e: Tensor, decay: float, out: Tensor, least: float, most: int
) -> tuple[Tensor, Tensor]:
    """See `dgcopt.kernels.torch.add_and_select_above`."""
    check_length(len(out), g, e)
    increment_version(out)
    return _select(g, e, decay, out, least, most, adds=True)


def _select(
    g: Tensor, e: Tensor, decay: float, out: Tensor, least: float, most: int, adds: bool
) -> tuple[Tensor, Tensor]:
    tiles = triton.cdiv(len(out), _SIZE)
    counts = torch.empty(tiles, dtype=torch.int32, device=out.device)
    if tiles:
        summed = (g, e, float(decay), out, len(out), float(least), counts)
        _add_and_count[(tiles,)](*summed, ADDS=adds, SIZE=_SIZE, **UNFUSED)
    number = int(counts.sum())
    positions, values = torch.empty(number, dtype=torch.int64, device=out.device), out.new_empty(number)
    if number:
        operands = (out, len(out), float(least), counts, counts.cumsum(0), positions, values)
        _write[(tiles,)](*operands, SIZE=_SIZE, **UNFUSED)
    if number <= most:
        return positions, values
    chosen = largest(values, most)
    return positions.index_select(0, chosen), values.index_select(0, chosen)
