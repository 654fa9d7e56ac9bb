"""Exact selection of the largest magnitudes, in C."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor
from torch.autograd.graph import increment_version

from ..blocks import BLOCK
from ..native.library import FLOATS, Float, Length, Pointer, at, check_flat, function, shared
from . import torch as specification
from .groups import Chunks, Groups

__all__ = [
    "add_and_select_above",
    "add_and_select_chunks",
    "candidate_blocks",
    "largest_first",
    "select",
    "select_above",
    "select_ahead",
    "select_chunks",
]


def select(flat: Tensor, maxima: Tensor, groups: Groups) -> Tensor:
    """See `select` in torch.py."""
    check_flat(len(flat), flat)
    if maxima.dtype != flat.dtype or len(maxima) != len(flat) // BLOCK:
        raise ValueError(f"{len(flat)} elements have {len(flat) // BLOCK} block maxima, not {len(maxima)}")
    table = _table(maxima, groups)
    positions = torch.empty(sum(groups.counts), dtype=torch.int64)
    loop = function(f"select_{FLOATS[flat.dtype]}", *[Pointer] * 6, Length, Pointer)
    places = [tensor.data_ptr() for tensor in (flat, maxima, *table)]
    if loop(*places, len(groups.counts), positions.data_ptr()):
        raise MemoryError("there is no memory left to select in")
    return positions


def candidate_blocks(maxima: Tensor, groups: Groups) -> tuple[Tensor, Tensor]:
    """See `candidate_blocks` in torch.py."""
    table = _table(maxima, groups)
    blocks = torch.empty(len(maxima) + 1, dtype=torch.int64)
    numbers = torch.empty(len(table[0]), dtype=torch.int64)
    loop = function(f"candidate_blocks_{FLOATS[maxima.dtype]}", *[Pointer] * 5, Length, Pointer, Pointer, Pointer)
    places = [tensor.data_ptr() for tensor in (maxima, *table)]
    found = torch.empty((), dtype=torch.int64)
    if loop(*places, len(groups.counts), blocks.data_ptr(), numbers.data_ptr(), found.data_ptr()):
        raise MemoryError("there is no memory left to select in")
    return blocks[: int(found)], numbers


def select_ahead(rows_of: Callable[[Tensor], Tensor], maxima: Tensor, groups: Groups) -> tuple[Tensor, Tensor]:
    """See `select_ahead` in torch.py."""
    blocks, numbers = candidate_blocks(maxima, groups)
    rows = rows_of(blocks).view(-1)
    chosen = select(rows, maxima.index_select(0, blocks), groups.among(blocks, numbers))
    return blocks.index_select(0, chosen // BLOCK) * BLOCK + chosen % BLOCK, rows.index_select(0, chosen)


def _table(maxima: Tensor, groups: Groups) -> tuple[Tensor, ...]:
    """The groups, which do not reach beyond the blocks that there are."""
    check_flat(len(maxima), maxima)
    if len(groups.table[1]) and int(groups.table[1].amax()) > len(maxima) * BLOCK:
        raise ValueError(f"groups reach beyond the {len(maxima) * BLOCK} elements that there are")
    return groups.table


def largest_first(values: Tensor, number: Tensor) -> tuple[Tensor, Tensor]:
    """See `largest_first` in torch.py: mostly all come first, and nothing has to be sorted."""
    if int(number) < len(values):
        return specification.largest_first(values, number)
    return torch.arange(len(values)), torch.ones(len(values), dtype=torch.bool)


def select_above(flat: Tensor, least: float, most: int) -> tuple[Tensor, Tensor]:
    """See `select_above` in torch.py."""
    check_flat(len(flat), flat, dtype=torch.float32)
    return _select_above(flat, None, None, 0.0, least, most)


def add_and_select_above(
    g: Tensor, e: Tensor, decay: float, out: Tensor, least: float, most: int
) -> tuple[Tensor, Tensor]:
    """See `add_and_select_above` in torch.py."""
    check_flat(len(out), g, e, out, dtype=torch.float32)
    increment_version(out)
    return _select_above(out, g, e, decay, least, most)


def _select_above(
    flat: Tensor, g: Tensor | None, e: Tensor | None, decay: float, least: float, most: int
) -> tuple[Tensor, Tensor]:
    most = min(most, len(flat))
    positions, values = torch.empty(most, dtype=torch.int64), torch.empty(most, dtype=torch.float32)
    count = torch.empty((), dtype=torch.int64)
    loop = function("select_above", *[Pointer] * 3, Float, Length, Float, Length, *[Pointer] * 3)
    results = (positions.data_ptr(), values.data_ptr(), count.data_ptr())
    if loop(at(flat, 0), at(g, 0), at(e, 0), decay, len(flat), least, most, *results):
        raise MemoryError("there is no memory left to select in")
    return positions[: int(count)], values[: int(count)]


def select_chunks(flat: Tensor, chunks: Chunks) -> tuple[Tensor, Tensor]:
    """See `select_chunks` in torch.py."""
    check_flat(len(flat), flat)
    return _select_chunks(flat, None, None, 0.0, chunks)


def add_and_select_chunks(g: Tensor, e: Tensor, decay: float, out: Tensor, chunks: Chunks) -> tuple[Tensor, Tensor]:
    """See `add_and_select_chunks` in torch.py."""
    check_flat(len(out), g, e, out, dtype=torch.float32)
    if len(chunks.spans) == 0 or chunks.spans[0][0] != 0:
        raise ValueError("chunks must begin with the first element")
    increment_version(out)
    return _select_chunks(out, g, e, decay, chunks)


def _select_chunks(
    flat: Tensor, g: Tensor | None, e: Tensor | None, decay: float, chunks: Chunks
) -> tuple[Tensor, Tensor]:
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
