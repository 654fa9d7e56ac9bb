"""The largest magnitudes of groups, of chunks, or above a threshold: exact selection."""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
from torch import Tensor

from ..blocks import BLOCK, bits_of
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

_DIGITS = 6  # bits of the mantissa in a bin's number: magnitudes in a bin differ by at most 1.6%
_DEPTH = 1024  # bins of a group, from its largest magnitude down: 16 powers of two


def select(flat: Tensor, maxima: Tensor, groups: Groups) -> Tensor:
    """Return the positions of each group's largest magnitudes in `flat`, given its `block_maxima`.

    Of equal magnitudes the first are selected. NaN counts as largest. Returns int64, ascending.

    The k-th largest block maximum is a lower bound of the k-th largest magnitude, since k blocks each hold one that
    large; so only the few blocks with a maximum above the bound can hold selected elements (the delegates of Gaihre et
    al., "Dr. Top-k", SC'21). All groups are searched at once: a histogram of each group's block maxima gives the bin of
    the bound, a histogram of the candidates' magnitudes the bin of the k-th, and only in that bin magnitudes are
    sorted.
    """
    chosen = [_of_whole(flat, groups, group) for group in groups.whole]
    if len(groups.whole) < len(groups.spans):
        codes = bits_of(flat)
        mantissa = 1 - math.frexp(torch.finfo(flat.dtype).eps)[1]  # number of its bits
        shift = mantissa - _DIGITS
        bins = bits_of(maxima) >> shift
        unreachable = (torch.iinfo(codes.dtype).max >> shift) + 1
        cuts = _cut(bins, groups.place, groups.wanted)
        cuts[groups.wanted == 0] = unreachable
        too_deep = cuts.eq(0).nonzero().squeeze(1)  # the lowest bin has no lower bound
        cuts[too_deep] = unreachable
        chosen += [_of_whole(flat, groups, group) for group in too_deep.tolist()]
        chosen.append(_of_candidates(codes, bins, cuts, shift, groups))
    return chosen[0] if len(chosen) == 1 else torch.cat(chosen).sort().values


