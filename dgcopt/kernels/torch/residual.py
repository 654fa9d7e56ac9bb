"""The sum of a gradient and a residual, with statistics of each block."""

from __future__ import annotations

import torch
from torch import Tensor

from ..blocks import BLOCK
from .selection import block_maxima
from .sums import sum_of_rows

__all__ = ["add_and_maxima", "add_and_norms"]


def add_and_maxima(g: Tensor, e: Tensor, decay: float, out: Tensor) -> Tensor:
    """Write g + decay * e to `out`, of the dtype of e; returns its block maxima."""
    return block_maxima(torch.add(g, e, alpha=decay, out=out))


def add_and_norms(g: Tensor, e: Tensor, decay: float, out: Tensor) -> Tensor:
    """Write g + decay * e to `out`, of the dtype of e; returns the L1 norm of each block. Shape `[numel / 64]`."""
    return sum_of_rows(torch.add(g, e, alpha=decay, out=out).abs().view(-1, BLOCK))
