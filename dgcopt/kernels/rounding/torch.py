"""Unbiased stochastic rounding of values to levels, to powers of two, and to trits.

All implementations use the same random numbers, which follow from a 64-bit key and the position of a value. Trits are
-1, 0 and 1, five in a byte, since 3^5 = 243.
"""

from __future__ import annotations

import torch
from torch import Tensor

from ..floats import Put, finite, put
from ..hashing.torch import draws, shifted
from ..packing.torch import pack_small, unpack_small
from ..reductions.torch import by_block

__all__ = [
    "PER_BYTE",
    "chances",
    "majority",
    "pack_trits",
    "put_levels",
    "put_powers",
    "put_trits",
    "round_levels",
    "round_powers",
    "round_trits",
    "unpack_trits",
]
_MANTISSA = 23


def round_levels(values: Tensor, norms: Tensor, place: Tensor, levels: int, key: int) -> Tensor:
    """Round each value to a multiple, at most `levels`, of `norms[place[b]] / levels`, with a sign bit on top.

    The multiple is rounded up with a probability of its fractional part. Returns fields packed by `pack_small`, or
    bytes if each takes all bits of one. No norm may be below the largest magnitude.
    """
    v, bits = finite(values), levels.bit_length()
    scales = (torch.full_like(norms, levels) / norms).clamp_(max=torch.finfo(norms.dtype).max)  # if it is denormal
    position = v.abs() * by_block(scales, place)
    level = position.floor()
    level += chances(len(v), key, v.device) < position - level
    fields = level.clamp_(max=levels).to(torch.uint8) | (v < 0).to(torch.uint8) << bits
    return fields if bits == 7 else pack_small(fields, 1 + bits)


def put_levels(packed: Tensor, bits: int, scales: Tensor, place: Tensor, out: Tensor, how: Put) -> Tensor:
    """Decode the message of `round_levels` into `out`: levels of `bits` bits times `scales[place[b]]`, with a sign.

    Returns the highest level, a number on the device, without a wait.
    """
    fields = packed if bits == 7 else unpack_small(packed, len(out), 1 + bits)
    level, minus = fields & (1 << bits) - 1, (fields >> bits).bool()
    sizes = level * by_block(scales, place)
    put(torch.where(minus, -sizes, sizes), out, how)
    return level.max() if len(level) else level.new_zeros(())


def round_powers(values: Tensor, key: int) -> Tensor:
    """Round each value to one of its two neighbouring powers of two: float32 exponents as bytes, then packed signs.

    A random number below 2^23, added to the bits of |v|, carries into the exponent with the right probability.
    """
    v = finite(values)
    up = shifted(draws(len(v), key, v.device), 32 - _MANTISSA)
    exponents = v.abs().view(torch.int32) + up >> _MANTISSA
    return torch.cat((exponents.to(torch.uint8), pack_small((v < 0).to(torch.uint8), 1)))


def put_powers(message: Tensor, out: Tensor, how: Put) -> Tensor:
    """Decode the message of `round_powers` into `out`. Returns the highest exponent, as `put_levels`."""
    exponents, signs = message[: len(out)], message[len(out) :]
    sizes = (exponents.to(torch.int32) << _MANTISSA).view(torch.float32)
    put(torch.where(unpack_small(signs, len(out), 1).bool(), -sizes, sizes), out, how)
    return exponents.max() if len(exponents) else exponents.new_zeros(())


def chances(count: int, key: int, device: torch.device) -> Tensor:
    """Return random multiples of 2^-24 in [0, 1)."""
    return shifted(draws(count, key, device), 8).float().mul_(2.0**-24)


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
