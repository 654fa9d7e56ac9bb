"""The largest magnitudes, exactly."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

from ..blocks import BLOCK, bits_of

__all__ = ["Groups", "Search", "block_maxima", "candidate_blocks", "largest_first", "select", "select_ahead"]

_DIGITS = 6  # bits of the mantissa in a bin's number: magnitudes in a bin differ by at most 1.6%
_DEPTH = 1024  # bins of a group, from its largest magnitude down: 16 powers of two


_TILE = 2048  # elements per program on a GPU


@dataclass(frozen=True)
class Search:
    """A search for the largest elements of each group by kernels on a GPU, in tiles.

    Attributes: `count`, number of elements to select in all groups; `wanted`, in each; `firsts`, `[2, groups]`, each
    group's first tile, and the number of elements selected in groups before it; `tiles`, `[3, tiles]`: group, start and
    stop; `tile`, largest number of elements in a tile. int64, on the device.
    """

    count: int
    wanted: Tensor
    firsts: Tensor
    tiles: Tensor
    tile: int

    @staticmethod
    def of(spans: Sequence[tuple[int, int]], counts: Sequence[int], device: torch.device) -> Search:
        """Return the search for `counts` elements of each span."""
        cuts = [[*range(start, stop, _TILE), stop] for start, stop in spans]
        tiles = [(i, *ends) for i, ends_of in enumerate(cuts) for ends in itertools.pairwise(ends_of)]
        firsts = [sum(map(len, cuts[:i])) - i for i in range(len(cuts))]
        before = list(itertools.accumulate(counts, initial=0))[:-1]
        table = torch.tensor(tiles).view(-1, 3).T.contiguous()
        numbers = torch.tensor(counts, device=device), torch.tensor([firsts, before], device=device)
        return Search(sum(counts), *numbers, table.to(device), _TILE)


@dataclass(frozen=True)
class Searches:
    """A search for blocks with selected elements, and one for the elements in them.

    Attributes: `lengths`, uint8, on the device: the number of elements in each block.
    """

    lengths: Tensor
    of_blocks: Search
    of_elements: Search


@dataclass(frozen=True, eq=False)
class Groups:
    """Number of elements to select from each group of spans of a flat tensor.

    Args:
        pieces: for each group its spans (start, stop), ascending; each begins on a block boundary, with only zeros
            between them.
        counts: number of elements to select in each group.
        device: the device of the flat tensor.
    """

    pieces: Sequence[Sequence[tuple[int, int]]]
    counts: Sequence[int]
    device: torch.device

    @cached_property
    def spans(self) -> list[tuple[int, int, int]]:
        """Start, stop and count of each group."""
        return [(spans[0][0], spans[-1][1], k) for spans, k in zip(self.pieces, self.counts, strict=True)]

    @cached_property
    def table(self) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """Starts and stops of all pieces, and each group's number of pieces and count: int64, on the CPU."""
        spans = torch.tensor([span for pieces in self.pieces for span in pieces], dtype=torch.int64).view(-1, 2)
        number, counts = [len(pieces) for pieces in self.pieces], list(self.counts)
        return spans[:, 0].contiguous(), spans[:, 1].contiguous(), torch.tensor(number), torch.tensor(counts)

    @property
    def stop(self) -> int:
        """End of the last group."""
        return max((stop for _, stop, _ in self.spans), default=0)

    @cached_property
    def search(self) -> Searches:
        """The searches of kernels on a GPU."""
        lengths = torch.zeros(-(-self.stop // BLOCK), dtype=torch.uint8)
        number = []
        for pieces in self.pieces:
            for start, stop in pieces:
                lengths[start // BLOCK : -(-stop // BLOCK)] = BLOCK
                if stop % BLOCK:
                    lengths[stop // BLOCK] = stop % BLOCK
            number.append(sum(-(-(stop - start) // BLOCK) for start, stop in pieces))
        held = [min(k, n) for k, n in zip(self.counts, number, strict=True)]
        ends = list(itertools.accumulate(held, initial=0))
        blocks = [(start // BLOCK, -(-stop // BLOCK)) for start, stop, _ in self.spans]
        elements = [(first * BLOCK, last * BLOCK) for first, last in itertools.pairwise(ends)]
        return Searches(
            lengths.to(self.device),
            Search.of(blocks, held, self.device),
            Search.of(elements, self.counts, self.device),
        )

    def among(self, blocks: Tensor, numbers: Tensor) -> Groups:
        """Return the groups of a tensor that holds only some blocks of each piece, in order: see `candidate_blocks`."""
        _, stops, _, _ = self.table
        ends, there = numbers.cumsum(0), numbers > 0
        last = blocks[(ends - 1)[there].to(blocks.device)].cpu()
        missing = torch.zeros_like(stops)
        missing[there] = ((last + 1) * BLOCK - stops[there]).clamp(min=0)  # if the last block is not full
        spans = list(zip(((ends - numbers) * BLOCK).tolist(), (ends * BLOCK - missing).tolist(), strict=True))
        cuts = [0, *itertools.accumulate(map(len, self.pieces))]
        return Groups([spans[a:b] for a, b in itertools.pairwise(cuts)], self.counts, self.device)

    @cached_property
    def _blocks(self) -> list[int]:
        return [-(-(stop - start) // BLOCK) for start, stop, _ in self.spans]

    @cached_property
    def wanted(self) -> Tensor:
        """The counts; 0 for groups with no more blocks than elements to select, for which block maxima are no help."""
        counts = [k if k < n else 0 for k, n in zip(self.counts, self._blocks, strict=True)]
        return torch.tensor(counts, device=self.device)

    @cached_property
    def whole(self) -> list[int]:
        """The groups for which block maxima are no help."""
        return [i for i, (k, n) in enumerate(zip(self.counts, self._blocks, strict=True)) if k >= n]

    @cached_property
    def place(self) -> Tensor:
        """The group of each block."""
        places = torch.arange(len(self.spans), dtype=torch.int32, device=self.device)
        return places.repeat_interleave(torch.tensor(self._blocks, device=self.device))


def block_maxima(flat: Tensor, out: Tensor | None = None) -> Tensor:
    """Return the largest magnitude of each block of 64. Shape `[numel / 64]`; NaN for a block with NaN.

    Computed on integers, whose row maxima are several times faster than those of floats.
    """
    maxima = torch.empty(flat.numel() // BLOCK, dtype=flat.dtype, device=flat.device) if out is None else out
    bits = bits_of(flat)
    torch.amax((bits & torch.iinfo(bits.dtype).max).view(-1, BLOCK), 1, out=bits_of(maxima))
    return maxima


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

    A group's blocks with a maximum of at least its k-th largest; all if it has at most k blocks. Returns numbers of
    blocks, int64, ascending, and their count in each piece, int64, on the CPU.
    """
    starts, stops, pieces, counts = groups.table
    number = -(-(stops - starts) // BLOCK)  # blocks of each piece
    of_piece = torch.arange(len(starts)).repeat_interleave(number)
    of_group = torch.arange(len(counts)).repeat_interleave(pieces)[of_piece]
    own = starts[of_piece] // BLOCK + torch.arange(len(of_piece)) - (number.cumsum(0) - number)[of_piece]
    sizes = torch.bincount(of_group, minlength=len(counts))
    own, of_group, of_piece = (tensor.to(maxima.device) for tensor in (own, of_group, of_piece))
    codes = bits_of(maxima).index_select(0, own)
    down = codes.argsort(descending=True)
    down = codes[down[of_group[down].argsort(stable=True)]]  # of each group, from its largest
    some = ((counts > 0) & (counts < sizes)).nonzero().squeeze(1)
    least = torch.zeros(len(counts), dtype=codes.dtype, device=maxima.device)
    kth = (sizes.cumsum(0) - sizes + counts - 1)[some]
    least[some.to(maxima.device)] = down[kth.to(maxima.device)]
    chosen = (codes >= least[of_group]) & (counts > 0).to(maxima.device)[of_group]
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
