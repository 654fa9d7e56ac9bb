"""Unbiased stochastic rounding of values to one of two neighbouring codes.

All implementations use the same random numbers, which follow from a 64-bit key and the place of a value, independent of
each other.
"""

from __future__ import annotations

import torch
from torch import Tensor

from .packing import pack_small, unpack_small
from .sums import Put, by_block, finite, put

__all__ = [
    "chances",
    "draws",
    "halves",
    "put_levels",
    "put_powers",
    "round_levels",
    "round_powers",
]

_WEYL, _FIRST, _SECOND = 0x9E3779B9 - 2**32, 0x21F0AAAD, 0x735A2D97  # as int32
_MANTISSA = 23


def draws(count: int, key: int, device: torch.device | str = "cpu") -> Tensor:
    """Return 32 random bits for each of `count` places below 2^32, int32.

    Weyl's sequence, mixed by two rounds of multiplication and shifts that Wellons searched for ("Prospecting for hash
    functions", 2018), with half of the 64 bits of `key` before each. Keys should differ in many bits, as hashes do.
    """
    first, second = halves(key)
    x = torch.arange(count, device=device).to(torch.int32).mul_(_WEYL).add_(first)
    x ^= _shifted(x, 16)
    x.mul_(_FIRST).add_(second)
    x ^= _shifted(x, 15)
    x.mul_(_SECOND)
    return x ^ _shifted(x, 15)


def halves(key: int) -> tuple[int, int]:
    """Return the lower and the upper half of 64 bits, each as an int32."""
    return tuple((half + 2**31) % 2**32 - 2**31 for half in (key % 2**32, key >> 32))  # type: ignore[return-value]


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
    up = _shifted(draws(len(v), key, v.device), 32 - _MANTISSA)
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
    return _shifted(draws(count, key, device), 8).float().mul_(2.0**-24)


def _shifted(x: Tensor, bits: int) -> Tensor:
    """Return int32 shifted right without its sign."""
    return x >> bits & (1 << 32 - bits) - 1
