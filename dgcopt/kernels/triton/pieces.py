"""Many tensors in one launch: their addresses, and the pieces of each program."""

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

__all__ = ["Pieces", "begins", "piece_of", "tile_of"]

_ELEMENTS = {torch.float32: tl.float32, torch.bfloat16: tl.bfloat16, torch.float16: tl.float16}


@triton.jit
def piece_of(at, firsts, count):
    """Return the piece that contains a tile or an element, from the first tile or element of each piece."""
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
def begins(addresses, piece, DTYPE: tl.constexpr, ALIGNED: tl.constexpr = False):
    """Return the address of a piece; with ALIGNED a multiple of 16 bytes."""
    pointer = tl.load(addresses + piece).to(tl.pointer_type(DTYPE))
    if ALIGNED:
        pointer = tl.multiple_of(pointer, 16)
    return pointer


@triton.jit
def tile_of(firsts, count, SIZE: tl.constexpr):
    """Return the piece of this program's tile, and the tile's first element in it."""
    piece = piece_of(tl.program_id(0), firsts, count)
    return piece, (tl.program_id(0) - tl.load(firsts + piece)) * SIZE


@dataclass(frozen=True)
class Pieces:
    """Dense tensors of one dtype, divided into tiles of as many elements each: one program works on a tile.

    Attributes:
        table: address, number of elements and first tile of each piece, int64, on the device.
        tiles: number of tiles.
        modes: constants that kernels are compiled for.
    """

    table: Tensor
    tiles: int
    modes: dict[str, Any]

    @staticmethod
    def of(tile: int, *columns: Sequence[Tensor]) -> Pieces:
        """Tensors side by side, in tiles of those in the last column. Free none until the kernel is launched."""
        rows = [row for column in columns for row in ([x.data_ptr() for x in column], [x.numel() for x in column])]
        *firsts, tiles = itertools.accumulate((triton.cdiv(numel, tile) for numel in rows[-1]), initial=0)
        table = sent(torch.tensor([*rows, firsts]), columns[0][0].device)
        aligned = all(address % 16 == 0 for addresses in rows[::2] for address in addresses)
        return Pieces(table, tiles, {"DTYPE": _ELEMENTS[columns[0][0].dtype], "ALIGNED": aligned, "SIZE": tile})

    @property
    def operands(self) -> tuple[Any, ...]:
        """Return the arguments of a kernel: the rows of the table, and their number."""
        return *self.table.unbind(), self.table.shape[1]
