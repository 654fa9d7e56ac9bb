"""Signs, in C."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor
from torch.autograd.graph import increment_version

from ..blocks import BLOCK
from ..floats import Put
from ..memory.native import MIXTURE, weights_of
from ..native.library import Float, Int, Length, Pointer, at, check_bytes, check_flat, function, shared
from ..parts import Mixture
from ..reductions.native import HOW, blocks_of, check_place

__all__ = [
    "mix_signs",
    "pack_signs",
    "put_signs",
    "split_signs",
    "split_sum",
    "split_sum_of_signs",
]


def pack_signs(values: Tensor, zero_is_minus: bool = False) -> Tensor:
    """See `pack_signs` in torch.py."""
    check_flat(len(values), values, dtype=torch.float32)
    packed = torch.empty(-(-len(values) // 8), dtype=torch.uint8)
    loop = function("pack_signs", Pointer, Length, Int, Pointer)

    def span(start: int, stop: int) -> None:
        loop(at(values, start), stop - start, int(zero_is_minus), at(packed, start // 8))

    shared(span, len(values))
    return packed


def mix_signs(x: Tensor, keep: float, y: Tensor, add: float, out: Tensor, zero_is_minus: bool = False) -> Tensor:
    """See `mix_signs` in torch.py."""
    check_flat(len(out), x, y, out, dtype=torch.float32)
    packed = torch.empty(-(-len(out) // 8), dtype=torch.uint8)
    loop = function("mix_signs", Pointer, Float, Pointer, Float, Length, Pointer, Int, Pointer)

    def span(start: int, stop: int) -> None:
        mixed = (at(x, start), keep, at(y, start), add, stop - start, at(out, start))
        loop(*mixed, int(zero_is_minus), at(packed, start // 8))

    shared(span, len(out))
    increment_version(out)
    return packed


def split_signs(values: Tensor) -> tuple[Tensor, Tensor]:
    """See `split_signs` in torch.py."""
    blocks = blocks_of(values)
    packed, sums = torch.empty(blocks * (BLOCK // 8), dtype=torch.uint8), torch.empty(3, blocks, dtype=torch.float32)
    loop = function("split_signs", Pointer, Length, Pointer, Pointer, Pointer, Pointer)

    def span(start: int, stop: int) -> None:
        by_block = (at(row, start // BLOCK) for row in sums)
        loop(at(values, start), stop - start, at(packed, start // 8), *by_block)

    shared(span, len(values))
    return packed, sums


def split_sum(x: Tensor, y: Tensor, out: Tensor, mixture: Mixture | None = None) -> tuple[Tensor, Tensor]:
    """See `split_sum` in torch.py."""
    check_flat(len(out), x, y, dtype=torch.float32)
    blocks = blocks_of(out)
    packed, sums = torch.empty(blocks * (BLOCK // 8), dtype=torch.uint8), torch.empty(3, blocks, dtype=torch.float32)
    weights = weights_of(mixture, len(out))
    loop = function("split_sum", *[Pointer] * 2, *[Length] * 2, *[Pointer] * 5, *MIXTURE)
    flat, found = (x.data_ptr(), y.data_ptr()), [row.data_ptr() for row in (out, packed, *sums)]

    def span(start: int, stop: int) -> None:
        loop(*flat, start, stop, *found, *weights)

    shared(span, len(out))
    increment_version(out if mixture is None else (x, out))
    return packed, sums


def split_sum_of_signs(
    base: Tensor, packed: Sequence[Tensor], scales: Tensor, place: Tensor, lengths: Tensor, out: Tensor
) -> tuple[Tensor, Tensor]:
    """See `split_sum_of_signs` in torch.py."""
    blocks = blocks_of(out)
    check_flat(len(out), base, dtype=torch.float32)
    check_flat(blocks, lengths, dtype=torch.int64)
    check_place(place, len(out), scales.shape[1])
    if blocks and not 0 <= int(lengths.amin()) <= int(lengths.amax()) <= BLOCK:
        raise ValueError(f"blocks have {int(lengths.amin())} to {int(lengths.amax())} elements of {BLOCK}")
    if scales.dtype != torch.float32 or len(scales) != len(packed):
        raise ValueError(f"a row of float32 is needed for each rank, not {tuple(scales.shape)} of {scales.dtype}")
    for theirs in packed:
        check_bytes(theirs, len(out) // 8)
    signs, sums = torch.empty(blocks * (BLOCK // 8), dtype=torch.uint8), torch.empty(3, blocks, dtype=torch.float32)
    loop = function(
        "split_sum_of_signs", *[Pointer] * 2, Length, Pointer, Length, *[Pointer] * 2, Length, *[Pointer] * 5
    )

    def span(start: int, stop: int) -> None:
        block = start // BLOCK
        rows = torch.tensor([at(theirs, start // 8) for theirs in packed], dtype=torch.int64)
        by_block = (at(row, block) for row in sums)
        numbers = (rows.data_ptr(), len(packed), scales.data_ptr(), scales.shape[1])
        by_place = (at(place, block), at(lengths, block))
        loop(at(base, start), *numbers, *by_place, stop - start, at(out, start), at(signs, start // 8), *by_block)

    shared(span, len(out))
    increment_version(out)
    return signs, sums


def put_signs(
    packed: Tensor,
    above: Tensor,
    below: Tensor,
    place: Tensor,
    out: Tensor,
    how: Put,
    mixture: Mixture | None = None,
) -> None:
    """See `put_signs` in torch.py."""
    for numbers in (above, below):
        check_flat(len(numbers), numbers, dtype=torch.float32)
    check_flat(len(out), out, dtype=torch.float32)
    check_place(place, len(out), len(above), len(below))
    check_bytes(packed, len(out) // 8)
    weights = weights_of(mixture, len(out))
    loop = function("put_signs", *[Pointer] * 4, *[Length] * 2, Pointer, Int, *MIXTURE)
    found = [x.data_ptr() for x in (packed, above, below, place)]

    def span(start: int, stop: int) -> None:
        loop(*found, start, stop, out.data_ptr(), HOW[how], *weights)

    shared(span, len(out))
    increment_version(out)