def candidate_blocks(maxima: Tensor, groups: Groups) -> tuple[Tensor, Tensor]:
    """Return the blocks that can hold selected elements, by their `block_maxima`, so that others need not be computed.

    A group's blocks with the k largest maxima, of equal ones the first; all if it has at most k blocks. Returns numbers
    of blocks, int64, ascending, and their count in each piece, int64, on the CPU.
    """
    starts, stops, pieces, counts = groups.table
    number = -(-(stops - starts) // BLOCK)  # blocks of each piece
    of_piece = torch.arange(len(starts)).repeat_interleave(number)
    of_group = torch.arange(len(counts)).repeat_interleave(pieces)[of_piece]
    own = starts[of_piece] // BLOCK + torch.arange(len(of_piece)) - (number.cumsum(0) - number)[of_piece]
    sizes = torch.bincount(of_group, minlength=len(counts))
    own, of_group, of_piece = (tensor.to(maxima.device) for tensor in (own, of_group, of_piece))
    codes = bits_of(maxima).index_select(0, own)
    down = codes.argsort(descending=True, stable=True)
    down = down[of_group[down].argsort(stable=True)]  # of each group, from its largest
    ends = (sizes.cumsum(0) - sizes + counts).to(maxima.device)
    chosen = torch.zeros_like(codes, dtype=torch.bool)
    chosen[down[torch.arange(len(down), device=maxima.device) < ends[of_group[down]]]] = True
    return own[chosen], torch.bincount(of_piece[chosen], minlength=len(starts)).cpu()


def select_ahead(rows_of: Callable[[Tensor], Tensor], maxima: Tensor, groups: Groups) -> tuple[Tensor, Tensor]:
    """Return the positions and values that `select` would return for a tensor that is not computed yet.

    `rows_of` computes its blocks of given numbers (int64, ascending), `[blocks, 64]`; only a few are needed.
    """
    blocks, numbers = candidate_blocks(maxima, groups)
    rows = rows_of(blocks).view(-1)
    chosen = select(rows, maxima.index_select(0, blocks), groups.among(blocks, numbers))
    return blocks.index_select(0, chosen // BLOCK) * BLOCK + chosen % BLOCK, rows.index_select(0, chosen)


def largest_first(values: Tensor, number: Tensor) -> tuple[Tensor, Tensor]:
    """Return the places of all values, first those of the `number` (int64, `[1]`, on the device) largest magnitudes.

    Both parts ascend. Of equal magnitudes the first are taken. Returns int64 places, and a bool mask of the first
    part.
    """
    number_of_each = torch.arange(len(values), device=values.device)
    down = values.abs().argsort(descending=True, stable=True)
    left = torch.empty_like(number_of_each).scatter_(0, down, number_of_each) >= number
    return left.to(torch.uint8).argsort(stable=True), number_of_each < number


def _of_whole(flat: Tensor, groups: Groups, group: int) -> Tensor:
    """Return the largest elements of a group by a search of all elements."""
    positions = [torch.arange(start, stop, device=flat.device) for start, stop in groups.pieces[group]]
    owned, k = torch.cat(positions), groups.counts[group]
    if k == len(owned):
        return owned
    codes = bits_of(flat).index_select(0, owned) & torch.iinfo(bits_of(flat).dtype).max
    least = codes.topk(k, sorted=False).values.amin()
    above = codes > least
    ties = (codes == least).nonzero().squeeze(1)[: k - int(above.sum())]
    above[ties] = True
    return owned[above]


def _of_candidates(codes: Tensor, bins: Tensor, cuts: Tensor, shift: int, groups: Groups) -> Tensor:
    """Return the selected elements of blocks with a maximum above the bound, exactly as many as wanted."""
    candidates = _where(bins >= cuts.to(bins.dtype).index_select(0, groups.place))
    rows = codes.view(-1, BLOCK).index_select(0, candidates)
    rows &= torch.iinfo(codes.dtype).max  # without the sign
    place = groups.place.index_select(0, candidates)
    least = (cuts << shift).to(codes.dtype).index_select(0, place)
    within = _where((rows >= least.unsqueeze(1)).view(-1))
    row = within // BLOCK
    positions = candidates.index_select(0, row) * BLOCK + within % BLOCK
    found, place = rows.view(-1).index_select(0, within), place.index_select(0, row)
    return positions[_exactly(found, place, groups.wanted, shift)]


def _exactly(codes: Tensor, place: Tensor, wanted: Tensor, shift: int) -> Tensor:
    """Return a mask of the `wanted` largest codes of each place; `place` ascends."""
    bins = codes >> shift
    cut = _cut(bins, place, wanted).index_select(0, place)
    chosen, last = bins > cut, _where(bins == cut)
    missing = wanted - torch.bincount(place[chosen], minlength=len(wanted))
    # by place, within each from the largest down, and equal ones by position
    last = last[codes[last].argsort(descending=True, stable=True)]
    last = last[place[last].argsort(stable=True)]
    there = torch.bincount(place[last], minlength=len(wanted))
    number = torch.arange(len(last), device=last.device) - (there.cumsum(0) - there)[place[last]]
    chosen[last[number < missing[place[last]]]] = True
    return chosen


def _cut(bins: Tensor, place: Tensor, wanted: Tensor) -> Tensor:
    """Return the highest bin of each place that at least `wanted` of its elements reach; 0 if it lies too deep."""
    top = torch.zeros(len(wanted), dtype=bins.dtype, device=bins.device)
    top = top.scatter_reduce(0, place.long(), bins, "amax")
    depth = (top.index_select(0, place) - bins).clamp_(max=_DEPTH - 1)
    counts = torch.bincount(place * _DEPTH + depth, minlength=len(wanted) * _DEPTH).view(-1, _DEPTH).cumsum(1)
    cut = (counts < wanted.unsqueeze(1)).sum(1)
    return torch.where(cut < _DEPTH - 1, top - cut, 0).clamp_(min=0)


def _where(mask: Tensor) -> Tensor:
    """Return positions of true elements, as `nonzero`, but eight at a time, for masks with few."""
    padded = torch.nn.functional.pad(mask, (0, -len(mask) % 8)).view(-1, 8)
    words = padded.view(torch.int64).view(-1).nonzero().squeeze(1)
    word, byte = padded.index_select(0, words).nonzero().unbind(1)
    return words.index_select(0, word) * 8 + byte


def select_above(flat: Tensor, least: float, most: int) -> tuple[Tensor, Tensor]:
    """Return positions (int64, ascending) and values of magnitudes of at least `least` > 0; NaN is not selected.

    Of more than `most` the largest, and of equal ones those that come first.
    """
    positions = (flat.abs() >= torch.tensor(least, dtype=flat.dtype)).nonzero().squeeze(1)
    if len(positions) <= most:
        return positions, flat.index_select(0, positions)
    codes = bits_of(flat).index_select(0, positions)
    codes &= torch.iinfo(codes.dtype).max
    cut = codes.topk(most, sorted=False).values.amin() if most else codes.amax() + 1
    chosen = codes > cut
    ties = (codes == cut).nonzero().squeeze(1)[: most - int(chosen.sum())]
    chosen[ties] = True
    positions = positions[chosen]
    return positions, flat.index_select(0, positions)


def add_and_select_above(
    g: Tensor, e: Tensor, decay: float, out: Tensor, least: float, most: int
) -> tuple[Tensor, Tensor]:
    """Write g + decay * e to `out`, of the dtype of e; and select from that."""
    return select_above(torch.add(g, e, alpha=decay, out=out), least, most)


def select_chunks(flat: Tensor, chunks: Chunks) -> tuple[Tensor, Tensor]:
    """Return positions (int64, ascending) and values of each chunk's largest magnitudes in `flat`, with zero gaps.

    Of equal magnitudes those that come first are taken. NaN counts as largest.
    """
    sizes = bits_of(flat) & torch.iinfo(bits_of(flat).dtype).max
    padded = torch.nn.functional.pad(sizes, (0, BLOCK), value=-1).view(-1, BLOCK)  # by a block that is never chosen
    chosen = []
    for blocks, count, most in chunks.by_width:
        rows = padded[blocks].flatten(1)
        if flat.element_size() == 8:
            columns = rows.sort(descending=True, stable=True).indices[:, :most]
        else:  # several times faster, once no two are equal
            later = torch.arange(rows.shape[1], device=flat.device)
            columns = (rows.long() * rows.shape[1] - later).topk(most).indices
        positions = blocks.gather(1, columns // BLOCK) * BLOCK + columns % BLOCK
        chosen.append(positions[torch.arange(most, device=flat.device) < count])
    positions = torch.cat(chosen).sort().values
    return positions, flat.index_select(0, positions)


def add_and_select_chunks(g: Tensor, e: Tensor, decay: float, out: Tensor, chunks: Chunks) -> tuple[Tensor, Tensor]:
    """Write g + decay * e to `out`, of the dtype of e, all of which lies in chunks or gaps; and select from that."""
    return select_chunks(torch.add(g, e, alpha=decay, out=out), chunks)
