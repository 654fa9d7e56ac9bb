"""Weighted sums of flat tensors, as momentum is one."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

__all__ = ["mix", "unmix"]


def mix(flat: Tensor, keep: float, starts: Sequence[int], parts: Sequence[Tensor], add: float) -> None:
    """Put keep * x + add * y in the place of x: the values of `flat` from each start on; y are those of its part."""
    for start, part in zip(starts, parts, strict=True):
        flat[start : start + len(part)].mul_(keep).add_(part, alpha=add)


def unmix(flat: Tensor, keep: float, starts: Sequence[int], parts: Sequence[Tensor], add: float) -> None:
    """Put x in the place of keep * x + add * y."""
    for start, part in zip(starts, parts, strict=True):
        flat[start : start + len(part)].sub_(part, alpha=add).div_(keep)
