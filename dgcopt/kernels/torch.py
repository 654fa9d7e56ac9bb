"""The inner loops in torch: what every other implementation must equal bit for bit; it runs everywhere."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

from ..flat.segments import BLOCK, bits_of, block_maxima, chunks

__all__ = [
    "Groups",
    "Momentum",
    "accumulate",
    "advance",
    "pack",
    "pack_small",
    "rice_measure",
    "rice_pack",
    "rice_unpack",
    "select",
    "unpack",
    "unpack_small",
]

_DIGITS = 6  # bits of the mantissa that a bin tells apart: magnitudes in it differ by 1.6% at most
_DEPTH = 1024  # bins of a group, from its largest magnitude down: 16 powers of two


# -- accumulate ------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Momentum:
    """How SGD treats momentum: u' = momentum u + (1 - dampening) g adds itself to v, or g + momentum u' by Nesterov."""

    momentum: float
    dampening: float = 0.0
    nesterov: bool = False

    def of(self, g: Tensor, u: Tensor, out: Tensor | None = None) -> Tensor:
        """u', from u."""
        if self.dampening:
            wide = u.to(torch.promote_types(g.dtype, u.dtype))
            return torch.add(wide * self.momentum, g, alpha=1 - self.dampening, out=out)
        return torch.add(g, u, alpha=self.momentum, out=out)


def accumulate(
    old: Tensor,
    new: Tensor,
    u: Tensor | None,
    g: Tensor | None,
    maxima: Tensor,
    rule: Momentum | None,
    scale: float = 1.0,
    commit: bool = False,
) -> None:
    """new <- old + what g adds to v; its block maxima.

    All are flat and begin on a block boundary. `old` and `new` may be one; `maxima` has an element per block of 64,
    of their dtype. g is taken in float32 at least and multiplied by `scale` first; None counts as zero. Without a rule,
    or with momentum 0, g itself is added. With `commit` u becomes u' and g zero, else both stay.
    """
    for span in chunks(0, len(new), new.device):
        x = _scaled(g, span, old, scale)
        increment = x if rule is None or rule.momentum == 0 else _increment(x, u, span, rule, commit)
        torch.add(old[span], increment, out=new[span])
        whole = span.stop - span.stop % BLOCK
        first, last = span.start // BLOCK, whole // BLOCK
        block_maxima(new[span.start : whole], out=maxima[first:last])
        if whole < span.stop:
            maxima[last:] = block_maxima(torch.nn.functional.pad(new[whole : span.stop], (0, BLOCK - len(new) % BLOCK)))
        if commit and g is not None:
            g[span].zero_()


def advance(u: Tensor, g: Tensor | None, rule: Momentum, scale: float = 1.0) -> None:
    """u <- u', and g <- 0: what `accumulate` leaves to do without `commit`. Only where momentum is not 0."""
    for span in chunks(0, len(u), u.device):
        rule.of(_scaled(g, span, u, scale), u[span], out=u[span])
        if g is not None:
            g[span].zero_()


def _scaled(g: Tensor | None, span: slice, like: Tensor, scale: float) -> Tensor:
    """In float32 at least."""
    dtype = torch.promote_types(like.dtype if g is None else g.dtype, torch.float32)
    if g is None:
        return like.new_zeros((), dtype=dtype).expand(span.stop - span.start)
    x = g[span].to(dtype)
    return x if scale == 1 else x * scale


def _increment(x: Tensor, u: Tensor | None, span: slice, rule: Momentum, commit: bool) -> Tensor:
    assert u is not None
    rounds = commit and torch.promote_types(x.dtype, u.dtype) != u.dtype
    after = rule.of(x, u[span], out=u[span] if commit and not rounds else None)
    if rounds:  # u, but not what it adds to v
        u[span] = after
    return torch.add(x, after, alpha=rule.momentum) if rule.nesterov else after


# -- select ----------------------------------------------------------------------------------------------------------


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


# -- packing ---------------------------------------------------------------------------------------------------------


def pack(integers: Tensor, width: int) -> Tensor:
    """The low `width` (0 to 56) bits of int64 `integers`: the whole bytes of each, then the bits left over."""
    whole, rest = divmod(width, 8)
    by_bytes = integers.contiguous().view(torch.uint8).view(-1, 8)
    return torch.cat((by_bytes[:, :whole].reshape(-1), pack_small(by_bytes[:, whole] & (1 << rest) - 1, rest)))


