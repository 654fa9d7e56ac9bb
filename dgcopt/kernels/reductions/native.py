"""Maxima, norms and sums of blocks of 64 values and of tensors, in C."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.autograd.graph import increment_version

from ..blocks import BLOCK
from ..floats import Put
from ..native.library import FLOATS, Float, Length, Pointer, at, check_flat, function, shared

__all__ = [
    "HOW",
    "add_and_maxima",
    "add_and_norms",
    "block_maxima",
    "blocks_of",
    "check_place",
    "tensor_norms",
    "tensor_sums",
]


def block_maxima(flat: Tensor, out: Tensor | None = None) -> Tensor:
    """See `block_maxima` in torch.py."""
    check_flat(flat.numel() // BLOCK * BLOCK, flat)
    maxima = torch.empty(flat.numel() // BLOCK, dtype=flat.dtype) if out is None else out
    check_flat(flat.numel() // BLOCK, maxima, dtype=flat.dtype)
    loop = function(f"block_maxima_{FLOATS[flat.dtype]}", Pointer, Length, Pointer)

    def span(start: int, stop: int) -> None:
        loop(at(flat, start), stop - start, at(maxima, start // BLOCK))

    shared(span, flat.numel())
    return maxima


HOW: dict[Put, int] = {"set": 0, "add": 1, "subtract": 2}


def tensor_sums(numbers: Tensor, place: Tensor, count: int) -> Tensor:
    """See `tensor_sums` in torch.py."""
    check_place(place, numbers.shape[1] * BLOCK, count)
    sums = torch.zeros(len(numbers), count, dtype=torch.float64)
    check_flat(len(numbers) * len(place), numbers.view(-1), dtype=torch.float32)
    loop = function("tensor_sums", Pointer, Length, Pointer, *[Length] * 2, Pointer)
    loop(numbers.data_ptr(), len(numbers), place.data_ptr(), len(place), count, sums.data_ptr())
    return sums


def tensor_norms(values: Tensor, place: Tensor, count: int) -> tuple[Tensor, Tensor]:
    """See `tensor_norms` in torch.py."""
    blocks = blocks_of(values)
    check_place(place, len(values), count)
    maxima, squares = torch.empty(blocks, dtype=torch.float32), torch.empty(blocks, dtype=torch.float64)
    loop = function("block_norms", Pointer, Length, Pointer, Pointer)

    def span(start: int, stop: int) -> None:
        loop(at(values, start), stop - start, at(maxima, start // BLOCK), at(squares, start // BLOCK))

    shared(span, len(values))
    most, sums = torch.zeros(count, dtype=torch.float32), torch.zeros(count, dtype=torch.float64)
    loop_over_blocks = function("tensor_norms", *[Pointer] * 3, Length, Pointer, Pointer)
    loop_over_blocks(*(x.data_ptr() for x in (maxima, squares, place)), blocks, most.data_ptr(), sums.data_ptr())
    return most, sums


def blocks_of(values: Tensor) -> int:
    """Return the number of blocks of flat float32 values. Raises ValueError for other tensors."""
    check_flat(len(values), values, dtype=torch.float32)
    if len(values) % BLOCK:
        raise ValueError(f"whole blocks of {BLOCK} elements are needed, not {len(values)} elements")
    return len(values) // BLOCK


def check_place(place: Tensor, numel: int, *counts: int) -> None:
    """Raises ValueError unless there is a place for each of the blocks of `numel` elements, below all `counts`."""
    if numel % BLOCK:
        raise ValueError(f"whole blocks of {BLOCK} elements are needed, not {numel} elements")
    check_flat(numel // BLOCK, place, dtype=torch.int64)
    if function("any_outside", Pointer, Length, Length)(place.data_ptr(), len(place), min(counts)):
        least, most = (int(bound) for bound in torch.aminmax(place))
        raise ValueError(f"blocks have places from {least} to {most} among {min(counts)} numbers")


def add_and_maxima(g: Tensor, e: Tensor, decay: float, out: Tensor) -> Tensor:
    """See `add_and_maxima` in torch.py."""
    return _add_and("maxima", g, e, decay, out)


def add_and_norms(g: Tensor, e: Tensor, decay: float, out: Tensor) -> Tensor:
    """See `add_and_norms` in torch.py."""
    return _add_and("norms", g, e, decay, out)


def _add_and(statistic: str, g: Tensor, e: Tensor, decay: float, out: Tensor) -> Tensor:
    check_flat(len(out) // BLOCK * BLOCK, g, e, out, dtype=torch.float32)
    numbers = torch.empty(len(out) // BLOCK, dtype=torch.float32)
    loop = function(f"add_and_{statistic}", *[Pointer] * 2, Float, Length, *[Pointer] * 2)

    def span(start: int, stop: int) -> None:
        loop(at(g, start), at(e, start), decay, stop - start, at(out, start), at(numbers, start // BLOCK))

    shared(span, len(out))
    increment_version(out)
    return numbers
