"""The largest magnitudes of every chunk, in C."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.autograd.graph import increment_version

from ..torch import Chunks
from .library import FLOATS, Float, Length, Pointer, at, check_flat, function, shared

__all__ = ["add_and_select_chunks", "select_chunks"]


def select_chunks(flat: Tensor, chunks: Chunks) -> tuple[Tensor, Tensor]:
    """See `dgcopt.kernels.torch.select_chunks`."""
    check_flat(len(flat), flat)
    return _select(flat, None, None, 0.0, chunks)


def add_and_select_chunks(g: Tensor, e: Tensor, decay: float, out: Tensor, chunks: Chunks) -> tuple[Tensor, Tensor]:
    """See `dgcopt.kernels.torch.add_and_select_chunks`."""
    check_flat(len(out), g, e, out, dtype=torch.float32)
    if len(chunks.spans) == 0 or chunks.spans[0][0] != 0:
        raise ValueError("chunks must begin with the first element")
    increment_version(out)
    return _select(out, g, e, decay, chunks)


def _select(flat: Tensor, g: Tensor | None, e: Tensor | None, decay: float, chunks: Chunks) -> tuple[Tensor, Tensor]:
    starts, stops, counts = chunks.table
    if len(stops) and int(stops.amax()) > len(flat):
        raise ValueError(f"chunks reach beyond the {len(flat)} elements that there are")
    positions, values = torch.empty(chunks.count, dtype=torch.int64), torch.empty(chunks.count, dtype=flat.dtype)
    loop = function(
        f"select_chunks_{FLOATS[flat.dtype]}", *[Pointer] * 3, Float, Length, *[Pointer] * 3, Length, *[Pointer] * 2
    )
    before = counts.cumsum(0) - counts

    def span(start: int, stop: int) -> None:
        first, last = torch.searchsorted(starts, torch.tensor([start, stop])).tolist()
        if first == last:
            return
        end, place = int(starts[last]) if last < len(starts) else len(flat), int(before[first])
        table = (*(at(x, first) for x in (starts, stops, counts)), last - first)
        if loop(at(flat, 0), at(g, 0), at(e, 0), decay, end, *table, at(positions, place), at(values, place)):
            raise MemoryError("there is no memory left to select in")

    shared(span, len(flat))
    return positions, values
