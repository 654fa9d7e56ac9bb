"""Minus one, zero or one: five in a byte, since 3^5 = 243. 1.6 bits each."""

from __future__ import annotations

import torch
from torch import Tensor

from .. import kernels
from ..errors import PayloadError

__all__ = ["pack_trits", "trit_bytes", "unpack_trits"]


def trit_bytes(count: int) -> int:
    """Bytes of so many trits."""
    return -(-count // kernels.PER_BYTE)


def pack_trits(trits: Tensor) -> Tensor:
    """One-dimensional `trits` of any dtype, each -1, 0 or 1, as uint8 of length `trit_bytes`."""
    return kernels.pack_trits(trits.to(torch.int8))


def unpack_trits(packed: Tensor, count: int, rank: int) -> Tensor:
    """The `count` trits, int8, that `pack_trits` wrote on `rank`. PayloadError if bytes cannot be right."""
    right = packed.dtype == torch.uint8 and packed.shape == (trit_bytes(count),)
    trits = kernels.unpack_trits(packed, count) if right else None
    if trits is None:
        raise PayloadError(
            f"the message from rank {rank} does not hold {count} trits, five in each byte: it was damaged on the way"
        )
    return trits
