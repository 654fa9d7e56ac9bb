"""Trits, in C."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.autograd.graph import increment_version

from ..blocks import BLOCK
from ..torch import PER_BYTE, Put
from .library import Int, Length, Pointer, at, check_bytes, check_flat, function, shared
from .sums import HOW, check_place

__all__ = ["pack_trits", "put_trits", "unpack_trits"]


def pack_trits(trits: Tensor) -> Tensor:
    """See `dgcopt.kernels.torch.pack_trits`."""
    check_flat(len(trits), trits, dtype=torch.int8)
    length = -(-len(trits) // PER_BYTE)
    if len(trits) % PER_BYTE:
        whole = torch.full((PER_BYTE * length,), -1, dtype=torch.int8)
        whole[: len(trits)] = trits
        trits = whole
    packed = torch.empty(length, dtype=torch.uint8)
    loop = function("pack_trits", Pointer, Length, Length, Pointer)

    def span(start: int, stop: int) -> None:
        loop(at(trits, start), stop - start, length, at(packed, start))

    shared(span, length)
    return packed


def unpack_trits(packed: Tensor, count: int) -> Tensor | None:
    """See `dgcopt.kernels.torch.unpack_trits`."""
    length = -(-count // PER_BYTE)
    check_bytes(packed, length)
    trits = torch.empty(PER_BYTE * length, dtype=torch.int8)
    loop = function("unpack_trits", Pointer, Length, Length, Pointer)
    wrong: list[int] = []

    def span(start: int, stop: int) -> None:
        wrong.append(loop(at(packed, start), stop - start, length, at(trits, start)))

    shared(span, length)
    return None if any(wrong) else trits[:count]


def put_trits(trits: Tensor, scales: Tensor, place: Tensor, out: Tensor, how: Put) -> None:
    """See `dgcopt.kernels.torch.put_trits`."""
    check_flat(len(out), trits, dtype=torch.int8)
    check_flat(len(out), out, dtype=torch.float32)
    check_flat(len(scales), scales, dtype=torch.float32)
    check_place(place, len(out), len(scales))
    loop = function("put_trits", Pointer, Pointer, Pointer, Length, Pointer, Int)

    def span(start: int, stop: int) -> None:
        numbers = (at(trits, start), scales.data_ptr(), at(place, start // BLOCK))
        loop(*numbers, stop - start, at(out, start), HOW[how])

    shared(span, len(out))
    increment_version(out)
