"""Reading and changing a flat tensor at few positions, in C."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.autograd.graph import increment_version

from .library import FLOATS, Float, Length, Pointer, check_flat, function

__all__ = ["clear_at", "gather", "positions_above", "subtract_at"]


def gather(flat: Tensor, positions: Tensor) -> Tensor:
    """See `dgcopt.kernels.torch.gather`."""
    values = torch.empty(len(positions), dtype=flat.dtype)
    _at("gather", flat, positions, values)
    return values


def subtract_at(flat: Tensor, positions: Tensor, values: Tensor) -> None:
    """See `dgcopt.kernels.torch.subtract_at`."""
    check_flat(len(positions), values, dtype=torch.float32)
    _at("subtract_at", flat, positions, values)
    increment_version(flat)


def clear_at(flat: Tensor, positions: Tensor) -> None:
    """See `dgcopt.kernels.torch.clear_at`."""
    _at("clear_at", flat, positions)
    increment_version(flat)


def _at(name: str, flat: Tensor, positions: Tensor, *values: Tensor) -> None:
    check_flat(len(flat), flat)
    check_flat(len(positions), positions, dtype=torch.int64)
    loop = function(f"{name}_{FLOATS[flat.dtype]}", Pointer, Length, Pointer, Length, *[Pointer] * len(values))
    places = (tensor.data_ptr() for tensor in values)
    if loop(flat.data_ptr(), len(flat), positions.data_ptr(), len(positions), *places):
        raise IndexError(f"positions must lie within the {len(flat)} elements that there are")


def positions_above(flat: Tensor, least: float, most: int) -> Tensor | None:
    """See `dgcopt.kernels.torch.positions_above`."""
    check_flat(len(flat), flat, dtype=torch.float32)
    count = torch.empty((), dtype=torch.int64)
    function("count_reaching", Pointer, Length, Float, Pointer)(flat.data_ptr(), len(flat), least, count.data_ptr())
    if int(count) > most:
        return None
    positions = torch.empty(int(count), dtype=torch.int64)
    loop = function("positions_above", Pointer, Length, Float, Pointer)
    loop(flat.data_ptr(), len(flat), least, positions.data_ptr())
    return positions
