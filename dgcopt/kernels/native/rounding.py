"""Rounding at random, in C."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.autograd.graph import increment_version

from ..blocks import BLOCK
from ..torch import Put, halves
from .library import Int, Length, Pointer, at, check_bytes, check_flat, function, shared
from .sums import HOW, blocks_of, check_place

__all__ = [
    "put_levels",
    "put_powers",
    "round_levels",
    "round_powers",
]


def round_levels(values: Tensor, norms: Tensor, place: Tensor, levels: int, key: int) -> Tensor:
    """See `dgcopt.kernels.torch.round_levels`."""
    _check_scales(values, norms, place)
    if not 1 <= levels <= 127:
        raise ValueError(f"a byte holds 1 to 127 levels and a sign, not {levels}")
    width = 1 + levels.bit_length()
    packed = torch.empty(len(values) // 8 * width, dtype=torch.uint8)
    loop = function("round_levels", Pointer, Pointer, Pointer, Length, Length, Int, Int, Int, Int, Pointer)

    def span(start: int, stop: int) -> None:
        numbers = (at(values, start), norms.data_ptr(), at(place, start // BLOCK))
        loop(*numbers, start, stop - start, levels, *halves(key), width, at(packed, start // 8 * width))

    shared(span, len(values))
    return packed


def put_levels(packed: Tensor, bits: int, scales: Tensor, place: Tensor, out: Tensor, how: Put) -> Tensor:
    """See `dgcopt.kernels.torch.put_levels`."""
    _check_scales(out, scales, place)
    if not 1 <= bits <= 7:
        raise ValueError(f"a byte holds a level of 1 to 7 bits and a sign, not of {bits}")
    width = 1 + bits
    check_bytes(packed, len(out) // 8 * width)
    loop = function("put_levels", Pointer, Int, Pointer, Pointer, Length, Pointer, Int)
    highest = [0]

    def span(start: int, stop: int) -> None:
        numbers = (at(packed, start // 8 * width), width, scales.data_ptr(), at(place, start // BLOCK))
        highest.append(loop(*numbers, stop - start, at(out, start), HOW[how]))

    shared(span, len(out))
    increment_version(out)
    return torch.tensor(max(highest))


def round_powers(values: Tensor, key: int) -> Tensor:
    """See `dgcopt.kernels.torch.round_powers`."""
    blocks = blocks_of(values)
    message = torch.empty(blocks * (BLOCK + BLOCK // 8), dtype=torch.uint8)
    loop = function("round_powers", Pointer, Length, Length, Int, Int, Pointer, Pointer)

    def span(start: int, stop: int) -> None:
        signs = at(message, len(values) + start // 8)
        loop(at(values, start), start, stop - start, *halves(key), at(message, start), signs)

    shared(span, len(values))
    return message


def put_powers(message: Tensor, out: Tensor, how: Put) -> Tensor:
    """See `dgcopt.kernels.torch.put_powers`."""
    blocks_of(out)
    check_bytes(message, len(out) + len(out) // 8)
    loop = function("put_powers", Pointer, Pointer, Length, Pointer, Int)
    highest = [0]

    def span(start: int, stop: int) -> None:
        signs = at(message, len(out) + start // 8)
        highest.append(loop(at(message, start), signs, stop - start, at(out, start), HOW[how]))

    shared(span, len(out))
    increment_version(out)
    return torch.tensor(max(highest))


def _check_scales(values: Tensor, scales: Tensor, place: Tensor) -> None:
    check_flat(len(values), values, dtype=torch.float32)
    check_flat(len(scales), scales, dtype=torch.float32)
    check_place(place, len(values), len(scales))
