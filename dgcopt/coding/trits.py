"""Minus one, zero or one: five in a byte, since 3^5 = 243. 1.6 bits each."""

from __future__ import annotations

import torch
from torch import Tensor

from ..errors import PayloadError

__all__ = ["pack_trits", "trit_bytes", "unpack_trits"]

_PER_BYTE = 5


def trit_bytes(count: int) -> int:
    """Bytes of so many trits."""
    return -(-count // _PER_BYTE)


def pack_trits(trits: Tensor) -> Tensor:
    """One-dimensional `trits` of any dtype, each -1, 0 or 1, as uint8 of length `trit_bytes`."""
    length = trit_bytes(len(trits))
    digits = torch.zeros(_PER_BYTE * length, dtype=torch.uint8, device=trits.device)
    digits[: len(trits)] = trits + 1
    first, *others = digits.view(_PER_BYTE, length)
    packed = first.clone()
    for digit in others:
        packed.mul_(3).add_(digit)
    return packed


def unpack_trits(packed: Tensor, count: int, rank: int) -> Tensor:
    """The `count` trits, int8, that `pack_trits` wrote on `rank`. PayloadError if bytes cannot be right."""
    if packed.dtype != torch.uint8 or packed.shape != (trit_bytes(count),) or bool((packed >= 3**_PER_BYTE).any()):
        raise PayloadError(
            f"the message from rank {rank} does not hold {count} trits, five in each byte: it was damaged on the way"
        )
    digits, rest = [], packed
    for _ in range(_PER_BYTE):
        digits.append(rest % 3)
        rest = rest // 3
    return torch.cat(digits[::-1])[:count].to(torch.int8) - 1
