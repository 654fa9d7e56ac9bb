"""Sorted indices as Rice-coded gaps, within 2% of what any code needs for positions that are spread at random.

A gap g between neighbours is written as g mod 2^b, in b bits, and g div 2^b, in unary (Golomb 1966, Rice 1979). The
gaps of random positions are geometric, for which b near log2(ln 2 / density) is best; both sides know it beforehand.

The message has a fixed length: what random positions take, and some more. Positions that cluster may take up to 0.5
bits each beyond it, so a few must be left out: `rice_excess` says how many.
"""

from __future__ import annotations

import functools
import math

import torch
from torch import Tensor

from ..errors import PayloadError
from ..kernels import rice_measure, rice_pack, rice_unpack
from .bits import aligned, packed_bytes

__all__ = ["decode_rice", "encode_rice", "rice_bytes", "rice_excess"]

_HEADER = 4  # bytes, which hold the number of indices
_SIGMAS = 4  # random positions exceed the message once in 30,000 times


@functools.lru_cache
def remainder_bits(count: int, numel: int) -> int:
    """b = round(log2(ln 2 / density)), and at least 0.

    Taken from the exponent of a product: a logarithm may differ in its last bit between machines, which must agree.
    """
    return max(0, math.frexp(math.log(2) * math.sqrt(2) * (numel / count))[1] - 1)


def _unary_bits(count: int, numel: int) -> int:
    """Room for the unary parts of all gaps: their mean for random positions and some more, at most what they can take.

    The gaps' sum is fixed, and so the sum of the unary parts varies only with that of the remainders, each of which
    has a variance of nearly 1/12 in units of 2^b.
    """
    b = remainder_bits(count, numel)
    longer = 1 - count / numel  # the chance that a gap goes on; squared b times, that it reaches 2^b
    for _ in range(b):
        longer *= longer
    margin = _SIGMAS * math.sqrt(count / 12)
    most = (numel - count) >> b
    return count + (min(most, math.ceil(count * longer / (1 - longer) + margin)) if longer < 1 else most)


@functools.lru_cache
def rice_bytes(count: int, numel: int) -> int:
    """Length of the message for `count` indices below `numel`, a multiple of 8; 0 for none."""
    if count == 0:
        return 0
    remainders = packed_bytes(count, remainder_bits(count, numel))
    return aligned(_HEADER + remainders + -(-_unary_bits(count, numel) // 8))


def rice_excess(indices: Tensor, numel: int, count: int | None = None) -> int:
    """How many of `indices`, whichever they are, have to be left out for the others to fit; 0 as a rule.

    The message is one for `count`, or as many as there are.

    Leaving one out saves its b bits, and joins two gaps whose unary parts never grow together. Raises ValueError if
    `indices` (int64) do not ascend strictly within [0, numel). Waits for the device.
    """
    if len(indices) == 0:
        return 0
    count = len(indices) if count is None else count
    b = remainder_bits(count, numel)
    smallest, quotients = rice_measure(indices, b)
    if smallest < 0 or int(indices[-1]) >= numel:
        raise ValueError(f"indices have to ascend strictly from 0 or more to less than {numel}")
    room = rice_bytes(count, numel) - _HEADER - packed_bytes(len(indices), b)
    missing = -(-(len(indices) + quotients) // 8) - room
    return min(len(indices), 8 * -(-missing // b)) if missing > 0 else 0  # eight remainders are b bytes


def encode_rice(indices: Tensor, count: int, numel: int) -> Tensor:
    """The message that carries `indices` in the `rice_bytes(count, numel)` bytes meant for `count`.

    Takes int64, strictly ascending in [0, numel), all `count` of them or those that `rice_excess` leaves. Returns
    uint8: their number, the remainders, the unary parts as zeros that end with a one, and zeros.
    """
    message = torch.zeros(rice_bytes(count, numel), dtype=torch.uint8, device=indices.device)
    if count == 0:
        return message
    message[:_HEADER].copy_(torch.tensor(list(len(indices).to_bytes(_HEADER, "little")), dtype=torch.uint8))
    message[_HEADER:] = rice_pack(indices, remainder_bits(count, numel), len(message) - _HEADER)
    return message


def decode_rice(message: Tensor, count: int, numel: int, rank: int) -> Tensor:
    """The indices (int64, at most `count`, strictly ascending in [0, numel)) of a message from `rank`.

    Raises PayloadError if it cannot be right. Waits for the device.
    """
    if message.dtype != torch.uint8 or message.shape != (rice_bytes(count, numel),):
        raise PayloadError(
            f"the message from rank {rank} has {message.numel()} bytes of indices where {count} of {numel} take "
            f"{rice_bytes(count, numel)}"
        )
    if count == 0:
        return message.new_zeros(0, dtype=torch.int64)
    sent = int.from_bytes(bytes(message[:_HEADER].tolist()), "little")
    if sent > count:
        raise PayloadError(f"the message from rank {rank} claims {sent} indices where at most {count} are sent")
    indices = rice_unpack(message[_HEADER:], sent, remainder_bits(count, numel), numel)
    if indices is not None:
        return indices
    raise PayloadError(
        f"the message from rank {rank} holds more or fewer indices than the {sent} that it claims, or one beyond "
        f"{numel}: it was damaged on the way, or that rank runs another model or version"
    )