def unpack(packed: Tensor, count: int, width: int) -> Tensor:
    """The `count` integers, int64, that `pack` wrote."""
    whole, rest = divmod(width, 8)
    by_bytes = packed.new_zeros(count, 8)
    by_bytes[:, :whole] = packed[: count * whole].view(count, whole)
    by_bytes[:, whole] = unpack_small(packed[count * whole :], count, rest)
    return by_bytes.view(torch.int64).view(-1)


def pack_small(fields: Tensor, width: int) -> Tensor:
    """uint8 `fields`, each below 2^width, in `width` (0 to 7) bits each; eight of them fill `width` bytes."""
    padded = fields.new_zeros(-(-len(fields) // 8) * 8)
    padded[: len(fields)] = fields
    words = padded.view(torch.int64)
    for gap, low, high in _folds(width):
        words = (words & low) | (words >> gap & high)
    return words.view(torch.uint8).view(-1, 8)[:, :width].reshape(-1)


def unpack_small(packed: Tensor, count: int, width: int) -> Tensor:
    """The `count` fields, uint8, that `pack_small` wrote."""
    by_bytes = packed.new_zeros(-(-count // 8), 8)
    by_bytes[:, :width] = packed[: len(by_bytes) * width].view(-1, width) if width else 0
    words = by_bytes.view(torch.int64)
    for gap, low, high in reversed(_folds(width)):
        words = (words & low) | ((words & high) << gap)
    return words.view(torch.uint8).view(-1)[:count]


def _folds(width: int) -> list[tuple[int, int, int]]:
    """Steps that close the gaps between eight fields in a word: of pairs, of pairs of pairs, and of all.

    Each is (gap, mask of the lower half, mask of where the upper half goes).
    """
    folds = []
    for lane in (8, 16, 32):
        used = lane // 8 * width
        low = sum(((1 << used) - 1) << start for start in range(0, 64, 2 * lane))
        folds.append((lane - used, low, low << used))
    return folds


# -- Rice codes ------------------------------------------------------------------------------------------------------


def rice_measure(indices: Tensor, b: int) -> tuple[int, int]:
    """Of ascending int64 indices: the smallest gap between neighbours, and the sum of all quotients by 2^b."""
    if not len(indices):
        return 0, 0
    gaps = _gaps(indices)
    smallest, quotients = torch.stack((gaps.amin(), (gaps >> b).sum())).tolist()
    return smallest, quotients


def rice_pack(indices: Tensor, b: int, nbytes: int) -> Tensor:
    """The gaps between ascending int64 indices, each gap g as g mod 2^b in b bits, and g div 2^b in unary.

    Returns uint8 `[nbytes]`: the whole bytes of each remainder, their other bits, the unary parts as zeros that end
    with a one, and zeros. All must fit.
    """
    packed = torch.zeros(nbytes, dtype=torch.uint8, device=indices.device)
    if len(indices):
        gaps = _gaps(indices)
        remainders = pack(gaps, b)
        start = len(remainders)
        packed[:start] = remainders
        ends = ((gaps >> b) + 1).cumsum(0) - 1
        packed[start:] = pack_small(packed.new_zeros(8 * (nbytes - start)).index_fill_(0, ends, 1), 1)
    return packed


def rice_unpack(packed: Tensor, count: int, b: int, numel: int) -> Tensor | None:
    """The `count` indices, ascending and below `numel`, that `rice_pack` wrote; None if there are others."""
    whole, rest = divmod(b, 8)
    start = count * whole + -(-count // 8) * rest
    unary = unpack_small(packed[start:], 8 * (len(packed) - start), 1)
    ends = unary.cumsum(0)
    if int(ends[-1] if len(ends) else 0) != count:
        return None
    lengths = torch.bincount(ends - unary)[:count]  # of unary parts: their bits have equally many ends before them
    indices = ((lengths - 1 << b) + unpack(packed[:start], count, b) + 1).cumsum(0) - 1
    return indices if count == 0 or int(indices[-1]) < numel else None


def _gaps(indices: Tensor) -> Tensor:
    """How many positions lie between an index and the one before it."""
    gaps = indices.clone()
    gaps[1:] -= indices[:-1] + 1
    return gaps
