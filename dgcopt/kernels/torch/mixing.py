"""Weighted sums of two flat tensors, as momentum is one."""

from __future__ import annotations

import torch
from torch import Tensor

__all__ = ["mix", "unmix"]


def mix(x: Tensor, keep: float, y: Tensor, add: float, out: Tensor) -> None:
    """Write keep * x + add * y to `out`, which may be x."""
    torch.mul(x, keep, out=out).add_(y, alpha=add)


def unmix(mixed: Tensor, keep: float, y: Tensor, add: float) -> None:
    """Put x in the place of keep * x + add * y."""
    mixed.sub_(y, alpha=add).div_(keep)
