"""The largest magnitudes, exactly, in Triton: in a fixed number of passes, as nothing is asked of the device.

To select k elements of a group, its k blocks with the largest maxima are enough (of equal ones the first k): every
other block is smaller than k elements, or equal and further behind. So blocks by their maxima, and then elements in
them, are found by the same search, each in memory of known length.

The search finds the least selected magnitude of a group digit by digit, from the highest, eight bits at a time, by a
histogram of each digit over all tiles of the group at once. Then it counts the larger and the equal elements in each
tile, and writes the positions.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
import triton
import triton.language as tl
from torch import Tensor

from ..blocks import BLOCK
from ..torch import Groups, Search
from .floats import UNFUSED, magnitudes
from .lengths import blocks_of, check_length

__all__ = ["select", "select_ahead"]


@triton.jit
def _keys(x, lengths, blocks, start, stop, HELD: tl.constexpr, BLOCK: tl.constexpr, TILE: tl.constexpr):
    """Return positions of a tile's elements, and their magnitudes plus one, int64; 0 for elements not to select.

    Without BLOCK, elements are the maxima of blocks. Otherwise they are elements of some `blocks`, in rows of `x`, or
    HELD at their original positions.
    """
    at = start + tl.arange(0, TILE)
    if BLOCK == 0:
        place = at
        owned = (at < stop) & (tl.load(lengths + at, mask=at < stop, other=0) > 0)
    else:
        block = tl.load(blocks + at // BLOCK, mask=at < stop, other=0)
        owned = (at < stop) & (at % BLOCK < tl.load(lengths + block, mask=at < stop, other=0))
        place = block * BLOCK + at % BLOCK if HELD else at
    keys = tl.where(owned, magnitudes(tl.load(x + place, mask=owned, other=0)).to(tl.int64) + 1, 0)
    return place, keys, at < stop


@triton.jit
def _digits(counts, group, groups, wanted, DIGITS: tl.constexpr):
    """Return the highest digits of a group's least selected magnitude, and the number still to select among them."""
    number = tl.arange(0, 256)
    digits, missing = tl.zeros((), tl.int64), tl.load(wanted + group)
    for i in tl.static_range(DIGITS):
        here = tl.load(counts + (i * groups + group) * 256 + number).to(tl.int64)
        reach = tl.sum(here, 0) - tl.cumsum(here, 0) + here  # number of elements with this digit or a larger one
        digit = tl.sum((reach >= missing).to(tl.int64), 0) - 1
        missing -= tl.sum(tl.where(number > digit, here, 0), 0)
        digits = digits * 256 + digit
    return digits, missing


@triton.jit
def _count_digits(
    x,
    lengths,
    blocks,
    tiles,
    number,
    wanted,
    groups,
    counts,
    DIGITS: tl.constexpr,
    LEFT: tl.constexpr,
    HELD: tl.constexpr,
    BLOCK: tl.constexpr,
    TILE: tl.constexpr,
):
    mine = tiles + tl.program_id(0)
    group, start, stop = tl.load(mine), tl.load(mine + number), tl.load(mine + 2 * number)
    _, keys, there = _keys(x, lengths, blocks, start, stop, HELD, BLOCK, TILE)
    digits, _ = _digits(counts, group, groups, wanted, DIGITS)
    there = there & ((keys >> (8 * LEFT)) == digits)
    found = tl.histogram(((keys >> (8 * LEFT - 8)) & 255).to(tl.int32), 256, mask=there)
    to = counts + (DIGITS * groups + group) * 256 + tl.arange(0, 256)
    tl.atomic_add(to, found, mask=found > 0)


@triton.jit
def _count_chosen(
    x,
    lengths,
    blocks,
    tiles,
    number,
    wanted,
    groups,
    counts,
    chosen,
    DIGITS: tl.constexpr,
    HELD: tl.constexpr,
    BLOCK: tl.constexpr,
    TILE: tl.constexpr,
):
    mine = tiles + tl.program_id(0)
    group, start, stop = tl.load(mine), tl.load(mine + number), tl.load(mine + 2 * number)
    _, keys, there = _keys(x, lengths, blocks, start, stop, HELD, BLOCK, TILE)
    least, _ = _digits(counts, group, groups, wanted, DIGITS)
    tl.store(chosen + tl.program_id(0), tl.sum((there & (keys > least)).to(tl.int32), 0))
    tl.store(chosen + number + tl.program_id(0), tl.sum((there & (keys == least)).to(tl.int32), 0))


