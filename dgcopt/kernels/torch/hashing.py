"""A hash of a tensor's memory, on its device."""

from __future__ import annotations

import functools
from collections.abc import Callable

import torch
from torch import Tensor

from .rounding import draws

__all__ = ["HASHED", "hash_by", "hash_of"]

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
