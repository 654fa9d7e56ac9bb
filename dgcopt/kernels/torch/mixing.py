"""Weighted sums of flat tensors, as momentum is one."""

from __future__ import annotations

from torch import Tensor

from ..parts import Mixture

__all__ = ["mix"]


def mix(x: Tensor, mixture: Mixture) -> None:
    """Put keep * x + add * y in the place of a flat x."""
    for start, part in zip(mixture.starts, mixture.parts, strict=True):
        x[start : start + len(part)].mul_(mixture.keep).add_(part, alpha=mixture.add)
