"""256 levels between the smallest and the largest value of a chunk."""

from __future__ import annotations

import torch
from torch import Tensor

from .sums import Put, finite, put

__all__ = ["minmax_codes", "minmax_ends", "put_minmax"]

_TOP = 255
_EPSILON = 1e-7


def minmax_ends(values: Tensor) -> Tensor:
    """The smallest and the largest of flat values, float32 `[2]`; NaN and Inf count as zero, -0 is written as 0."""
    return torch.stack(finite(values).aminmax()) + 0.0


def minmax_codes(values: Tensor, ends: Tensor, codes: Tensor) -> None:
    """Write the level of each value, uint8, into `codes`; see `dgcopt.coding.minmax`."""
    scale, upper = _levels(ends)
    levels = (finite(values) * scale).round_().minimum(upper) - (upper - _TOP)
    codes.copy_(levels.clamp_(0, _TOP))


def put_minmax(codes: Tensor, ends: Tensor, out: Tensor, how: Put) -> None:
    """Let the values that `codes` stand for take effect on `out`."""
    scale, upper = _levels(ends)
    put((codes.float() + (upper - _TOP)) / scale, out, how)


def _levels(ends: Tensor) -> tuple[Tensor, Tensor]:
    """By what values are multiplied, and the highest level."""
    low, high = ends
    scale = torch.full_like(high, _TOP) / (high - low + _EPSILON)  # a number over a tensor is rounded twice
    return scale, (high * scale).round()
