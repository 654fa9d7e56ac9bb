"""Random bits and positions, in Triton."""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from ..triton.floats import UNFUSED
from ..triton.lengths import check_length
from .torch import halves

__all__ = ["KEY", "draw_from_spans", "drawn"]

KEY = ["first", "second"]
"""Arguments with random values: Triton would compile another kernel for those divisible by 16."""


@triton.jit
def drawn(at, first, second):
    """Return `dgcopt.kernels.draws` at some places, as uint32."""
    x = at.to(tl.uint32) * 0x9E3779B9 + first.to(tl.uint32)
    x ^= x >> 16
    x = x * 0x21F0AAAD + second.to(tl.uint32)
    x ^= x >> 15
    x = x * 0x735A2D97
    return x ^ (x >> 15)


_SIZE = 1024
"""Spans that one program draws from."""


@triton.jit(do_not_specialize=KEY)
def _draw(starts, lengths, count, first, second, positions, SIZE: tl.constexpr):
    at = tl.program_id(0).to(tl.int64) * SIZE + tl.arange(0, SIZE)
    length = tl.load(lengths + at, mask=at < count, other=0)
    beyond = (drawn(at, first, second).to(tl.int64) * length) >> 32
    tl.store(positions + at, tl.load(starts + at, mask=at < count, other=0) + beyond, mask=at < count)


def draw_from_spans(starts: Tensor, lengths: Tensor, key: int) -> Tensor:
    """See `draw_from_spans` in torch.py."""
    check_length(len(starts), lengths)
    positions, count = starts.new_empty(len(starts)), len(starts)
    if count:
        _draw[(triton.cdiv(count, _SIZE),)](starts, lengths, count, *halves(key), positions, SIZE=_SIZE, **UNFUSED)
    return positions
