"""Tensors that lie apart, in one launch: where each of them is, and which of them a program works on."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from ..rows import sent

__all__ = ["Pieces", "begins", "piece_of"]

_ELEMENTS = {torch.float32: tl.float32, torch.bfloat16: tl.bfloat16}


@triton.jit
def piece_of(at, firsts, count):
    """Which piece something is of, a tile or an element, by each one's first."""
    low = at * 0
    high = low + count
    left = tl.zeros((), tl.int32) + count
    while left > 0:
        middle = (low + high) // 2
        behind = tl.load(firsts + middle) <= at
        low = tl.where(behind, middle, low)
        high = tl.where(behind, high, middle)
        left = left // 2
    return low


@triton.jit
def begins(addresses, piece, DTYPE: tl.constexpr):
    """Where a piece begins in memory."""
    return tl.load(addresses + piece).to(tl.pointer_type(DTYPE))


@dataclass(frozen=True)
class Pieces:
    """Dense tensors of one dtype, divided into tiles of so many elements.

    Attributes: `table`, int64, on the device: address, number of elements and first tile of each; `tiles`, how many
    there are; `dtype`, what they hold.
    """

    table: Tensor
    tiles: int
    dtype: tl.dtype

    @staticmethod
    def of(tensors: Sequence[Tensor], tile: int) -> Pieces:
        """These, of which none may be freed until the kernel is launched."""
        addresses = [x.data_ptr() for x in tensors]
        numels = [x.numel() for x in tensors]
        *firsts, tiles = itertools.accumulate((triton.cdiv(numel, tile) for numel in numels), initial=0)
        table = sent(torch.tensor([addresses, numels, firsts]), tensors[0].device)
        return Pieces(table, tiles, _ELEMENTS[tensors[0].dtype])

    @property
    def operands(self) -> tuple[Any, ...]:
        """What the kernel takes of them: the table by its rows, and how many they are."""
        return *self.table.unbind(), self.table.shape[1]
