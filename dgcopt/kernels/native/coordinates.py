"""Reading and changing a flat tensor at few positions, in C."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import increment_version

from ..torch import Parts
from .library import FLOATS, Float, Length, Pointer, check_flat, function, takes_float32

__all__ = ["add_at", "clear_at", "gather", "step_at", "subtract_at", "takes_parts"]


def takes_parts(*arguments: Any) -> bool:
    """Whether loops can run over all tensors among the arguments and in their parts, and all floats are of float32."""
    tensors: list[Any] = []
    for x in arguments:
        tensors += x.tensors if isinstance(x, Parts) else (x,)
    return takes_float32(*tensors)


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


def add_at(parts: Parts, positions: Tensor, values: Tensor) -> Tensor:
    """See `dgcopt.kernels.torch.add_at`."""
    check_flat(len(positions), positions, dtype=torch.int64)
    check_flat(len(positions), values, dtype=torch.float32)
    sums = torch.empty(len(positions))
    loop = function("add_at", *[Pointer] * 3, Length, Pointer, Pointer, Length, Pointer)
    places = (positions.data_ptr(), values.data_ptr(), len(positions), sums.data_ptr())
    if loop(_pointers(parts), *_spans(parts), *places):
        raise IndexError("positions must lie within the parts that there are")
    _are_changed(parts)
    return sums


def step_at(weights: Parts, rates: Sequence[float], positions: Tensor, grads: Tensor) -> None:
    """See `dgcopt.kernels.torch.step_at`."""
    check_flat(len(positions), positions, dtype=torch.int64)
    check_flat(len(positions), grads, dtype=torch.float32)
    scratch = grads.clone()
    if len(rates) != len(weights.tensors):
        raise ValueError(f"{len(weights.tensors)} parts need as many rates, not {len(rates)}")
    loop = function("step_at", *[Pointer] * 4, Length, Pointer, Pointer, Length)
    operands = (_pointers(weights), (Float * len(rates))(*rates), *_spans(weights))
    if loop(*operands, positions.data_ptr(), scratch.data_ptr(), len(positions)):
        raise IndexError("positions must lie within the parts that there are")
    _are_changed(weights)


def _pointers(parts: Parts) -> ctypes.Array[ctypes.c_void_p]:
    """Where each part lies; None for a missing one."""
    for part, start, stop in zip(parts.tensors, parts.starts.tolist(), parts.stops.tolist(), strict=True):
        if part is not None:
            check_flat(stop - start, part, dtype=torch.float32)
    return (Pointer * len(parts.tensors))(*[None if part is None else part.data_ptr() for part in parts.tensors])


def _spans(parts: Parts) -> tuple[int, int, int]:
    """Where parts start and stop in the whole, and how many there are."""
    check_flat(len(parts.tensors), parts.starts, parts.stops, dtype=torch.int64)
    return parts.starts.data_ptr(), parts.stops.data_ptr(), len(parts.tensors)


def _are_changed(parts: Parts) -> None:
    for part in parts.tensors:
        if part is not None:
            increment_version(part)
