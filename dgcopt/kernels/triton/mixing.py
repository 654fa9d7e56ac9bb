"""Weighted sums of flat tensors, in Triton."""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor
from torch.autograd.graph import increment_version

from ..parts import Mixture
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


def mix(x: Tensor, mixture: Mixture) -> None:
    """See `dgcopt.kernels.torch.mix`."""
    _each(x, mixture, back=False)


def unmix(x: Tensor, mixture: Mixture) -> None:
    """See `dgcopt.kernels.torch.unmix`."""
    _each(x, mixture, back=True)


def _each(x: Tensor, mixture: Mixture, back: bool) -> None:
    increment_version(x)
    for start, part in zip(mixture.starts, mixture.parts, strict=True):
        if len(part):
            operands = (x.narrow(0, start, len(part)), float(mixture.keep), part, float(mixture.add), len(part))
            _mix[(triton.cdiv(len(part), _SIZE),)](*operands, BACK=back, SIZE=_SIZE, **UNFUSED)
