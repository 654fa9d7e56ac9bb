"""Fields of a few bits, and Rice codes, in C."""

from __future__ import annotations

import torch
from torch import Tensor

from ..blocks import is_flat
from ..native.library import Int, Length, Pointer, check_bytes, check_flat, function

__all__ = ["pack_small", "rice_measure", "rice_pack", "rice_unpack", "unpack_small"]


def pack_small(fields: Tensor, width: int) -> Tensor:
    """See `pack_small` in torch.py."""
    check_flat(len(fields), fields, dtype=torch.uint8)
    packed = torch.empty(-(-len(fields) // 8) * width, dtype=torch.uint8)
    loop = function("pack_small", Pointer, Length, Int, Pointer)
    loop(fields.data_ptr(), len(fields), width, packed.data_ptr())
    return packed


def unpack_small(packed: Tensor, count: int, width: int) -> Tensor:
    """See `unpack_small` in torch.py."""
    check_bytes(packed, -(-count // 8) * width)
    fields = torch.empty(count, dtype=torch.uint8)
    loop = function("unpack_small", Pointer, Length, Int, Pointer)
    loop(packed.data_ptr(), count, width, fields.data_ptr())
    return fields


def rice_measure(indices: Tensor, counts: Tensor, b: int, numel: int) -> tuple[Tensor, Tensor]:
    """See `rice_measure` in torch.py."""
    shape = _check_rows(indices, counts)
    smallest, quotients = torch.empty_like(counts), torch.empty_like(counts)
    loop = function("rice_measure", Pointer, Pointer, Length, Length, Int, Length, Pointer, Pointer)
    loop(indices.data_ptr(), counts.data_ptr(), *shape, b, numel, smallest.data_ptr(), quotients.data_ptr())
    return smallest, quotients


def rice_pack(indices: Tensor, counts: Tensor, b: int, nbytes: int) -> Tensor:
    """See `rice_pack` in torch.py."""
    shape = _check_rows(indices, counts)
    packed = torch.zeros(len(counts), nbytes, dtype=torch.uint8)
    loop = function("rice_pack", Pointer, Pointer, Length, Length, Int, Pointer, Length)
    if loop(indices.data_ptr(), counts.data_ptr(), *shape, b, packed.data_ptr(), nbytes):
        raise ValueError(f"{counts.tolist()} indices do not fit into rows of {nbytes} bytes")
    return packed


def rice_unpack(packed: Tensor, counts: Tensor, b: int, numel: int, length: int) -> tuple[Tensor, Tensor]:
    """See `rice_unpack` in torch.py."""
    indices, wrong = torch.empty(len(counts), length, dtype=torch.int64), torch.empty(len(counts), dtype=torch.bool)
    shape = _check_rows(indices, counts)
    if packed.dtype != torch.uint8 or packed.dim() != 2 or len(packed) != len(counts) or not is_flat(packed):
        raise ValueError(f"{len(counts)} rows of bytes are needed, not {tuple(packed.shape)} of {packed.dtype}")
    loop = function("rice_unpack", Pointer, Pointer, *[Length] * 2, Int, *[Length] * 2, Pointer, Pointer)
    sizes = (*shape, b, packed.shape[1], numel)
    loop(packed.data_ptr(), counts.data_ptr(), *sizes, indices.data_ptr(), wrong.data_ptr())
    return indices, wrong


def _check_rows(indices: Tensor, counts: Tensor) -> tuple[int, int]:
    """Return the number of rows and their length."""
    check_flat(len(counts), counts, dtype=torch.int64)
    if indices.dtype != torch.int64 or indices.dim() != 2 or len(indices) != len(counts) or not is_flat(indices):
        raise ValueError(f"{len(counts)} rows of int64 are needed, not {tuple(indices.shape)} of {indices.dtype}")
    rows, length = indices.shape
    if rows and not 0 <= int(counts.amin()) <= int(counts.amax()) <= length:
        raise ValueError(f"rows of {length} cannot have {counts.tolist()} indices")
    return rows, length
