"""Minus one, zero or one: five in a byte, since 3^5 = 243."""

from __future__ import annotations

import torch
from torch import Tensor

from .sums import Put, by_block, put

__all__ = ["PER_BYTE", "pack_trits", "put_trits", "unpack_trits"]

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


def unpack_trits(packed: Tensor, count: int) -> Tensor | None:
    """The `count` trits, int8, that `pack_trits` wrote; None if a byte cannot be right."""
    if bool((packed >= 3**PER_BYTE).any()):
        return None
    digits, rest = [], packed
    for _ in range(PER_BYTE):
        digits.append(rest % 3)
        rest = rest // 3
    return torch.cat(digits[::-1])[:count].to(torch.int8) - 1


def put_trits(trits: Tensor, scales: Tensor, place: Tensor, out: Tensor, how: Put) -> None:
    """Let each trit of block b, times `scales[place[b]]`, take effect on `out`."""
    put(trits * by_block(scales, place), out, how)
