"""The cosine transform of a matrix, its inverse, and products of thin matrices, in C."""

from __future__ import annotations

from collections.abc import Callable
from typing import Literal

import torch
from torch import Tensor
from torch.autograd.graph import increment_version

from ..floats import Put
from ..native.library import Int, Length, Pointer, at, check_flat, function, shared
from ..reductions.native import HOW
from .torch import Matrices, waves_of_sides

__all__ = ["dct", "inverse_dct", "put_product"]


def dct(flat: Tensor, matrices: Matrices, out: Tensor) -> None:
    """See `dct` in torch.py."""
    numbers = _checked(flat, matrices, out)
    loop = function("dct", *[Pointer] * 2, Length, *[Pointer] * 3)

    def span(strips: Tensor) -> None:
        loop(flat.data_ptr(), strips.data_ptr(), len(strips), *numbers, out.data_ptr())

    _shared_strips(span, matrices, len(flat))
    increment_version(out)


def inverse_dct(frequencies: Tensor, matrices: Matrices, flat: Tensor, how: Put | Literal["sign"]) -> None:
    """See `inverse_dct` in torch.py."""
    numbers = _checked(flat, matrices, frequencies)
    loop = function("inverse_dct", *[Pointer] * 2, Length, *[Pointer] * 3, Int)
    effect = 3 if how == "sign" else HOW[how]

    def span(strips: Tensor) -> None:
        loop(frequencies.data_ptr(), strips.data_ptr(), len(strips), *numbers, flat.data_ptr(), effect)

    _shared_strips(span, matrices, len(flat))
    increment_version(flat)


def _shared_strips(loop: Callable[[Tensor], None], matrices: Matrices, numel: int) -> None:
    """Run `loop` over the strips, which ascend, in as many threads as torch has."""
    strips, starts = matrices.table, matrices.table[:, 0].contiguous()

    def span(start: int, stop: int) -> None:
        first, last = torch.searchsorted(starts, torch.tensor([start, stop])).tolist()
        loop(strips[first:last])

    shared(span, numel)


def _checked(flat: Tensor, matrices: Matrices, frequencies: Tensor) -> tuple[int, int]:
    """Return the addresses of the factors for sides of 64, 1, 2 ... 63 elements, and their starts."""
    check_flat(len(flat), flat, frequencies, dtype=torch.float32)
    if any(start < 0 or start + rows * columns > len(flat) for start, rows, columns in matrices.shapes):
        raise ValueError(f"matrices reach beyond the {len(flat)} elements that there are")
    numbers, starts = waves_of_sides(flat.device)
    return numbers.data_ptr(), starts.data_ptr()


def put_product(left: Tensor, right: Tensor, out: Tensor, less: Tensor | None) -> None:
    """See `put_product` in torch.py."""
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
