"""Scaled copies of gradients, and their largest magnitudes, in Triton: one launch for all."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import triton
import triton.language as tl
from torch import Tensor
from torch.autograd.graph import increment_version

from ..triton.floats import UNFUSED, magnitudes, rounded, wide
from ..triton.lengths import check_length
from ..triton.pieces import Pieces, begins, tile_of

__all__ = ["copy_scaled", "peaks"]

_SIZE = 2048
"""Elements that one program works on."""


@triton.jit
def _copy_tile(g, out, at, there, room, scale, top, DTYPE: tl.constexpr):
    x = wide(tl.load(g + at, mask=there, other=0))
    tl.store(out + at, rounded(tl.where(there, x * scale, 0.0), DTYPE), mask=room)
    tl.atomic_max(top, tl.max(magnitudes(x), 0))


@triton.jit
def _copy(
    addresses,
    numels,
    to,
    rooms,
    firsts,
    count,
    scale,
    tops,
    DTYPE: tl.constexpr,
    ALIGNED: tl.constexpr,
    SIZE: tl.constexpr,
):
    piece, start = tile_of(firsts, count, SIZE)
    numel, at = tl.load(numels + piece), start + tl.arange(0, SIZE)
    g, out = begins(addresses, piece, DTYPE, ALIGNED), begins(to, piece, DTYPE, ALIGNED)
    if start + SIZE <= numel:  # several elements at a time, as no mask depends on their place
        whole = tl.full((SIZE,), 1, tl.int1)
        _copy_tile(g, out, at, whole, whole, scale, tops + piece, DTYPE)
    else:
        _copy_tile(g, out, at, at < numel, at < tl.load(rooms + piece), scale, tops + piece, DTYPE)


@triton.jit
def _peaks(addresses, numels, firsts, count, tops, DTYPE: tl.constexpr, ALIGNED: tl.constexpr, SIZE: tl.constexpr):
    piece, start = tile_of(firsts, count, SIZE)
    at = start + tl.arange(0, SIZE)
    x = tl.load(begins(addresses, piece, DTYPE, ALIGNED) + at, mask=at < tl.load(numels + piece), other=0)
    tl.atomic_max(tops + piece, tl.max(magnitudes(wide(x)), 0))


def copy_scaled(grads: Sequence[Tensor], outs: Sequence[Tensor], scale: float) -> Tensor:
    """See `copy_scaled` in torch.py."""
    for g, out in zip(grads, outs, strict=True):
        check_length(len(g), out)
    pieces = Pieces.of(_SIZE, grads, outs)
    tops = torch.zeros(len(grads), dtype=torch.int32, device=grads[0].device)
    if pieces.tiles:
        _copy[(pieces.tiles,)](*pieces.operands, float(scale), tops, **pieces.modes, **UNFUSED)
    increment_version(outs)
    return tops.view(torch.float32)


def peaks(tensors: Sequence[Tensor]) -> Tensor:
    """See `peaks` in torch.py."""
    pieces = Pieces.of(_SIZE, tensors)
    tops = torch.zeros(len(tensors), dtype=torch.int32, device=tensors[0].device)
    if pieces.tiles:
        _peaks[(pieces.tiles,)](*pieces.operands, tops, **pieces.modes, **UNFUSED)
    return tops.view(torch.float32)
