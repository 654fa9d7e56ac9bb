"""Stochastic rounding to levels, powers of two and trits, in C."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.autograd.graph import increment_version

from ..blocks import BLOCK
from ..floats import Put
from ..hashing.torch import halves
from ..native.library import Int, Length, Pointer, at, check_bytes, check_flat, function, shared
from ..reductions.native import HOW, blocks_of, check_place
from .torch import PER_BYTE

__all__ = ["majority", "put_levels", "put_powers", "put_trits", "round_levels", "round_powers", "round_trits"]


def round_levels(values: Tensor, norms: Tensor, place: Tensor, levels: int, key: int) -> Tensor:
    """See `round_levels` in torch.py."""
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
    """See `put_levels` in torch.py."""
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
    """See `round_powers` in torch.py."""
    blocks = blocks_of(values)
    message = torch.empty(blocks * (BLOCK + BLOCK // 8), dtype=torch.uint8)
    loop = function("round_powers", Pointer, Length, Length, Int, Int, Pointer, Pointer)

    def span(start: int, stop: int) -> None:
        signs = at(message, len(values) + start // 8)
        loop(at(values, start), start, stop - start, *halves(key), at(message, start), signs)

    shared(span, len(values))
    return message


def put_powers(message: Tensor, out: Tensor, how: Put) -> Tensor:
    """See `put_powers` in torch.py."""
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


def round_trits(values: Tensor, scales: Tensor, place: Tensor, key: int) -> Tensor:
    """See `round_trits` in torch.py."""
    _check_trits(values, scales, place)
    packed = torch.empty(-(-len(values) // PER_BYTE), dtype=torch.uint8)
    loop = function("round_trits", *[Pointer] * 3, *[Length] * 2, Int, Int, *[Length] * 2, Pointer)
    numbers = (values.data_ptr(), scales.data_ptr(), place.data_ptr(), len(values), len(packed), *halves(key))

    def span(start: int, stop: int) -> None:
        loop(*numbers, start, stop - start, packed.data_ptr())

    shared(span, len(packed))
    return packed


def put_trits(packed: Tensor, scales: Tensor, place: Tensor, out: Tensor, how: Put) -> Tensor:
    """See `put_trits` in torch.py."""
    _check_trits(out, scales, place)
    check_bytes(packed, -(-len(out) // PER_BYTE))
    loop = function("put_trits", *[Pointer] * 3, *[Length] * 4, Pointer, Int)
    numbers = (packed.data_ptr(), scales.data_ptr(), place.data_ptr(), len(out), len(packed))
    wrong: list[int] = []

    def span(start: int, stop: int) -> None:
        wrong.append(loop(*numbers, start, stop - start, out.data_ptr(), HOW[how]))

    shared(span, len(packed))
    increment_version(out)
    return torch.tensor(not any(wrong))


def majority(votes: Tensor) -> Tensor:
    """See `majority` in torch.py."""
    if votes.dim() != 2 or votes.dtype != torch.uint8:
        raise ValueError(f"a row of bytes is needed for each voter, not {tuple(votes.shape)} of {votes.dtype}")
    voters, count = votes.shape
    packed = torch.empty(-(-8 * count // PER_BYTE), dtype=torch.uint8)
    loop = function("majority", Pointer, *[Length] * 5, Pointer)

    def span(start: int, stop: int) -> None:
        loop(votes.data_ptr(), voters, count, len(packed), start, stop - start, packed.data_ptr())

    shared(span, len(packed))
    return packed


def _check_trits(values: Tensor, scales: Tensor, place: Tensor) -> None:
    check_flat(len(values), values, dtype=torch.float32)
    check_flat(len(scales), scales, dtype=torch.float32)
    check_place(place, -(-len(values) // BLOCK) * BLOCK, len(scales))
