"""The magnitudes that reach a threshold, in C."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.autograd.graph import increment_version

from .library import Float, Length, Pointer, at, check_flat, function

__all__ = ["add_and_select_above", "select_above"]


def select_above(flat: Tensor, least: float, most: int) -> tuple[Tensor, Tensor]:
    """See `dgcopt.kernels.torch.select_above`."""
    check_flat(len(flat), flat, dtype=torch.float32)
    return _select(flat, None, None, 0.0, least, most)


def add_and_select_above(
    g: Tensor, e: Tensor, decay: float, out: Tensor, least: float, most: int
) -> tuple[Tensor, Tensor]:
    """See `dgcopt.kernels.torch.add_and_select_above`."""
    check_flat(len(out), g, e, out, dtype=torch.float32)
    increment_version(out)
    return _select(out, g, e, decay, least, most)


def _select(
    flat: Tensor, g: Tensor | None, e: Tensor | None, decay: float, least: float, most: int
) -> tuple[Tensor, Tensor]:
    most = min(most, len(flat))
    positions, values = torch.empty(most, dtype=torch.int64), torch.empty(most)
    count = torch.empty((), dtype=torch.int64)
    loop = function("select_above", *[Pointer] * 3, Float, Length, Float, Length, *[Pointer] * 3)
    results = (positions.data_ptr(), values.data_ptr(), count.data_ptr())
    if loop(at(flat, 0), at(g, 0), at(e, 0), decay, len(flat), least, most, *results):
        raise MemoryError("there is no memory left to select in")
    return positions[: int(count)], values[: int(count)]
