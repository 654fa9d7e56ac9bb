"""Exact selection of the largest magnitudes, in Triton: in a fixed number of passes, without a readback."""

from __future__ import annotations

from collections.abc import Callable

import torch
import triton
import triton.language as tl
from torch import Tensor
from torch.autograd.graph import increment_version

from ..blocks import BLOCK
from ..triton.floats import UNFUSED, magnitudes
from ..triton.lengths import blocks_of, check_length
from .groups import Chunks, Groups, Search

__all__ = ["add_and_select_above", "add_and_select_chunks", "select", "select_above", "select_ahead", "select_chunks"]


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
    """See `select` in torch.py."""
    check_length(blocks_of(flat), maxima)
    check_length(groups.stop, flat)
    lengths = groups.search.lengths
    blocks = _search(maxima, maxima, lengths, groups.search.of_blocks, block=0, held=True)
    return _search(flat, blocks, lengths, groups.search.of_elements, block=BLOCK, held=True)


def select_ahead(rows_of: Callable[[Tensor], Tensor], maxima: Tensor, groups: Groups) -> tuple[Tensor, Tensor]:
    """See `select_ahead` in torch.py."""
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


_SIZE = 2048
"""Elements that one program works on."""


@triton.jit
def _add_and_count(g, e, decay, out, numel, least, counts, ADDS: tl.constexpr, SIZE: tl.constexpr):
    at = tl.program_id(0).to(tl.int64) * SIZE + tl.arange(0, SIZE)
    v = tl.load(g + at, mask=at < numel, other=0)
    if ADDS:
        v = tl.fma(tl.load(e + at, mask=at < numel, other=0), tl.full(at.shape, decay, tl.float32), v)
        tl.store(out + at, v, mask=at < numel)
    tl.store(counts + tl.program_id(0), tl.sum(((at < numel) & (tl.abs(v) >= least)).to(tl.int32), 0))


@triton.jit
def _write(flat, numel, least, counts, up_to, positions, values, SIZE: tl.constexpr):
    at = tl.program_id(0).to(tl.int64) * SIZE + tl.arange(0, SIZE)
    v = tl.load(flat + at, mask=at < numel, other=0)
    reach = (at < numel) & (tl.abs(v) >= least)
    before = tl.load(up_to + tl.program_id(0)) - tl.load(counts + tl.program_id(0))
    to = before + tl.cumsum(reach.to(tl.int32), 0) - 1
    tl.store(positions + to, at, mask=reach)
    tl.store(values + to, v, mask=reach)


def select_above(flat: Tensor, least: float, most: int) -> tuple[Tensor, Tensor]:
    """See `select_above` in torch.py."""
    return _select_above(flat, flat, 0.0, flat, least, most, adds=False)


def add_and_select_above(
    g: Tensor, e: Tensor, decay: float, out: Tensor, least: float, most: int
) -> tuple[Tensor, Tensor]:
    """See `add_and_select_above` in torch.py."""
    check_length(len(out), g, e)
    increment_version(out)
    return _select_above(g, e, decay, out, least, most, adds=True)


def _select_above(
    g: Tensor, e: Tensor, decay: float, out: Tensor, least: float, most: int, adds: bool
) -> tuple[Tensor, Tensor]:
    tiles = triton.cdiv(len(out), _SIZE)
    counts = torch.empty(tiles, dtype=torch.int32, device=out.device)
    if tiles:
        summed = (g, e, float(decay), out, len(out), float(least), counts)
        _add_and_count[(tiles,)](*summed, ADDS=adds, SIZE=_SIZE, **UNFUSED)
    number = int(counts.sum())
    positions, values = torch.empty(number, dtype=torch.int64, device=out.device), out.new_empty(number)
    if number:
        operands = (out, len(out), float(least), counts, counts.cumsum(0), positions, values)
        _write[(tiles,)](*operands, SIZE=_SIZE, **UNFUSED)
    if number <= most:
        return positions, values
    chosen = largest(values, most)
    return positions.index_select(0, chosen), values.index_select(0, chosen)


_PER_WARP = 512
"""Elements of a chunk per warp: twice as many do not fit into its registers."""


@triton.jit
def _select_chunk(
    g, e, decay, out, table, number, positions, values, ADDS: tl.constexpr, BITS: tl.constexpr, WIDTH: tl.constexpr
):
    mine = table + tl.program_id(0)
    start, stop, end = tl.load(mine), tl.load(mine + number), tl.load(mine + 2 * number)
    wanted, before = tl.load(mine + 3 * number).to(tl.int32), tl.load(mine + 4 * number)
    at, length = tl.arange(0, WIDTH), (stop - start).to(tl.int32)  # int32, as registers are few
    there = at < (end - start).to(tl.int32)
    v = tl.load(g + start + at, mask=there, other=0)
    if ADDS:
        v = tl.fma(tl.load(e + start + at, mask=there, other=0), tl.full(at.shape, decay, tl.float32), v)
        tl.store(out + start + at, v, mask=there)
    sizes = tl.where(at < length, magnitudes(v), -1)
    least = tl.zeros((), tl.int32)  # the largest integer that as many as are wanted reach, from its highest bit down
    for i in tl.static_range(BITS):
        higher = least | (1 << (BITS - 1 - i))
        least = tl.where(tl.sum((sizes >= higher).to(tl.int32), 0) >= wanted, higher, least)
    above, tied = (sizes > least).to(tl.int32), (sizes == least).to(tl.int32)
    first = tl.cumsum(tied, 0) <= wanted - tl.sum(above, 0)
    chosen = (above > 0) | ((tied > 0) & first)
    to = tl.cumsum(chosen.to(tl.int32), 0) - 1
    tl.store(positions + before + to, start + at, mask=chosen)
    tl.store(values + before + to, v, mask=chosen)


def select_chunks(flat: Tensor, chunks: Chunks) -> tuple[Tensor, Tensor]:
    """See `select_chunks` in torch.py."""
    return _selected(flat, flat, 0.0, flat, chunks, adds=False)


def add_and_select_chunks(g: Tensor, e: Tensor, decay: float, out: Tensor, chunks: Chunks) -> tuple[Tensor, Tensor]:
    """See `add_and_select_chunks` in torch.py."""
    increment_version(out)
    return _selected(g, e, decay, out, chunks, adds=True)


def _selected(g: Tensor, e: Tensor, decay: float, out: Tensor, chunks: Chunks, adds: bool) -> tuple[Tensor, Tensor]:
    if len(chunks.spans):
        check_length(chunks.spans[-1][1], g, e, out)
    if adds and (len(chunks.spans) == 0 or chunks.spans[0][0] != 0):
        raise ValueError("chunks must begin with the first element")
    positions = torch.empty(chunks.count, dtype=torch.int64, device=out.device)
    values = out.new_empty(chunks.count)
    table, widest = chunks.placed(len(out))
    if len(chunks.spans):
        width = triton.next_power_of_2(widest)
        warps = min(max(4, width // _PER_WARP), 32)
        modes = {"ADDS": adds, "BITS": 8 * out.element_size() - 1, "WIDTH": width, "num_warps": warps}
        operands = (g, e, float(decay), out, table, len(chunks.spans), positions, values)
        _select_chunk[(len(chunks.spans),)](*operands, **modes, **UNFUSED)
    return positions, values
