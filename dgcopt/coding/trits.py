"""Ternary digits -1, 0, 1: five per byte, since 3^5 = 243; 1.6 bits each."""

from __future__ import annotations

import torch
from torch import Tensor

from .. import kernels
from ..errors import PayloadError
from ..kernels import Put
from .checks import Checks, expect

__all__ = ["put_trits", "trit_bytes"]


def trit_bytes(count: int) -> int:
    """Return the bytes of `count` trits."""
    return -(-count // kernels.PER_BYTE)


def put_trits(
    packed: Tensor,
    count: int,
    scales: Tensor,
    place: Tensor,
    out: Tensor,
    how: Put,
    rank: int,
    checks: Checks | None = None,
) -> None:
    """Add the first `count` trits from `rank`, scaled by `scales[place[b]]` in block b, to `out`.

    Raises PayloadError if there are not so many bytes; if some cannot be right, at once or as `checks` are read.
    """

    def problem() -> str:
        return f"the message from rank {rank} does not hold {count} trits, five in each byte: it was damaged on the way"

    if packed.dtype != torch.uint8 or packed.shape != (trit_bytes(count),):
        raise PayloadError(problem())
    expect(checks, kernels.put_trits(packed, scales, place, out, how), problem)
