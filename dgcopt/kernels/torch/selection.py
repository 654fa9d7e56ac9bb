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

_DIGITS = 6  # bits of the mantissa that a bin tells apart: magnitudes in it differ by 1.6% at most
_DEPTH = 1024  # bins of a group, from its largest magnitude down: 16 powers of two


_TILE = 2048  # elements that a program on a GPU works on


@dataclass(frozen=True)
class Search:
    """What kernels on a GPU search, of each group: in tiles, so many elements.

    Attributes: `count`, how many are selected of all groups; `wanted`, of each; `firsts`, `[2, groups]`, each group's
    first tile, and the elements that are selected before its own; `tiles`, `[3, tiles]`: the group, from where on and
    up to where; `tile`, how many elements one has at most. int64, on the device.
    """

    count: int
    wanted: Tensor
    firsts: Tensor
    tiles: Tensor
    tile: int

    @staticmethod
    def of(spans: Sequence[tuple[int, int]], counts: Sequence[int], device: torch.device) -> Search:
        """A search for so many elements of each span."""
        cuts = [[*range(start, stop, _TILE), stop] for start, stop in spans]
        tiles = [(i, *ends) for i, ends_of in enumerate(cuts) for ends in itertools.pairwise(ends_of)]
        firsts = [sum(map(len, cuts[:i])) - i for i in range(len(cuts))]
        before = list(itertools.accumulate(counts, initial=0))[:-1]
        table = torch.tensor(tiles).view(-1, 3).T.contiguous()
        numbers = torch.tensor(counts, device=device), torch.tensor([firsts, before], device=device)
        return Search(sum(counts), *numbers, table.to(device), _TILE)


@dataclass(frozen=True)
class Searches:
    """Those for the blocks that hold what is selected, as many as that at most, and in them for elements.

    Attributes: `lengths`, uint8, on the device: how many elements each block has.
    """

    lengths: Tensor
    of_blocks: Search
    of_elements: Search


