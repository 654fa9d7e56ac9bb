"""Integers of few bits, side by side in bytes.

The bytes are those of little-endian machines, on which alone this runs.
"""

from __future__ import annotations

from typing import TypeVar

import torch
from torch import Tensor

from ..kernels import pack_small, unpack_small

__all__ = ["aligned", "pack_rows", "packed_bytes", "read_as", "unpack_rows"]

Count = TypeVar("Count", int, Tensor)

_ALIGNMENT = 8


def aligned(nbytes: int) -> int:
    """The next multiple of 8, where every part of a message starts, so that it can be read in place."""
    return -(-nbytes // _ALIGNMENT) * _ALIGNMENT


def read_as(payload: Tensor, dtype: torch.dtype) -> Tensor:
    """The elements that uint8 `payload` holds, in place where it lies on a multiple of their size."""
    if payload.storage_offset() % dtype.itemsize:
        payload = payload.clone()
    return payload.view(dtype)


def packed_bytes(count: Count, width: int) -> Count:
    """Bytes of `count` integers of `width` bits: the whole bytes of each, then the bits left over, eight at a time."""
    return count * (width // 8) + -(-count // 8) * (width % 8)


def pack_rows(fields: Tensor, counts: Tensor, width: int) -> Tensor:
    """`pack_small` of each row's fields, one row after the other."""
    return pack_small(fields if len(counts) == 1 else _by_eights(fields, counts), width)


def unpack_rows(packed: Tensor, counts: Tensor, width: int) -> Tensor:
    """The fields that `pack_rows` wrote."""
    if len(counts) == 1:
        return unpack_small(packed, int(counts), width)
    eights = 8 * -(-counts // 8)
    return torch.cat(unpack_small(packed, int(eights.sum()), width).split(_in_turn(counts, eights - counts))[::2])


def _by_eights(fields: Tensor, counts: Tensor) -> Tensor:
    """Every row filled up to whole bytes."""
    rows, zeros = fields.split(counts.tolist()), fields.new_zeros(7)
    return torch.cat(
        [part for row, gap in zip(rows, (-counts % 8).tolist(), strict=True) for part in (row, zeros[:gap])]
    )


def _in_turn(one: Tensor, other: Tensor) -> list[int]:
    """The first of one, the first of the other, the second of one, and so on."""
    return torch.stack((one, other), 1).flatten().tolist()
