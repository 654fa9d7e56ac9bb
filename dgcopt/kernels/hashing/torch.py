"""Random bits from a key and a position, and their uses: random positions, and a hash of a tensor's memory."""

from __future__ import annotations

import functools
from collections.abc import Callable

import torch
from torch import Tensor

__all__ = ["HASHED", "draw_from_spans", "draws", "halves", "hash_by", "hash_of", "shifted"]

_WEYL, _FIRST, _SECOND = 0x9E3779B9 - 2**32, 0x21F0AAAD, 0x735A2D97  # as int32


def draws(count: int, key: int, device: torch.device | str = "cpu") -> Tensor:
    """Return 32 random bits for each of `count` places below 2^32, int32.

    Weyl's sequence, mixed by two rounds of multiplication and shifts that Wellons searched for ("Prospecting for hash
    functions", 2018), with half of the 64 bits of `key` before each. Keys should differ in many bits, as hashes do.
    """
    first, second = halves(key)
    x = torch.arange(count, device=device).to(torch.int32).mul_(_WEYL).add_(first)
    x ^= shifted(x, 16)
    x.mul_(_FIRST).add_(second)
    x ^= shifted(x, 15)
    x.mul_(_SECOND)
    return x ^ shifted(x, 15)


def halves(key: int) -> tuple[int, int]:
    """Return the lower and the upper half of 64 bits, each as an int32."""
    return tuple((half + 2**31) % 2**32 - 2**31 for half in (key % 2**32, key >> 32))  # type: ignore[return-value]


def shifted(x: Tensor, bits: int) -> Tensor:
    """Return int32 shifted right without its sign."""
    return x >> bits & (1 << 32 - bits) - 1


HASHED = 4096
"""Words that are hashed into one row of two."""

_KEY = 0x9C0F_3B5D_71E2_A846


def hash_of(data: Tensor) -> Tensor:
    """128 bits of flat bytes (uint8): int64 `[2]`, the same on all devices.

    The bytes are words of 32 bits, with zeros behind them. Each row of words becomes two sums of the words times fixed
    factors, random numbers of 64 bits, modulo 2^64; and these are hashed alike until one row is left. For two tensors
    that differ, one choice of the factors in 2^66 at most makes both sums of a row equal.
    """
    return hash_by(_sums_of_rows, data)


def hash_by(sums_of_rows: Callable[[Tensor, Tensor], Tensor], data: Tensor) -> Tensor:
    """`hash_of`, by the sums of rows of words times factors, of which the last row may be shorter, or empty."""
    missing = -len(data) % 4
    words = torch.nn.functional.pad(data, (0, missing)) if missing or data.storage_offset() % 4 else data
    words, factors = words.view(torch.int32), _factors(data.device)
    while True:
        sums = sums_of_rows(words, factors)
        if len(sums) == 1:
            return sums[0]
        words = sums.view(-1).view(torch.int32)


def _sums_of_rows(words: Tensor, factors: Tensor) -> Tensor:
    whole = len(words) // HASHED * HASHED
    at_once = HASHED * (32 if words.is_cpu else 1024)  # number of words with products that fit into a CPU's cache
    rows = [(part.view(-1, 1, HASHED) * factors).sum(2) for part in words[:whole].split(at_once)]
    rest = words[whole:]
    return torch.cat([*rows, (rest * factors[:, : len(rest)]).sum(1, keepdim=True).T])


@functools.cache
def _factors(device: torch.device) -> Tensor:
    """Random numbers, int64 `[2, words of a row]`."""
    high, low = draws(4 * HASHED, _KEY, device).long().view(2, 2, HASHED)
    return (high << 32) + low


def draw_from_spans(starts: Tensor, lengths: Tensor, key: int) -> Tensor:
    """One position of each span, which is shorter than 2^31: 32 random bits times its length, in units of 2^32.

    All are int64; the random bits are those of `draws`.
    """
    drawn = draws(len(starts), key, starts.device).long() & 0xFFFFFFFF
    return starts + (drawn * lengths >> 32)
