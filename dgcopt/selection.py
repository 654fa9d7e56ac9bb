"""Which coordinates are sent: the exact k largest magnitudes of every tensor of a flat bucket."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from .buckets import BLOCK, Segment

__all__ = ["count_of", "largest"]


def count_of(ratio: float, numel: int) -> int:
    """k = ceil(ratio * n), the number of coordinates that a tensor of `numel` elements sends."""
    return min(numel, math.ceil(ratio * numel))


def largest(flat: Tensor, maxima: Tensor, segments: Sequence[Segment], ratio: float) -> Tensor:
    """Positions of the `count_of(ratio, n)` largest magnitudes of every segment of `flat`, exactly.

    `maxima` are those of its blocks (`block_maxima`).

    The k-th largest block maximum is a lower bound of the k-th largest magnitude, since k blocks each hold one
    that large; so only the few blocks whose maximum reaches the bound can hold what is selected (the delegates of
    Gaihre et al., "Dr. Top-k", SC'21). Among equal magnitudes any may be taken. NaN counts as largest.

    Returns int64 positions in `flat`, ascending within each segment.
    """
    chosen = [_largest_of(flat, maxima, segment, count_of(ratio, segment.numel)) for segment in segments]
    return torch.cat(chosen)


def _largest_of(flat: Tensor, maxima: Tensor, segment: Segment, k: int) -> Tensor:
    first, blocks = segment.start // BLOCK, -(-segment.numel // BLOCK)
    if k == segment.numel:
        return torch.arange(segment.start, segment.stop, device=flat.device)
    if k >= blocks:  # every block may hold a selected element: the bound says nothing
        magnitudes = flat[segment.start : segment.stop].abs()
        return magnitudes.topk(k, sorted=False).indices.sort().values + segment.start
    of_segment = maxima[first : first + blocks]
    bound = of_segment.topk(k, sorted=False).values.amin()
    candidates = (~(of_segment < bound)).nonzero().squeeze(1) + first
    magnitudes = flat.view(-1, BLOCK)[candidates].abs()
    if segment.numel % BLOCK:  # the gap behind the last element is nobody's, and must lose against zeros too
        positions = candidates.unsqueeze(1) * BLOCK + torch.arange(BLOCK, device=flat.device)
        magnitudes.masked_fill_(positions >= segment.stop, -1)
    within = (~(magnitudes < bound)).view(-1).nonzero().squeeze(1)  # k, and hardly any more
    if len(within) > k:
        within = within[magnitudes.view(-1)[within].topk(k, sorted=False).indices].sort().values
    return candidates[within // BLOCK] * BLOCK + within % BLOCK
