"""Rice codes, in C."""

from __future__ import annotations

import torch
from torch import Tensor

from .library import Int, Length, Pointer, check_bytes, check_flat, function

__all__ = ["rice_measure", "rice_pack", "rice_unpack"]


def rice_measure(indices: Tensor, b: int) -> tuple[int, int]:
    """See `dgcopt.kernels.torch.rice_measure`."""
    check_flat(len(indices), indices, dtype=torch.int64)
    measures = torch.empty(2, dtype=torch.int64)
    loop = function("rice_measure", Pointer, Length, Int, Pointer)
    loop(indices.data_ptr(), len(indices), b, measures.data_ptr())
    smallest, quotients = measures.tolist()
    return smallest, quotients


def rice_pack(indices: Tensor, b: int, nbytes: int) -> Tensor:
    """See `dgcopt.kernels.torch.rice_pack`."""
    check_flat(len(indices), indices, dtype=torch.int64)
    start = _remainder_bytes(len(indices), b)
    packed = torch.zeros(nbytes, dtype=torch.uint8)
    loop = function("rice_pack", Pointer, Length, Int, Pointer, Length, Length)
    if start > nbytes or loop(indices.data_ptr(), len(indices), b, packed.data_ptr(), start, 8 * (nbytes - start)):
        raise ValueError(f"{len(indices)} indices do not fit into {nbytes} bytes")
    return packed


def rice_unpack(packed: Tensor, count: int, b: int, numel: int) -> Tensor | None:
    """See `dgcopt.kernels.torch.rice_unpack`."""
    start = _remainder_bytes(count, b)
    check_bytes(packed, start)
    indices = torch.empty(count, dtype=torch.int64)
    loop = function("rice_unpack", Pointer, Length, Int, Length, Length, Length, Pointer)
    damaged = loop(packed.data_ptr(), count, b, start, len(packed), numel, indices.data_ptr())
    return None if damaged else indices


def _remainder_bytes(count: int, b: int) -> int:
    whole, rest = divmod(b, 8)
    return count * whole + -(-count // 8) * rest
