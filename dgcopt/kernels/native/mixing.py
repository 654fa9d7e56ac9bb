"""Weighted sums, in C."""

from __future__ import annotations

import ctypes

import torch
from torch import Tensor
from torch.autograd.graph import increment_version

from ..parts import Mixture
from .library import Float, Length, Pointer, check_flat, function, shared

__all__ = ["MIXTURE", "mix", "weights_of"]

MIXTURE = (Pointer, Length, Float, Float)
"""The C types of a mixture's arguments."""


def mix(x: Tensor, mixture: Mixture) -> None:
    """See `dgcopt.kernels.torch.mix`."""
    check_flat(len(x), x, dtype=torch.float32)
    weights = weights_of(mixture, len(x))
    loop = function("mix", Pointer, Length, Length, *MIXTURE)

    def span(start: int, stop: int) -> None:
        loop(x.data_ptr(), start, stop, *weights)

    shared(span, len(x))
    increment_version(x)


def weights_of(mixture: Mixture | None, numel: int) -> tuple[ctypes.Array[ctypes.c_int64], int, float, float]:
    """Return a mixture's arguments for loops: the address of each part, and its start and stop in x.

    Raises ValueError for a part that is not among the elements of x, or begins before the one ahead of it has ended.
    """
    if mixture is None:
        return (Length * 0)(), 0, 1.0, 0.0
    rows, end = [], 0
    for start, part in zip(mixture.starts, mixture.parts, strict=True):
        length = part.numel()
        check_flat(length, part, dtype=torch.float32)
        if not end <= start <= numel - length:
            raise ValueError(f"{length} elements from {start} on are not among those from {end} to {numel}")
        end = start + length
        rows += [part.data_ptr(), start, end]
    return (Length * len(rows))(*rows), len(mixture.parts), mixture.keep, mixture.add
