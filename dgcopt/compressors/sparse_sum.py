"""A dense tensor that is zero except where messages were added, and is cleared only there."""

from __future__ import annotations

import torch
from torch import Tensor

__all__ = ["SparseSum"]


class SparseSum:
    """Adds sparse messages up without a pass over all elements."""

    def __init__(self, like: Tensor) -> None:
        self._sum = torch.zeros_like(like)
        self._touched: list[Tensor] = []

    def clear(self, everywhere: bool = False) -> None:
        """Make every element zero; `everywhere` if others wrote to the sum, as to gradients that are views of it."""
        if everywhere:
            self._sum.zero_()
        else:
            for indices in self._touched:
                self._sum[indices] = 0
        self._touched = []

    def add(self, indices: Tensor, values: Tensor) -> None:
        """Add `values` at `indices` (int64, distinct within one call)."""
        self._sum.index_add_(0, indices, values)
        self._touched.append(indices)

    def total(self) -> Tensor:
        """The sum. Valid until the next `clear`."""
        return self._sum
