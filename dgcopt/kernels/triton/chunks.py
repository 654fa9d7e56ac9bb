"""The largest magnitudes of every chunk, in Triton: one program for each, which reads it once."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor
from torch.autograd.graph import increment_version

from ..torch import Chunks
from .floats import UNFUSED, magnitudes
from .lengths import check_length

__all__ = ["add_and_select_chunks", "select_chunks"]


_PER_WARP = 512
"""Elements of a chunk per warp: twice as many do not fit into its registers."""


@triton.jit
def _select(
    g, e, decay, out, table, number, positions, values, ADDS: tl.constexpr, BITS: tl.constexpr, WIDTH: tl.constexpr
):
    mine = table + tl.program_id(0)
    start, stop, end = tl.load(mine), tl.load(mine + number), tl.load(mine + 2 * number)
    wanted, before = tl.load(mine + 3 * number).to(tl.int32), tl.load(mine + 4 * number)
    at, length = tl.arange(0, WIDTH), (stop - start).to(tl.int32)  # int32, as registers are few
    there = at < (end - start).to(tl.int32)
    v = tl.load(g + start + at, mask=there, other=0)
    if ADDS:
        v = tl.fma(tl.load(e + start + at, mask=there, other=0), tl.full(at.shape, decay, tl.float32), v)
        tl.store(out + start + at, v, mask=there)
    sizes = tl.where(at < length, magnitudes(v), -1)
    least = tl.zeros((), tl.int32)  # the largest integer that as many as are wanted reach, from its highest bit down
    for i in tl.static_range(BITS):
        higher = least | (1 << (BITS - 1 - i))
        least = tl.where(tl.sum((sizes >= higher).to(tl.int32), 0) >= wanted, higher, least)
    above, tied = (sizes > least).to(tl.int32), (sizes == least).to(tl.int32)
    first = tl.cumsum(tied, 0) <= wanted - tl.sum(above, 0)
    chosen = (above > 0) | ((tied > 0) & first)
    to = tl.cumsum(chosen.to(tl.int32), 0) - 1
    tl.store(positions + before + to, start + at, mask=chosen)
    tl.store(values + before + to, v, mask=chosen)


def select_chunks(flat: Tensor, chunks: Chunks) -> tuple[Tensor, Tensor]:
    """See `dgcopt.kernels.torch.select_chunks`."""
    return _selected(flat, flat, 0.0, flat, chunks, adds=False)


def add_and_select_chunks(g: Tensor, e: Tensor, decay: float, out: Tensor, chunks: Chunks) -> tuple[Tensor, Tensor]:
    """See `dgcopt.kernels.torch.add_and_select_chunks`."""
    increment_version(out)
    return _selected(g, e, decay, out, chunks, adds=True)


def _selected(g: Tensor, e: Tensor, decay: float, out: Tensor, chunks: Chunks, adds: bool) -> tuple[Tensor, Tensor]:
    if len(chunks.spans):
        check_length(chunks.spans[-1][1], g, e, out)
    if adds and (len(chunks.spans) == 0 or chunks.spans[0][0] != 0):
        raise ValueError("chunks must begin with the first element")
    positions = torch.empty(chunks.count, dtype=torch.int64, device=out.device)
    values = out.new_empty(chunks.count)
    table, widest = chunks.placed(len(out))
    if len(chunks.spans):
        width = triton.next_power_of_2(widest)
        warps = min(max(4, width // _PER_WARP), 32)
        modes = {"ADDS": adds, "BITS": 8 * out.element_size() - 1, "WIDTH": width, "num_warps": warps}
        operands = (g, e, float(decay), out, table, len(chunks.spans), positions, values)
        _select[(len(chunks.spans),)](*operands, **modes, **UNFUSED)
    return positions, values
