"""Rows of bytes: integers of few bits packed, little-endian only, and parts of different lengths side by side."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TypeVar

import torch
from torch import Tensor

from ..kernels import pack_small, unpack_small

__all__ = [
    "Lengths",
    "aligned",
    "named",
    "one_row",
    "pack_rows",
    "packed_bytes",
    "put_parts",
    "read_as",
    "take_parts",
    "unpack_rows",
]

Count = TypeVar("Count", int, Tensor)

Lengths = tuple[Tensor, ...]
"""Bytes of each part in each row: int64, on the CPU."""

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


def one_row(count: int) -> Tensor:
    """Return the counts of a single row."""
    return torch.tensor([count])


def named(ranks: Sequence[int]) -> str:
    """Name the senders of messages."""
    return f"rank {ranks[0]}" if len(ranks) == 1 else f"ranks {ranks[0]} to {ranks[-1]}"


def put_parts(rows: Tensor, parts: tuple[Tensor, ...], lengths: Lengths) -> None:
    """Write parts, each the concatenated bytes of all rows, side by side into rows padded with zeros."""
    rest = rows.shape[1] - sum(lengths, torch.zeros_like(lengths[0]))
    zeros = rows.new_zeros(int(rest.amax()))
    pieces = [part.split(length.tolist()) for part, length in zip(parts, lengths, strict=True)]
    pieces.append(tuple(zeros[:count] for count in rest.tolist()))
    rows.copy_(torch.cat([piece for row in zip(*pieces, strict=True) for piece in row]).view(rows.shape))


def take_parts(rows: Tensor, lengths: Lengths) -> tuple[Tensor, ...]:
    """Return the parts of `put_parts`' rows."""
    rest = rows.shape[1] - sum(lengths, torch.zeros_like(lengths[0]))
    pieces = rows.reshape(-1).split(torch.stack([*lengths, rest], 1).flatten().tolist())
    return tuple(torch.cat(pieces[part :: len(lengths) + 1]) for part in range(len(lengths)))
