"""The sum of a gradient and a residual, with statistics of each block, in C."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.autograd.graph import increment_version

from ..blocks import BLOCK
from .library import Float, Length, Pointer, at, check_flat, function, shared

__all__ = ["add_and_maxima", "add_and_norms"]


def add_and_maxima(g: Tensor, e: Tensor, decay: float, out: Tensor) -> Tensor:
    """See `dgcopt.kernels.torch.add_and_maxima`."""
    return _add_and("maxima", g, e, decay, out)


def add_and_norms(g: Tensor, e: Tensor, decay: float, out: Tensor) -> Tensor:
    """See `dgcopt.kernels.torch.add_and_norms`."""
    return _add_and("norms", g, e, decay, out)


def _add_and(statistic: str, g: Tensor, e: Tensor, decay: float, out: Tensor) -> Tensor:
    check_flat(len(out) // BLOCK * BLOCK, g, e, out, dtype=torch.float32)
    numbers = torch.empty(len(out) // BLOCK)
    loop = function(f"add_and_{statistic}", *[Pointer] * 2, Float, Length, *[Pointer] * 2)

    def span(start: int, stop: int) -> None:
        loop(at(g, start), at(e, start), decay, stop - start, at(out, start), at(numbers, start // BLOCK))

    shared(span, len(out))
    increment_version(out)
    return numbers
