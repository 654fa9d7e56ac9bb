"""Products of thin matrices."""

from __future__ import annotations

from torch import Tensor, mul

__all__ = ["put_product"]


def put_product(left: Tensor, right: Tensor, out: Tensor, less: Tensor | None) -> None:
    """Write left @ right.T, row by row, to the flat `out`, and take it away from the flat `less`, if any.

    Each is rounded by itself, one column of both after the other, so that all processors get the same bits.
    """
    matrix = out.view(len(left), len(right))
    mul(left[:, :1], right[:, 0], out=matrix)
    for k in range(1, left.shape[1]):
        matrix += left[:, k : k + 1] * right[:, k]
    if less is not None:
        less -= out
