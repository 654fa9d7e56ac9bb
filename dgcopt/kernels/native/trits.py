"""Trits, in C."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.autograd.graph import increment_version

from ..blocks import BLOCK
from ..torch import PER_BYTE, Put, halves
from .library import Int, Length, Pointer, check_bytes, check_flat, function, shared
from .sums import HOW, check_place

__all__ = ["majority", "put_trits", "round_trits"]


def round_trits(values: Tensor, scales: Tensor, place: Tensor, key: int) -> Tensor:
    """See `dgcopt.kernels.torch.round_trits`."""
    _check_scales(values, scales, place)
    packed = torch.empty(-(-len(values) // PER_BYTE), dtype=torch.uint8)
    loop = function("round_trits", *[Pointer] * 3, *[Length] * 2, Int, Int, *[Length] * 2, Pointer)
    numbers = (values.data_ptr(), scales.data_ptr(), place.data_ptr(), len(values), len(packed), *halves(key))

    def span(start: int, stop: int) -> None:
        loop(*numbers, start, stop - start, packed.data_ptr())

    shared(span, len(packed))
    return packed


def put_trits(packed: Tensor, scales: Tensor, place: Tensor, out: Tensor, how: Put) -> Tensor:
    """See `dgcopt.kernels.torch.put_trits`."""
    _check_scales(out, scales, place)
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
    """See `dgcopt.kernels.torch.majority`."""
    if votes.dim() != 2 or votes.dtype != torch.uint8:
        raise ValueError(f"a row of bytes is needed for each voter, not {tuple(votes.shape)} of {votes.dtype}")
    voters, count = votes.shape
    packed = torch.empty(-(-8 * count // PER_BYTE), dtype=torch.uint8)
    loop = function("majority", Pointer, *[Length] * 5, Pointer)

    def span(start: int, stop: int) -> None:
        loop(votes.data_ptr(), voters, count, len(packed), start, stop - start, packed.data_ptr())

    shared(span, len(packed))
    return packed


def _check_scales(values: Tensor, scales: Tensor, place: Tensor) -> None:
    check_flat(len(values), values, dtype=torch.float32)
    check_flat(len(scales), scales, dtype=torch.float32)
    check_place(place, -(-len(values) // BLOCK) * BLOCK, len(scales))
