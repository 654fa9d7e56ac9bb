"""A dense tensor that is zero except where messages were added, and is cleared only there."""

from __future__ import annotations

import torch
from torch import Tensor

__all__ = ["SparseSum"]


class SparseSum:
    """Adds sparse messages up without a pass over all elements.

    The parameters' gradients are views of the sum, so the user's code may write to it (clipping, `zero_()`). Torch
    counts such writes; after one, the next `clear` is a full one.
    """

    def __init__(self, like: Tensor) -> None:
        self._sum = torch.zeros_like(like)
        self._touched: list[Tensor] = []
        self._version = self._sum._version

    def clear(self) -> None:
        """Make every element zero."""
        if self._sum._version == self._version:
            for indices in self._touched:
                self._sum[indices] = 0
        else:
            self._sum.zero_()
        self._touched = []

    def add(self, indices: Tensor, values: Tensor) -> None:
        """Add `values` at `indices` (int64, distinct within one call)."""
        self._sum.index_add_(0, indices, values)
        self._touched.append(indices)

    def total(self) -> Tensor:
        """The sum. Valid until the next `clear`."""
        self._version = self._sum._version
        return self._sum
