"""Which coordinates are sent: the exact k largest magnitudes of every tensor of a flat bucket."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from .segments import BLOCK, Segment, bits_of

__all__ = ["Selection", "count_of"]

_DIGITS = 6  # bits of the mantissa that a bin tells apart: magnitudes in it differ by 1.6% at most
_DEPTH = 1024  # bins of a tensor, from its largest magnitude down: 16 powers of two


def count_of(ratio: float, numel: int) -> int:
    """k = ceil(ratio * n), the number of coordinates that a tensor of `numel` elements sends."""
    return min(numel, math.ceil(ratio * numel))


class Selection:
    """Selects from one bucket: of every segment, or of all together, the largest magnitudes, exactly.

    The k-th largest block maximum is a lower bound of the k-th largest magnitude, since k blocks each hold one that
    large; so only the few blocks whose maximum reaches the bound can hold what is selected (the delegates of Gaihre
    et al., "Dr. Top-k", SC'21). All segments are worked on at once: a histogram of each one's block maxima gives the
    bin of the bound, a histogram of the candidates' magnitudes the bin of the k-th, and only within that are
    magnitudes sorted.

    Args:
        segments: the tensors of the bucket.
        ratio: fraction of the elements that is selected.
        together: whether k counts for the bucket as a whole, instead of for each tensor.
    """

    def __init__(self, segments: Sequence[Segment], ratio: float, together: bool = False) -> None:
        self.ratio = ratio
        self._segments = segments
        first, last, device = segments[0], segments[-1], segments[0].param.device
        spans = [(first.start, last.stop)] if together else [(s.start, s.stop) for s in segments]
        sizes = [sum(s.numel for s in segments)] if together else [s.numel for s in segments]
        counts = [count_of(ratio, size) for size in sizes]
        blocks = [-(-(stop - start) // BLOCK) for start, stop in spans]
        self.count = sum(counts)
        """How many coordinates are selected."""
        self._spans = [(*span, k) for span, k in zip(spans, counts, strict=True)]
        # where every block may hold a selected element, blocks say nothing
        wanted = [k if k < n else 0 for k, n in zip(counts, blocks, strict=True)]
        self._whole = [span for span, k in zip(self._spans, wanted, strict=True) if not k]
        self._wanted = torch.tensor(wanted, device=device)
        places = torch.arange(len(spans), dtype=torch.int32, device=device)
        self._place = places.repeat_interleave(torch.tensor(blocks, device=device))

    def largest(self, flat: Tensor, maxima: Tensor) -> Tensor:
        """Positions of the largest magnitudes of `flat`, whose `block_maxima` are `maxima`.

        Among equal magnitudes any may be taken. NaN counts as largest. Returns int64, ascending.
        """
        chosen = [self._of_whole(flat, *span) for span in self._whole]
        if len(self._whole) < len(self._spans):
            codes = bits_of(flat)
            mantissa = 1 - math.frexp(torch.finfo(flat.dtype).eps)[1]  # so many of its bits
            shift = mantissa - _DIGITS
            bins = bits_of(maxima) >> shift
            cuts, vain = self._bound(bins, never=(torch.iinfo(codes.dtype).max >> shift) + 1)
            chosen += [self._of_whole(flat, *span) for span in vain]
            chosen.append(self._of_candidates(codes, bins, cuts, shift))
        return chosen[0] if len(chosen) == 1 else torch.cat(chosen).sort().values

    def _of_whole(self, flat: Tensor, start: int, stop: int, k: int) -> Tensor:
        """The k largest of a span, by looking at every element."""
        if k == stop - start:
            return torch.arange(start, stop, device=flat.device)
        magnitudes = flat[start:stop].abs()
        for segment in self._segments:  # gaps are nobody's, and must lose against zeros too
            if start <= segment.stop < stop:
                magnitudes[segment.stop - start :][: -segment.stop % BLOCK] = -1
        return magnitudes.topk(k, sorted=False).indices.sort().values + start

    def _bound(self, bins: Tensor, never: int) -> tuple[Tensor, list[tuple[int, int, int]]]:
        """The bin that at least k blocks of each span reach, and the spans where that is the lowest there is.

        In place of a bin that says nothing stands one that `never` is reached.
        """
        cuts = _cut(bins, self._place, self._wanted)
        cuts[self._wanted == 0] = never
        vain = cuts.eq(0).nonzero().squeeze(1)
        cuts[vain] = never
        return cuts, [self._spans[place] for place in vain.tolist()]

    def _of_candidates(self, codes: Tensor, bins: Tensor, cuts: Tensor, shift: int) -> Tensor:
        """What the blocks hold whose maximum reaches the bound, but for what is too many."""
        candidates = _where(bins >= cuts.to(bins.dtype).index_select(0, self._place))
        rows = codes.view(-1, BLOCK).index_select(0, candidates)
        rows &= torch.iinfo(codes.dtype).max  # without the sign
        place = self._place.index_select(0, candidates)
        least = (cuts << shift).to(codes.dtype).index_select(0, place)
        within = _where((rows >= least.unsqueeze(1)).view(-1))
        row = within // BLOCK
        positions = candidates.index_select(0, row) * BLOCK + within % BLOCK
        found, place = rows.view(-1).index_select(0, within), place.index_select(0, row)
        return positions[_exactly(found, place, self._wanted, shift)]


def _exactly(codes: Tensor, place: Tensor, wanted: Tensor, shift: int) -> Tensor:
    """Marks the `wanted` largest codes of each place, which ascends."""
    bins = codes >> shift
    cut = _cut(bins, place, wanted).index_select(0, place)
    chosen, last = bins > cut, _where(bins == cut)
    missing = wanted - torch.bincount(place[chosen], minlength=len(wanted))
    # by place, and within each from the largest down
    last = last[codes[last].argsort(descending=True)]
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
