"""Weighted sums of flat tensors, in Triton."""

from __future__ import annotations

from collections.abc import Sequence

import triton
import triton.language as tl
from torch import Tensor
from torch.autograd.graph import increment_version

from .floats import UNFUSED

__all__ = ["mix", "unmix"]

_SIZE = 2048
"""Elements that one program works on."""


@triton.jit
def _mix(flat, keep, part, add, numel, BACK: tl.constexpr, SIZE: tl.constexpr):
    at = tl.program_id(0).to(tl.int64) * SIZE + tl.arange(0, SIZE)
    x, y = tl.load(flat + at, mask=at < numel, other=0), tl.load(part + at, mask=at < numel, other=0)
    if BACK:
        x = tl.div_rn(tl.fma(y, tl.full(at.shape, -add, tl.float32), x), tl.full(at.shape, keep, tl.float32))
    else:
        x = tl.fma(y, tl.full(at.shape, add, tl.float32), x * keep)
    tl.store(flat + at, x, mask=at < numel)


def mix(flat: Tensor, keep: float, starts: Sequence[int], parts: Sequence[Tensor], add: float) -> None:
    """See `dgcopt.kernels.torch.mix`."""
    _each(flat, keep, starts, parts, add, back=False)


def unmix(flat: Tensor, keep: float, starts: Sequence[int], parts: Sequence[Tensor], add: float) -> None:
    """See `dgcopt.kernels.torch.unmix`."""
    _each(flat, keep, starts, parts, add, back=True)


def _each(flat: Tensor, keep: float, starts: Sequence[int], parts: Sequence[Tensor], add: float, back: bool) -> None:
    increment_version(flat)
    for start, part in zip(starts, parts, strict=True):
        if len(part):
            operands = (flat.narrow(0, start, len(part)), float(keep), part, float(add), len(part))
            _mix[(triton.cdiv(len(part), _SIZE),)](*operands, BACK=back, SIZE=_SIZE, **UNFUSED)
