"""The largest magnitudes, in C."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from .. import torch as specification
from ..blocks import BLOCK
from ..torch import Groups
from .library import FLOATS, Length, Pointer, at, check_flat, function, shared

__all__ = ["block_maxima", "candidate_blocks", "largest_first", "select", "select_ahead"]


def block_maxima(flat: Tensor, out: Tensor | None = None) -> Tensor:
    """See `dgcopt.kernels.torch.block_maxima`."""
    check_flat(flat.numel() // BLOCK * BLOCK, flat)
    maxima = torch.empty(flat.numel() // BLOCK, dtype=flat.dtype) if out is None else out
    check_flat(flat.numel() // BLOCK, maxima, dtype=flat.dtype)
    loop = function(f"block_maxima_{FLOATS[flat.dtype]}", Pointer, Length, Pointer)

    def span(start: int, stop: int) -> None:
        loop(at(flat, start), stop - start, at(maxima, start // BLOCK))

    shared(span, flat.numel())
    return maxima


def select(flat: Tensor, maxima: Tensor, groups: Groups) -> Tensor:
    """See `dgcopt.kernels.torch.select`."""
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
    """See `dgcopt.kernels.torch.candidate_blocks`."""
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
    """See `dgcopt.kernels.torch.select_ahead`."""
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
    """See `dgcopt.kernels.torch.largest_first`: mostly all come first, and nothing has to be sorted."""
    if int(number) < len(values):
        return specification.largest_first(values, number)
    return torch.arange(len(values)), torch.ones(len(values), dtype=torch.bool)
