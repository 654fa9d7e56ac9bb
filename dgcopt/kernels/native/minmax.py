"""256 levels between the smallest and the largest value of a chunk, in C."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.autograd.graph import increment_version

from ..torch import Put
from .library import Int, Length, Pointer, at, check_flat, function, shared
from .sums import HOW

__all__ = ["minmax_codes", "minmax_ends", "put_minmax"]


def minmax_ends(values: Tensor) -> Tensor:
    """See `dgcopt.kernels.torch.minmax_ends`."""
    check_flat(len(values), values, dtype=torch.float32)
    if not len(values):
        raise ValueError("no values have neither a smallest nor a largest")
    parts: list[Tensor] = []
    loop = function("minmax_ends", Pointer, Length, Pointer)

    def span(start: int, stop: int) -> None:
        ends = torch.empty(2)
        loop(at(values, start), stop - start, ends.data_ptr())
        parts.append(ends)

    shared(span, len(values))
    every = torch.stack(parts)
    return torch.stack((every[:, 0].amin(), every[:, 1].amax()))


def minmax_codes(values: Tensor, ends: Tensor, codes: Tensor) -> None:
    """See `dgcopt.kernels.torch.minmax_codes`."""
    _check(values, ends, codes)
    loop = function("minmax_codes", Pointer, Length, Pointer, Pointer)

    def span(start: int, stop: int) -> None:
        loop(at(values, start), stop - start, ends.data_ptr(), at(codes, start))

    shared(span, len(values))


def put_minmax(codes: Tensor, ends: Tensor, out: Tensor, how: Put) -> None:
    """See `dgcopt.kernels.torch.put_minmax`."""
    _check(out, ends, codes)
    loop = function("put_minmax", Pointer, Length, Pointer, Pointer, Int)

    def span(start: int, stop: int) -> None:
        loop(at(codes, start), stop - start, ends.data_ptr(), at(out, start), HOW[how])

    shared(span, len(out))
    increment_version(out)


def _check(values: Tensor, ends: Tensor, codes: Tensor) -> None:
    check_flat(len(values), values, dtype=torch.float32)
    check_flat(2, ends, dtype=torch.float32)
    check_flat(len(values), codes, dtype=torch.uint8)
