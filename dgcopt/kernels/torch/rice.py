"""Rice codes of ascending indices (Rice 1979)."""

from __future__ import annotations

import torch
from torch import Tensor

from .packing import pack, pack_small, unpack, unpack_small

__all__ = ["rice_measure", "rice_pack", "rice_unpack"]


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
