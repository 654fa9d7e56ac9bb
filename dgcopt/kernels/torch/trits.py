"""Minus one, zero or one: five in a byte, since 3^5 = 243."""

from __future__ import annotations

import torch
from torch import Tensor

from .packing import unpack_small
from .rounding import chances
from .sums import Put, by_block, finite, put

__all__ = ["PER_BYTE", "majority", "pack_trits", "put_trits", "round_trits", "unpack_trits"]

PER_BYTE = 5


def pack_trits(trits: Tensor) -> Tensor:
    """Flat int8 `trits` as uint8: with n bytes, byte i holds those at i, i + n, i + 2n, ..., the first one highest."""
    length = -(-len(trits) // PER_BYTE)
    digits = torch.zeros(PER_BYTE * length, dtype=torch.uint8, device=trits.device)
    digits[: len(trits)] = (trits + 1).to(torch.uint8)
    first, *others = digits.view(PER_BYTE, length)
    packed = first.clone()
    for digit in others:
        packed.mul_(3).add_(digit)
    return packed


def unpack_trits(packed: Tensor, count: int) -> Tensor:
    """The `count` trits, int8, that `pack_trits` wrote."""
    digits, rest = [], packed
    for _ in range(PER_BYTE):
        digits.append(rest % 3)
        rest = rest // 3
    return torch.cat(digits[::-1])[:count].to(torch.int8) - 1


def round_trits(values: Tensor, scales: Tensor, place: Tensor, key: int) -> Tensor:
    """The sign of each value with probability |v| / `scales[place[b]]`, else zero: as `pack_trits` has it."""
    v = finite(values)
    kept = chances(len(v), key, v.device) * by_block(scales, place) < v.abs()
    return pack_trits((v.sign() * kept).to(torch.int8))


def put_trits(packed: Tensor, scales: Tensor, place: Tensor, out: Tensor, how: Put) -> Tensor:
    """Let the first trits of `packed`, those of block b times `scales[place[b]]`, take effect on `out`.

    Returns False, on the device, if a byte cannot be right; `out` may hold anything then.
    """
    put(unpack_trits(packed, len(out)) * by_block(scales, place)[: len(out)], out, how)
    return (packed < 3**PER_BYTE).all()


def majority(votes: Tensor) -> Tensor:
    """Return the majority of packed signs, a row for each voter: 1, -1, or 0 for a tie, as `pack_trits` packs them."""
    count = 8 * votes.shape[1]
    minuses = torch.zeros(count, dtype=torch.int32, device=votes.device)
    for vote in votes:
        minuses += unpack_small(vote, count, 1)
    return pack_trits((len(votes) - 2 * minuses).sign().to(torch.int8))
