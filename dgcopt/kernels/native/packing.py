"""Fields of a few bits, in C."""

from __future__ import annotations

import torch
from torch import Tensor

from .library import Int, Length, Pointer, check_bytes, check_flat, function

__all__ = ["pack_small", "unpack_small"]


def pack_small(fields: Tensor, width: int) -> Tensor:
    """See `dgcopt.kernels.torch.pack_small`."""
    check_flat(len(fields), fields, dtype=torch.uint8)
    packed = torch.empty(-(-len(fields) // 8) * width, dtype=torch.uint8)
    loop = function("pack_small", Pointer, Length, Int, Pointer)
    loop(fields.data_ptr(), len(fields), width, packed.data_ptr())
    return packed


def unpack_small(packed: Tensor, count: int, width: int) -> Tensor:
    """See `dgcopt.kernels.torch.unpack_small`."""
    check_bytes(packed, -(-count // 8) * width)
    fields = torch.empty(count, dtype=torch.uint8)
    loop = function("unpack_small", Pointer, Length, Int, Pointer)
    loop(packed.data_ptr(), count, width, fields.data_ptr())
    return fields
