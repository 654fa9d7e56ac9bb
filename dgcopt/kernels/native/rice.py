"""Rice codes, in C."""

from __future__ import annotations

import torch
from torch import Tensor

from .library import Int, Length, Pointer, check_flat, function, is_flat

__all__ = ["rice_measure", "rice_pack", "rice_unpack"]


def rice_measure(indices: Tensor, counts: Tensor, b: int, numel: int) -> tuple[Tensor, Tensor]:
    """See `dgcopt.kernels.torch.rice_measure`."""
    _check_rows(counts, indices)
    measures = torch.empty(2, len(counts), dtype=torch.int64)
    loop = function("rice_measure", Pointer, Pointer, Length, Int, Length, Pointer, Pointer)
    smallest, quotients = measures.unbind()
    operands = (indices.data_ptr(), counts.data_ptr(), len(counts), b, numel)
    loop(*operands, smallest.data_ptr(), quotients.data_ptr())
    return smallest, quotients


def rice_pack(indices: Tensor, counts: Tensor, b: int, nbytes: int) -> Tensor:
    """See `dgcopt.kernels.torch.rice_pack`."""
    _check_rows(counts, indices)
    packed = torch.zeros(len(counts), nbytes, dtype=torch.uint8)
    loop = function("rice_pack", Pointer, Pointer, Length, Int, Pointer, Length)
    if loop(indices.data_ptr(), counts.data_ptr(), len(counts), b, packed.data_ptr(), nbytes):
        raise ValueError(f"{counts.tolist()} indices do not fit into rows of {nbytes} bytes")
    return packed


def rice_unpack(packed: Tensor, counts: Tensor, b: int, numel: int) -> tuple[Tensor, int]:
    """See `dgcopt.kernels.torch.rice_unpack`."""
    indices = torch.empty(int(counts.sum()), dtype=torch.int64)
    _check_rows(counts, indices)
    if packed.dtype != torch.uint8 or packed.dim() != 2 or len(packed) != len(counts) or not is_flat(packed):
        raise ValueError(f"{len(counts)} rows of bytes are needed, not {tuple(packed.shape)} of {packed.dtype}")
    loop = function("rice_unpack", Pointer, Pointer, Length, Int, Length, Length, Pointer)
    wrong = loop(packed.data_ptr(), counts.data_ptr(), len(counts), b, packed.shape[1], numel, indices.data_ptr())
    return indices, wrong - 1


def _check_rows(counts: Tensor, indices: Tensor) -> None:
    check_flat(len(counts), counts, dtype=torch.int64)
    if len(counts) and int(counts.amin()) < 0:
        raise ValueError(f"rows cannot have {int(counts.amin())} indices")
    check_flat(int(counts.sum()), indices, dtype=torch.int64)
