"""Weighted sums of flat tensors, in Triton."""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor
from torch.autograd.graph import increment_version

from ..parts import Mixture
from .floats import UNFUSED

__all__ = ["mix"]

_SIZE = 2048
"""Elements that one program works on."""


@triton.jit
def _mix(flat, keep, part, add, numel, SIZE: tl.constexpr):
    at = tl.program_id(0).to(tl.int64) * SIZE + tl.arange(0, SIZE)
    x, y = tl.load(flat + at, mask=at < numel, other=0), tl.load(part + at, mask=at < numel, other=0)
    tl.store(flat + at, tl.fma(y, tl.full(at.shape, add, tl.float32), x * keep), mask=at < numel)


def mix(x: Tensor, mixture: Mixture) -> None:
    """See `dgcopt.kernels.torch.mix`."""
    increment_version(x)
    for start, part in zip(mixture.starts, mixture.parts, strict=True):
        if len(part):
            operands = (x.narrow(0, start, len(part)), float(mixture.keep), part, float(mixture.add), len(part))
            _mix[(triton.cdiv(len(part), _SIZE),)](*operands, SIZE=_SIZE, **UNFUSED)
