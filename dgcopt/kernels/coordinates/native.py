"""Reads and writes at selected positions, and the positions' owners, in C."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor
from torch.autograd.graph import increment_version

from ..native.library import FLOATS, Float, Length, Pointer, check_flat, function, pointers
from ..parts import Parts

__all__ = ["add_at", "by_owner", "clear_at", "gather", "of_owners", "step_at", "subtract_at"]


def gather(flat: Tensor, positions: Tensor) -> Tensor:
    """See `gather` in torch.py."""
    values = torch.empty(len(positions), dtype=flat.dtype)
    _at("gather", flat, positions, values)
    return values


def subtract_at(flat: Tensor, positions: Tensor, values: Tensor) -> None:
    """See `subtract_at` in torch.py."""
    check_flat(len(positions), values, dtype=torch.float32)
    _at("subtract_at", flat, positions, values)
    increment_version(flat)


def clear_at(flat: Tensor, positions: Tensor) -> None:
    """See `clear_at` in torch.py."""
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
    """See `add_at` in torch.py."""
    check_flat(len(positions), positions, dtype=torch.int64)
    check_flat(len(positions), values, dtype=torch.float32)
    sums = torch.empty(len(positions), dtype=torch.float32)
    loop = function("add_at", *[Pointer] * 3, Length, Pointer, Pointer, Length, Pointer)
    places = (positions.data_ptr(), values.data_ptr(), len(positions), sums.data_ptr())
    if loop(pointers(parts, torch.float32), *_spans(parts), *places):
        raise IndexError("positions must lie within the parts that there are")
    _are_changed(parts)
    return sums


def step_at(weights: Parts, rates: Sequence[float], positions: Tensor, grads: Tensor) -> None:
    """See `step_at` in torch.py."""
    check_flat(len(positions), positions, dtype=torch.int64)
    check_flat(len(positions), grads, dtype=torch.float32)
    scratch = grads.clone()
    if len(rates) != len(weights.tensors):
        raise ValueError(f"{len(weights.tensors)} parts need as many rates, not {len(rates)}")
    loop = function("step_at", *[Pointer] * 4, Length, Pointer, Pointer, Length)
    operands = (pointers(weights, torch.float32), (Float * len(rates))(*rates), *_spans(weights))
    if loop(*operands, positions.data_ptr(), scratch.data_ptr(), len(positions)):
        raise IndexError("positions must lie within the parts that there are")
    _are_changed(weights)


def _spans(parts: Parts) -> tuple[int, int, int]:
    """Return the parts' starts and stops in the whole, and their number."""
    check_flat(len(parts.tensors), parts.starts, parts.stops, dtype=torch.int64)
    return parts.starts.data_ptr(), parts.stops.data_ptr(), len(parts.tensors)


def _are_changed(parts: Parts) -> None:
    for part in parts.tensors:
        if part is not None:
            increment_version(part)


def by_owner(positions: Tensor, size: int) -> tuple[Tensor, Tensor, Tensor]:
    """See `by_owner` in torch.py."""
    check_flat(len(positions), positions, dtype=torch.int64)
    order, places = torch.empty(2, len(positions), dtype=torch.int64).unbind()
    owners, counts = torch.empty(len(positions), dtype=torch.int32), torch.empty(size, dtype=torch.int64)
    loop = function("by_owner", Pointer, Length, Length, *[Pointer] * 4)
    results = [tensor.data_ptr() for tensor in (owners, order, places, counts)]
    if loop(positions.data_ptr(), len(positions), size, *results):
        raise ValueError(f"positions must be 0 or more, not {int(positions.amin())}")
    return order, places, counts


def of_owners(places: Tensor, counts: Tensor, size: int) -> Tensor:
    """See `of_owners` in torch.py."""
    check_flat(len(counts), counts, dtype=torch.int64)
    check_flat(int(counts.sum()), places, dtype=torch.int64)
    if len(counts) > size or (len(counts) and int(counts.amin()) < 0):
        raise ValueError(f"{counts.tolist()} places cannot be those of at most {size} owners")
    positions = torch.empty_like(places)
    loop = function("of_owners", Pointer, Pointer, Length, Length, Pointer)
    loop(places.data_ptr(), counts.data_ptr(), len(counts), size, positions.data_ptr())
    return positions
