"""256 levels between the smallest and the largest value of a row, in C."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.autograd.graph import increment_version

from ..floats import Put
from ..memory.native import MIXTURE, weights_of
from ..native.library import Float, Int, Length, Pointer, at, check_flat, function, shared
from ..parts import Mixture
from ..reductions.native import HOW

__all__ = [
    "minmax_codes",
    "minmax_ends",
    "minmax_of_mean",
    "put_minmax",
]


def minmax_ends(rows: Tensor, mixture: Mixture | None = None) -> Tensor:
    """See `minmax_ends` in torch.py."""
    _check_rows(rows, len(rows), torch.float32)
    count, length = rows.shape
    if mixture is not None:
        check_flat(count * length, rows.view(-1))
    if not length:
        raise ValueError("no values have neither a smallest nor a largest")
    parts: list[Tensor] = []
    weights = weights_of(mixture, count * length)
    loop = function("minmax_ends", Pointer, *[Length] * 4, Pointer, *MIXTURE)

    def span(start: int, stop: int) -> None:
        ends = torch.empty(count, 2, dtype=torch.float32)
        loop(rows.data_ptr(), count, rows.stride(0), start, stop, ends.data_ptr(), *weights)
        parts.append(ends)

    shared(span, length)
    if mixture is not None:
        increment_version(rows)
    return _outermost(parts)


def minmax_codes(rows: Tensor, ends: Tensor, codes: Tensor) -> None:
    """See `minmax_codes` in torch.py."""
    count, length = rows.shape
    _check_rows(rows, count, torch.float32)
    _check_rows(codes, count, torch.uint8, length)
    check_flat(2 * count, ends.view(-1), dtype=torch.float32)
    loop = function("minmax_codes", Pointer, Length, Length, Length, Pointer, Pointer, Length)

    def span(start: int, stop: int) -> None:
        of_rows = (at(rows, start), count, rows.stride(0), stop - start)
        loop(*of_rows, ends.data_ptr(), at(codes, start), codes.stride(0))

    shared(span, length)


def put_minmax(codes: Tensor, ends: Tensor, out: Tensor, how: Put, mixture: Mixture | None = None) -> None:
    """See `put_minmax` in torch.py."""
    check_flat(len(out), out, dtype=torch.float32)
    check_flat(2, ends, dtype=torch.float32)
    check_flat(len(out), codes, dtype=torch.uint8)
    weights = weights_of(mixture, len(out))
    loop = function("put_minmax", Pointer, *[Length] * 2, *[Pointer] * 2, Int, *MIXTURE)

    def span(start: int, stop: int) -> None:
        loop(codes.data_ptr(), start, stop, ends.data_ptr(), out.data_ptr(), HOW[how], *weights)

    shared(span, len(out))
    increment_version(out)


def minmax_of_mean(codes: Tensor, ends: Tensor, divisor: int, out: Tensor) -> Tensor:
    """See `minmax_of_mean` in torch.py."""
    ranks, length = codes.shape
    _check_rows(codes, ranks, torch.uint8)
    check_flat(2 * ranks, ends.view(-1), dtype=torch.float32)
    check_flat(length, out, dtype=torch.uint8)
    if not ranks or not length:
        raise ValueError("no values have neither a mean nor a smallest nor a largest")
    parts: list[Tensor] = []
    of_codes = (Pointer, Length, Length, Pointer, Float, Length)
    find = function("minmax_ends_of_mean", *of_codes, Pointer)
    write = function("minmax_codes_of_mean", *of_codes, Pointer, Pointer)

    def mean(start: int, stop: int) -> tuple[int | float | None, ...]:
        return at(codes, start), ranks, codes.stride(0), ends.data_ptr(), divisor, stop - start

    def find_ends(start: int, stop: int) -> None:
        parts.append(torch.empty(1, 2, dtype=torch.float32))
        find(*mean(start, stop), parts[-1].data_ptr())

    def write_codes(start: int, stop: int) -> None:
        write(*mean(start, stop), of_mean.data_ptr(), at(out, start))

    shared(find_ends, length)
    of_mean = _outermost(parts)[0]
    shared(write_codes, length)
    return of_mean


def _outermost(parts: list[Tensor]) -> Tensor:
    """Return the ends of rows from those of their parts."""
    if len(parts) == 1:
        return parts[0]
    every = torch.stack(parts)
    return torch.stack((every[..., 0].amin(0), every[..., 1].amax(0)), 1)


def _check_rows(rows: Tensor, count: int, dtype: torch.dtype, length: int | None = None) -> None:
    """Raise ValueError for rows of other shapes, which a loop would read or write out of bounds."""
    wanted = (count, rows.shape[-1] if length is None else length)
    if rows.dim() != 2 or rows.shape != wanted or rows.dtype != dtype or rows.stride(-1) != 1:
        raise ValueError(f"rows of {dtype}, {wanted}, are needed, not {tuple(rows.shape)} of {rows.dtype}")
