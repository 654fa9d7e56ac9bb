"""Positions drawn at random, in Triton."""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from ..torch import halves
from .floats import UNFUSED
from .lengths import check_length
from .rounding import KEY, drawn

__all__ = ["draw_from_spans"]

_SIZE = 1024
"""Spans that one program draws from."""


@triton.jit(do_not_specialize=KEY)
def _draw(starts, lengths, count, first, second, positions, SIZE: tl.constexpr):
    at = tl.program_id(0).to(tl.int64) * SIZE + tl.arange(0, SIZE)
    length = tl.load(lengths + at, mask=at < count, other=0)
    beyond = (drawn(at, first, second).to(tl.int64) * length) >> 32
    tl.store(positions + at, tl.load(starts + at, mask=at < count, other=0) + beyond, mask=at < count)


def draw_from_spans(starts: Tensor, lengths: Tensor, key: int) -> Tensor:
    """See `dgcopt.kernels.torch.draw_from_spans`."""
    check_length(len(starts), lengths)
    positions, count = starts.new_empty(len(starts)), len(starts)
    if count:
        _draw[(triton.cdiv(count, _SIZE),)](starts, lengths, count, *halves(key), positions, SIZE=_SIZE, **UNFUSED)
    return positions
