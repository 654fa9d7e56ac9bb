"""Copying gradients and looking at them, in Triton: one pass over each."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import triton
import triton.language as tl
from torch import Tensor

from .floats import UNFUSED, magnitudes, rounded, wide
from .lengths import check_length

__all__ = ["copy_scaled"]

_SIZE = 2048
"""Elements that one program works on."""


@triton.jit
def _copy(g, numel, out, length, scale, top, SIZE: tl.constexpr):
    at = tl.program_id(0).to(tl.int64) * SIZE + tl.arange(0, SIZE)
    x = wide(tl.load(g + at, mask=at < numel, other=0))
    tl.store(out + at, rounded(tl.where(at < numel, x * scale, 0.0), out.dtype.element_ty), mask=at < length)
    tl.atomic_max(top, tl.max(magnitudes(x), 0))


def copy_scaled(grads: Sequence[Tensor], outs: Sequence[Tensor], scale: float) -> Tensor:
    """See `dgcopt.kernels.torch.copy_scaled`."""
    tops = torch.zeros(len(grads), dtype=torch.int32, device=grads[0].device)
    for g, out, top in zip(grads, outs, tops.unbind(), strict=True):
        check_length(len(g), out)
        if len(out):
            grid = (triton.cdiv(len(out), _SIZE),)
            _copy[grid](g, len(g), out, len(out), float(scale), top, SIZE=_SIZE, **UNFUSED)
    return tops.view(torch.float32)
