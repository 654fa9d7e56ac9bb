"""Integers of few bits, side by side in bytes.

The bytes are those of little-endian machines, on which alone this runs.
"""

from __future__ import annotations

import torch
from torch import Tensor

from ..kernels import pack_small, unpack_small

__all__ = ["aligned", "pack_small", "packed_bytes", "read_as", "unpack_small"]

_ALIGNMENT = 8


def aligned(nbytes: int) -> int:
    """The next multiple of 8, where every part of a message starts, so that it can be read in place."""
    return -(-nbytes // _ALIGNMENT) * _ALIGNMENT


def read_as(payload: Tensor, dtype: torch.dtype) -> Tensor:
    """The elements that uint8 `payload` holds, in place where it lies on a multiple of their size."""
    if payload.storage_offset() % dtype.itemsize:
        payload = payload.clone()
    return payload.view(dtype)


def packed_bytes(count: int, width: int) -> int:
    """Bytes of `count` integers of `width` bits: the whole bytes of each, then the bits left over, eight at a time."""
    return count * (width // 8) + -(-count // 8) * (width % 8)
