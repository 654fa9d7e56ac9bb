"""Packing of integers of few bits into bytes, little-endian only."""

from __future__ import annotations

from typing import TypeVar

import torch
from torch import Tensor

from ..kernels import pack_small, unpack_small

__all__ = ["aligned", "pack_rows", "packed_bytes", "read_as", "unpack_rows"]

Count = TypeVar("Count", int, Tensor)

_ALIGNMENT = 8


def aligned(nbytes: int) -> int:
    """Return the next multiple of 8; parts of a message start at multiples of 8, so they can be read in place."""
    return -(-nbytes // _ALIGNMENT) * _ALIGNMENT


def read_as(payload: Tensor, dtype: torch.dtype) -> Tensor:
    """Return the elements in uint8 `payload`; a view if it is aligned."""
    if payload.storage_offset() % dtype.itemsize:
        payload = payload.clone()
    return payload.view(dtype)


def packed_bytes(count: Count, width: int) -> Count:
    """Return the bytes of `count` integers of `width` bits: whole bytes first, then remaining bits, eight at a time."""
    return count * (width // 8) + -(-count // 8) * (width % 8)


def pack_rows(fields: Tensor, counts: Tensor, width: int) -> Tensor:
    """Pack each row's fields with `pack_small`, one row after the other."""
    return pack_small(fields if len(counts) == 1 else _by_eights(fields, counts), width)


def unpack_rows(packed: Tensor, counts: Tensor, width: int) -> Tensor:
    """Unpack the fields of `pack_rows`."""
    if len(counts) == 1:
        return unpack_small(packed, int(counts), width)
    eights = 8 * -(-counts // 8)
    return torch.cat(unpack_small(packed, int(eights.sum()), width).split(_in_turn(counts, eights - counts))[::2])


def _by_eights(fields: Tensor, counts: Tensor) -> Tensor:
    """Pad each row to whole bytes."""
    rows, zeros = fields.split(counts.tolist()), fields.new_zeros(7)
    return torch.cat(
        [part for row, gap in zip(rows, (-counts % 8).tolist(), strict=True) for part in (row, zeros[:gap])]
    )


def _in_turn(one: Tensor, other: Tensor) -> list[int]:
    """Interleave two sequences."""
    return torch.stack((one, other), 1).flatten().tolist()
