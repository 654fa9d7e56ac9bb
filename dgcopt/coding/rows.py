"""Messages of one length as rows of a matrix, each made of parts whose lengths are its own."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from ..kernels import sent

__all__ = ["Lengths", "named", "one_row", "put_parts", "take_parts"]

Lengths = tuple[Tensor, ...]
"""Of each part its bytes in every row: int64, on the CPU."""


def one_row(count: int) -> Tensor:
    """The counts of a single row."""
    return torch.tensor([count])


def named(ranks: Sequence[int]) -> str:
    """Whom messages are from."""
    return f"rank {ranks[0]}" if len(ranks) == 1 else f"ranks {ranks[0]} to {ranks[-1]}"


def put_parts(rows: Tensor, parts: tuple[Tensor, ...], lengths: Lengths) -> None:
    """Write parts, which hold the bytes of one row after the other, side by side into rows."""
    start = torch.zeros_like(lengths[0])
    for part, length in zip(parts, lengths, strict=True):
        where = _where(rows, start, length)
        if isinstance(where, slice):
            rows[:, where] = part.view(len(rows), -1)
        else:
            rows.masked_scatter_(where, part)
        start = start + length


def take_parts(rows: Tensor, lengths: Lengths) -> tuple[Tensor, ...]:
    """The parts that `put_parts` wrote."""
    parts, start = [], torch.zeros_like(lengths[0])
    for length in lengths:
        parts.append(
            rows[:, where].reshape(-1) if isinstance(where := _where(rows, start, length), slice) else rows[where]
        )
        start = start + length
    return tuple(parts)


def _where(rows: Tensor, starts: Tensor, lengths: Tensor) -> slice | Tensor:
    """Which columns a part takes, or which places, where that differs from row to row."""
    if len(rows) == 1 or (bool((starts == starts[0]).all()) and bool((lengths == lengths[0]).all())):
        return slice(int(starts[0]), int(starts[0] + lengths[0]))
    starts, stops = (sent(ends, rows.device).unsqueeze(1) for ends in (starts, starts + lengths))
    columns = torch.arange(rows.shape[1], device=rows.device)
    return (starts <= columns) & (columns < stops)
