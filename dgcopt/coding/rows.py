"""Messages of equal length as rows of a matrix; parts have different lengths per row."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

__all__ = ["Lengths", "named", "one_row", "put_parts", "take_parts"]

Lengths = tuple[Tensor, ...]
"""Bytes of each part in each row: int64, on the CPU."""


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
