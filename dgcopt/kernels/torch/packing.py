"""Fields of a few bits, side by side."""

from __future__ import annotations

import torch
from torch import Tensor

__all__ = ["pack_small", "unpack_small"]


def pack_small(fields: Tensor, width: int) -> Tensor:
    """uint8 `fields`, each below 2^width, in `width` (0 to 7) bits each; eight of them fill `width` bytes."""
    padded = fields.new_zeros(-(-len(fields) // 8) * 8)
    padded[: len(fields)] = fields
    words = padded.view(torch.int64)
    for gap, low, high in _folds(width):
        words = (words & low) | (words >> gap & high)
    return words.view(torch.uint8).view(-1, 8)[:, :width].reshape(-1)


def unpack_small(packed: Tensor, count: int, width: int) -> Tensor:
    """The `count` fields, uint8, that `pack_small` wrote."""
    by_bytes = packed.new_zeros(-(-count // 8), 8)
    by_bytes[:, :width] = packed[: len(by_bytes) * width].view(-1, width) if width else 0
    words = by_bytes.view(torch.int64)
    for gap, low, high in reversed(_folds(width)):
        words = (words & low) | ((words & high) << gap)
    return words.view(torch.uint8).view(-1)[:count]


def _folds(width: int) -> list[tuple[int, int, int]]:
    """Steps that close the gaps between eight fields in a word: of pairs, of pairs of pairs, and of all.

    Each is (gap, mask of the lower half, mask of the upper half's place).
    """
    folds = []
    for lane in (8, 16, 32):
        used = lane // 8 * width
        low = sum(((1 << used) - 1) << start for start in range(0, 64, 2 * lane))
        folds.append((lane - used, low, low << used))
    return folds
