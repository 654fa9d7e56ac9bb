"""Weighted sums of flat tensors, as momentum is one."""

from __future__ import annotations

from torch import Tensor

from ..parts import Mixture

__all__ = ["mix", "unmix"]


def mix(x: Tensor, mixture: Mixture) -> None:
    """Put keep * x + add * y in the place of a flat x."""
    for start, part in zip(mixture.starts, mixture.parts, strict=True):
        x[start : start + len(part)].mul_(mixture.keep).add_(part, alpha=mixture.add)


def unmix(x: Tensor, mixture: Mixture) -> None:
    """Put x in the place of keep * x + add * y."""
    for start, part in zip(mixture.starts, mixture.parts, strict=True):
        x[start : start + len(part)].sub_(part, alpha=mixture.add).div_(mixture.keep)