@triton.jit
def _write_chosen(
    x,
    lengths,
    blocks,
    tiles,
    number,
    wanted,
    groups,
    counts,
    chosen,
    up_to,
    firsts,
    positions,
    DIGITS: tl.constexpr,
    HELD: tl.constexpr,
    BLOCK: tl.constexpr,
    TILE: tl.constexpr,
):
    tile = tl.program_id(0)
    mine = tiles + tile
    group, start, stop = tl.load(mine), tl.load(mine + number), tl.load(mine + 2 * number)
    place, keys, there = _keys(x, lengths, blocks, start, stop, HELD, BLOCK, TILE)
    least, missing = _digits(counts, group, groups, wanted, DIGITS)
    first = tl.load(firsts + group)  # first tile of the group; counts of tiles from it to this one come before
    larger = tl.load(up_to + tile) - tl.load(chosen + tile)
    larger -= tl.load(up_to + first) - tl.load(chosen + first)
    up_to += number
    chosen += number
    equal = tl.load(up_to + tile) - tl.load(chosen + tile)
    equal -= tl.load(up_to + first) - tl.load(chosen + first)
    ties = there & (keys == least)
    taken = (there & (keys > least)) | (ties & (equal + tl.cumsum(ties.to(tl.int32), 0) <= missing))
    to = tl.load(firsts + groups + group) + larger + tl.minimum(equal, missing) + tl.cumsum(taken.to(tl.int32), 0) - 1
    tl.store(positions + to, place, mask=taken)


def select(flat: Tensor, maxima: Tensor, groups: Groups) -> Tensor:
    """See `dgcopt.kernels.torch.select`."""
    check_length(blocks_of(flat), maxima)
    check_length(groups.stop, flat)
    lengths = groups.search.lengths
    blocks = _search(maxima, maxima, lengths, groups.search.of_blocks, block=0, held=True)
    return _search(flat, blocks, lengths, groups.search.of_elements, block=BLOCK, held=True)


def select_ahead(rows_of: Callable[[Tensor], Tensor], maxima: Tensor, groups: Groups) -> tuple[Tensor, Tensor]:
    """See `dgcopt.kernels.torch.select_ahead`."""
    check_length(-(-groups.stop // BLOCK), maxima)
    lengths = groups.search.lengths
    blocks = _search(maxima, maxima, lengths, groups.search.of_blocks, block=0, held=True)
    rows = rows_of(blocks).view(-1)
    check_length(len(blocks) * BLOCK, rows)
    chosen = _search(rows, blocks, lengths, groups.search.of_elements, block=BLOCK, held=False)
    positions = blocks.index_select(0, chosen // BLOCK) * BLOCK + chosen % BLOCK
    return positions, rows.index_select(0, chosen)


def largest(values: Tensor, count: int) -> Tensor:
    """Return positions of the largest magnitudes, of equal ones the first: int64, ascending."""
    there = torch.ones(len(values), dtype=torch.uint8, device=values.device)
    return _search(values, values, there, Search.of([(0, len(values))], [count], values.device), block=0, held=True)


def _search(x: Tensor, blocks: Tensor, lengths: Tensor, search: Search, block: int, held: bool) -> Tensor:
    """Return the places of the selected elements."""
    positions = torch.empty(search.count, dtype=torch.int64, device=x.device)
    if not search.count:
        return positions
    digits, number, count = x.element_size(), search.tiles.shape[1], len(search.wanted)
    counts = torch.zeros(digits, count, 256, dtype=torch.int32, device=x.device)
    operands = (x, lengths, blocks, search.tiles, number, search.wanted, count, counts)
    modes = {"HELD": held, "BLOCK": block, "TILE": search.tile, **UNFUSED}
    for i in range(digits):
        _count_digits[(number,)](*operands, **modes, DIGITS=i, LEFT=digits - i)
    chosen = torch.empty(2, number, dtype=torch.int32, device=x.device)
    _count_chosen[(number,)](*operands, chosen, **modes, DIGITS=digits)
    up_to = chosen.cumsum(1)
    _write_chosen[(number,)](*operands, chosen, up_to, search.firsts, positions, **modes, DIGITS=digits)
    return positions
