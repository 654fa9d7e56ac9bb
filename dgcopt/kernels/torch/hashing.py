"""A hash of a tensor's memory, on the device where it lies."""

from __future__ import annotations

import functools

import torch
from torch import Tensor

from .rounding import draws

__all__ = ["hash_of"]

_ROW = 4096
"""Words that are hashed into one row of two."""

_KEY = 0x9C0F_3B5D_71E2_A846


def hash_of(data: Tensor) -> Tensor:
    """128 bits of flat bytes (uint8): int64 `[2]`, the same on all devices.

    The bytes are words of 32 bits, with zeros behind them. Each row of words becomes two sums of the words times random
    numbers of 64 bits, modulo 2^64, and these are hashed alike until one row is left. If two tensors of one length
    differ, both sums of a row are equal with a probability of at most 2^-66.
    """
    missing = -len(data) % 4
    words = torch.nn.functional.pad(data, (0, missing)) if missing or data.storage_offset() % 4 else data
    words, factors = words.view(torch.int32), _factors(data.device)
    at_once = _ROW * (32 if data.device.type == "cpu" else 1024)  # words, whose products fit into a CPU's cache
    while True:
        whole = len(words) // _ROW * _ROW
        rows = [(part.view(-1, 1, _ROW) * factors).sum(2) for part in words[:whole].split(at_once)]
        rest = words[whole:]
        rows.append((rest * factors[:, : len(rest)]).sum(1, keepdim=True).T)
        sums = torch.cat(rows)
        if len(sums) == 1:
            return sums[0]
        words = sums.view(-1).view(torch.int32)


@functools.cache
def _factors(device: torch.device) -> Tensor:
    """Random numbers, int64 `[2, words of a row]`."""
    high, low = draws(4 * _ROW, _KEY, device).long().view(2, 2, _ROW)
    return (high << 32) + low