@dataclass(frozen=True, eq=False)
class Groups:
    """Of which parts of a flat tensor how many elements are selected.

    Args:
        pieces: for each group the spans (start, stop) that it consists of, ascending; every one begins on a block
            boundary, and nothing but zeros lies between them.
        counts: how many elements of each group are selected.
        device: where the flat tensor lives.
    """

    pieces: Sequence[Sequence[tuple[int, int]]]
    counts: Sequence[int]
    device: torch.device

    @cached_property
    def spans(self) -> list[tuple[int, int, int]]:
        """Where each group begins and ends, and its count."""
        return [(spans[0][0], spans[-1][1], k) for spans, k in zip(self.pieces, self.counts, strict=True)]

    @cached_property
    def table(self) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """Starts and stops of all pieces, how many of them each group has, and its count: int64, on the CPU."""
        spans = torch.tensor([span for pieces in self.pieces for span in pieces], dtype=torch.int64).view(-1, 2)
        number, counts = [len(pieces) for pieces in self.pieces], list(self.counts)
        return spans[:, 0].contiguous(), spans[:, 1].contiguous(), torch.tensor(number), torch.tensor(counts)

    @property
    def stop(self) -> int:
        """Where the last one ends."""
        return max((stop for _, stop, _ in self.spans), default=0)

    @cached_property
    def search(self) -> Searches:
        """What kernels on a GPU search."""
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
        """The same elements where only some blocks of each piece are left, and follow one another: see `reaching`."""
        _, stops, _, _ = self.table
        ends, there = numbers.cumsum(0), numbers > 0
        last = blocks[(ends - 1)[there].to(blocks.device)].cpu()
        missing = torch.zeros_like(stops)
        missing[there] = ((last + 1) * BLOCK - stops[there]).clamp(min=0)  # where the last one is not full
        spans = list(zip(((ends - numbers) * BLOCK).tolist(), (ends * BLOCK - missing).tolist(), strict=True))
        cuts = [0, *itertools.accumulate(map(len, self.pieces))]
        return Groups([spans[a:b] for a, b in itertools.pairwise(cuts)], self.counts, self.device)

    @cached_property
    def _blocks(self) -> list[int]:
        return [-(-(stop - start) // BLOCK) for start, stop, _ in self.spans]

    @cached_property
    def wanted(self) -> Tensor:
        """The counts; 0 for groups of which every block may hold a selected element, where blocks say nothing."""
        counts = [k if k < n else 0 for k, n in zip(self.counts, self._blocks, strict=True)]
        return torch.tensor(counts, device=self.device)

    @cached_property
    def whole(self) -> list[int]:
        """The groups in which blocks say nothing."""
        return [i for i, (k, n) in enumerate(zip(self.counts, self._blocks, strict=True)) if k >= n]

    @cached_property
    def place(self) -> Tensor:
        """The group of each block."""
        places = torch.arange(len(self.spans), dtype=torch.int32, device=self.device)
        return places.repeat_interleave(torch.tensor(self._blocks, device=self.device))


def block_maxima(flat: Tensor, out: Tensor | None = None) -> Tensor:
    """The largest magnitude of each block of 64. Shape `[numel / 64]`; NaN where a block holds one.

    The largest integers of rows are found several times faster than the largest floats.
    """
    maxima = torch.empty(flat.numel() // BLOCK, dtype=flat.dtype, device=flat.device) if out is None else out
    bits = bits_of(flat)
    torch.amax((bits & torch.iinfo(bits.dtype).max).view(-1, BLOCK), 1, out=bits_of(maxima))
    return maxima


def select(flat: Tensor, maxima: Tensor, groups: Groups) -> Tensor:
    """Positions of each group's largest magnitudes in `flat`, whose `block_maxima` are `maxima`.

    Of equal magnitudes those that come first are taken. NaN counts as largest. Returns int64, ascending.

    The k-th largest block maximum is a lower bound of the k-th largest magnitude, since k blocks each hold one that
    large; so only the few blocks whose maximum reaches the bound can hold what is selected (the delegates of Gaihre
    et al., "Dr. Top-k", SC'21). All groups are worked on at once: a histogram of each one's block maxima gives the
    bin of the bound, a histogram of the candidates' magnitudes the bin of the k-th, and only within that are
    magnitudes sorted.
    """
    chosen = [_of_whole(flat, groups, group) for group in groups.whole]
    if len(groups.whole) < len(groups.spans):
        codes = bits_of(flat)
        mantissa = 1 - math.frexp(torch.finfo(flat.dtype).eps)[1]  # so many of its bits
        shift = mantissa - _DIGITS
        bins = bits_of(maxima) >> shift
        unreachable = (torch.iinfo(codes.dtype).max >> shift) + 1
        cuts = _cut(bins, groups.place, groups.wanted)
        cuts[groups.wanted == 0] = unreachable
        too_deep = cuts.eq(0).nonzero().squeeze(1)  # the lowest bin there is says nothing
        cuts[too_deep] = unreachable
        chosen += [_of_whole(flat, groups, group) for group in too_deep.tolist()]
        chosen.append(_of_candidates(codes, bins, cuts, shift, groups))
    return chosen[0] if len(chosen) == 1 else torch.cat(chosen).sort().values


def candidate_blocks(maxima: Tensor, groups: Groups) -> tuple[Tensor, Tensor]:
    """The blocks that can hold what is selected, by their `block_maxima`, so that the others need not be made.

    Those of each group whose maximum reaches its k-th largest; all where k is their number or more. Returns numbers of
    blocks, int64, ascending, and how many they are of each piece, int64, on the CPU.
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
    """What `select` will select of a tensor that is not there yet; and the values.

    `rows_of` makes the blocks of those numbers (int64, ascending) of it, `[blocks, 64]`; only a few are asked for.
    """
    blocks, numbers = candidate_blocks(maxima, groups)
    rows = rows_of(blocks).view(-1)
    chosen = select(rows, maxima.index_select(0, blocks), groups.among(blocks, numbers))
    return blocks.index_select(0, chosen // BLOCK) * BLOCK + chosen % BLOCK, rows.index_select(0, chosen)


def largest_first(values: Tensor, number: Tensor) -> tuple[Tensor, Tensor]:
    """The places of all values, first those of the `number` (int64, `[1]`, on the device) largest magnitudes.

    They ascend, and so do the others. Of equal magnitudes those that come first are taken. Returns int64 places, and
    bool, which of them are of those that come first.
    """
    number_of_each = torch.arange(len(values), device=values.device)
    down = values.abs().argsort(descending=True, stable=True)
    left = torch.empty_like(number_of_each).scatter_(0, down, number_of_each) >= number
    return left.to(torch.uint8).argsort(stable=True), number_of_each < number


def _of_whole(flat: Tensor, groups: Groups, group: int) -> Tensor:
    """The largest of a group, by looking at every element."""
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
    """What the blocks hold whose maximum reaches the bound, but for what is too many."""
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
    """Marks the `wanted` largest codes of each place, which ascends."""
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
    """The highest bin of each place that at least `wanted` of its elements reach; 0 where it lies too deep."""
    top = torch.zeros(len(wanted), dtype=bins.dtype, device=bins.device)
    top = top.scatter_reduce(0, place.long(), bins, "amax")
    depth = (top.index_select(0, place) - bins).clamp_(max=_DEPTH - 1)
    counts = torch.bincount(place * _DEPTH + depth, minlength=len(wanted) * _DEPTH).view(-1, _DEPTH).cumsum(1)
    cut = (counts < wanted.unsqueeze(1)).sum(1)
    return torch.where(cut < _DEPTH - 1, top - cut, 0).clamp_(min=0)


def _where(mask: Tensor) -> Tensor:
    """Positions of true elements, as `nonzero` finds them, but eight at a time where they are few."""
    padded = torch.nn.functional.pad(mask, (0, -len(mask) % 8)).view(-1, 8)
    words = padded.view(torch.int64).view(-1).nonzero().squeeze(1)
    word, byte = padded.index_select(0, words).nonzero().unbind(1)
    return words.index_select(0, word) * 8 + byte
