"""Copying gradients and looking at them, in Triton: one pass over each."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import triton
import triton.language as tl
from torch import Tensor
from torch.autograd.graph import increment_version

from .floats import UNFUSED, magnitudes, rounded, wide
from .lengths import check_length
from .pieces import Pieces, begins, piece_of

__all__ = ["copy_scaled", "peaks"]

_SIZE = 2048
"""Elements that one program works on."""


@triton.jit
def _copy(g, numel, out, length, scale, top, SIZE: tl.constexpr):
    at = tl.program_id(0).to(tl.int64) * SIZE + tl.arange(0, SIZE)
    x = wide(tl.load(g + at, mask=at < numel, other=0))
    tl.store(out + at, rounded(tl.where(at < numel, x * scale, 0.0), out.dtype.element_ty), mask=at < length)
    tl.atomic_max(top, tl.max(magnitudes(x), 0))


@triton.jit
def _peaks(addresses, numels, firsts, count, tops, DTYPE: tl.constexpr, SIZE: tl.constexpr):
    piece = piece_of(tl.program_id(0), firsts, count)
    at = (tl.program_id(0) - tl.load(firsts + piece)) * SIZE + tl.arange(0, SIZE)
    x = tl.load(begins(addresses, piece, DTYPE) + at, mask=at < tl.load(numels + piece), other=0)
    tl.atomic_max(tops + piece, tl.max(magnitudes(wide(x)), 0))


def copy_scaled(grads: Sequence[Tensor], outs: Sequence[Tensor], scale: float) -> Tensor:
    """See `dgcopt.kernels.torch.copy_scaled`."""
    tops = torch.zeros(len(grads), dtype=torch.int32, device=grads[0].device)
    for g, out, top in zip(grads, outs, tops.unbind(), strict=True):
        check_length(len(g), out)
        if len(out):
            grid = (triton.cdiv(len(out), _SIZE),)
            _copy[grid](g, len(g), out, len(out), float(scale), top, SIZE=_SIZE, **UNFUSED)
        increment_version(out)
    return tops.view(torch.float32)


def peaks(tensors: Sequence[Tensor]) -> Tensor:
    """See `dgcopt.kernels.torch.peaks`."""
    pieces = Pieces.of(tensors, _SIZE)
    tops = torch.zeros(len(tensors), dtype=torch.int32, device=tensors[0].device)
    if pieces.tiles:
        _peaks[(pieces.tiles,)](*pieces.operands, tops, DTYPE=pieces.dtype, SIZE=_SIZE, **UNFUSED)
    return tops.view(torch.float32)
