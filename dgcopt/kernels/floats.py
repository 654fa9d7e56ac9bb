"""Operations on values that all quantisers share: clamping, and combination with a tensor."""

from __future__ import annotations

from typing import Literal, TypeAlias

from torch import Tensor

__all__ = ["LARGEST", "Put", "finite", "put"]

Put: TypeAlias = Literal["set", "add", "subtract"]
"""How decoded values change a tensor: they replace it, are added, or are subtracted."""

LARGEST = 2.0**100
"""Larger values travel as this, so that sums over a block stay finite."""


def finite(values: Tensor) -> Tensor:
    """As float32 within +-LARGEST, NaN and Inf as zero; a copy."""
    return values.nan_to_num(nan=0, posinf=0, neginf=0).float().clamp_(-LARGEST, LARGEST)


def put(values: Tensor, out: Tensor, how: Put) -> None:
    """Let values take effect on `out`."""
    if how == "set":
        out.copy_(values)
    elif how == "add":
        out.add_(values)
    else:
        out.sub_(values)
