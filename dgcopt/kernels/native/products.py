"""Products of thin matrices, in C."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.autograd.graph import increment_version

from .library import Length, Pointer, at, check_flat, function, shared

__all__ = ["put_product"]


def put_product(left: Tensor, right: Tensor, out: Tensor, less: Tensor | None) -> None:
    """See `dgcopt.kernels.torch.put_product`."""
    rows, columns, rank = len(left), len(right), left.shape[1]
    if left.shape != (rows, rank) or right.shape != (columns, rank) or not rank:
        raise ValueError(f"{tuple(left.shape)} and {tuple(right.shape)} are not the factors of a matrix")
    across = right.T.contiguous()
    check_flat(left.numel(), left.view(-1), dtype=torch.float32)
    check_flat(right.numel(), across.view(-1), dtype=torch.float32)
    check_flat(rows * columns, *(flat for flat in (out, less) if flat is not None), dtype=torch.float32)
    loop = function("put_product", Pointer, Pointer, *[Length] * 3, Pointer, Pointer)

    def span(start: int, stop: int) -> None:
        first, last = (end // max(columns, 1) for end in (start, stop))  # rows that end within it
        loop(
            at(left, first * rank),
            at(across, 0),
            last - first,
            columns,
            rank,
            *(at(x, first * columns) for x in (out, less)),
        )

    shared(span, rows * columns)
    for flat in (out, less):
        if flat is not None:
            increment_version(flat)
