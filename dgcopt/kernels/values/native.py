"""Values in few bits each, in C."""

from __future__ import annotations

import torch
from torch import Tensor

from ..native.library import Int, Length, Pointer, at, check_bytes, check_flat, function

__all__ = ["means", "nearest_levels", "of_levels", "of_steps", "round_steps"]


def round_steps(values: Tensor, block: int, most: int, cuts: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """See `round_steps` in torch.py."""
    blocks = _blocks(values, block, cuts)
    if not 1 <= most <= 127:
        raise ValueError(f"int8 holds up to 127 steps, not {most}")
    steps, multiples = torch.empty(blocks, dtype=torch.bfloat16), torch.empty(len(values), dtype=torch.int8)
    loop = function("round_steps", Pointer, Length, Length, Pointer, Int, Pointer, Pointer)
    loop(values.data_ptr(), len(values), block, at(cuts, 0), most, steps.data_ptr(), multiples.data_ptr())
    return steps, multiples


def of_steps(multiples: Tensor, steps: Tensor, block: int, cuts: Tensor | None = None) -> Tensor:
    """See `of_steps` in torch.py."""
    check_flat(len(multiples), multiples, dtype=torch.int8)
    check_flat(_count(len(multiples), block, cuts), steps, dtype=torch.float32)
    values = torch.empty(len(multiples), dtype=torch.float32)
    loop = function("of_steps", Pointer, Pointer, Length, Length, Pointer, Pointer)
    loop(multiples.data_ptr(), steps.data_ptr(), len(multiples), block, at(cuts, 0), values.data_ptr())
    return values


def nearest_levels(values: Tensor, levels: Tensor, block: int, cuts: Tensor | None = None) -> Tensor:
    """See `nearest_levels` in torch.py."""
    _check_levels(levels, _blocks(values, block, cuts))
    fields = torch.empty(len(values), dtype=torch.uint8)
    loop = function("nearest_levels", Pointer, Pointer, Length, Length, Pointer, Int, Pointer)
    places = (values.data_ptr(), levels.data_ptr(), len(values), block, at(cuts, 0))
    loop(*places, levels.shape[1], fields.data_ptr())
    return fields


def of_levels(fields: Tensor, levels: Tensor, block: int, cuts: Tensor | None = None) -> Tensor:
    """See `of_levels` in torch.py."""
    check_bytes(fields, len(fields))
    _check_levels(levels, _count(len(fields), block, cuts))
    values = torch.empty(len(fields), dtype=torch.float32)
    loop = function("of_levels", Pointer, Pointer, Length, Length, Pointer, Int, Pointer)
    places = (fields.data_ptr(), levels.data_ptr(), len(fields), block, at(cuts, 0))
    loop(*places, levels.shape[1], values.data_ptr())
    return values


def means(values: Tensor, block: int, count: int, cuts: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """See `means` in torch.py."""
    blocks = _blocks(values, block, cuts)
    if block & (block - 1) or block > 1024:
        raise ValueError(f"blocks have a power of two of elements, 1024 at most, not {block}")
    low, high = torch.empty(2, blocks, dtype=torch.float32)
    loop = function("means", Pointer, Length, Length, Pointer, Int, Pointer, Pointer)
    loop(values.data_ptr(), len(values), block, at(cuts, 0), count, low.data_ptr(), high.data_ptr())
    return low, high


def _blocks(values: Tensor, block: int, cuts: Tensor | None) -> int:
    check_flat(len(values), values, dtype=torch.float32)
    return _count(len(values), block, cuts)


def _count(numel: int, block: int, cuts: Tensor | None) -> int:
    """Return the number of blocks. Raises ValueError unless the blocks have the size that the loops expect."""
    if cuts is None:
        return -(-numel // block)
    check_flat(len(cuts), cuts, dtype=torch.int64)
    lengths = cuts.diff()
    if not len(cuts) or int(cuts[0]) or int(cuts[-1]) != numel or ((lengths < 1) | (lengths > block)).any():
        raise ValueError(f"blocks of 1 to {block} have to follow one another up to {numel}")
    return len(lengths)


def _check_levels(levels: Tensor, blocks: int) -> None:
    count = levels.shape[1]
    if count & (count - 1) or not 1 <= count <= 128:
        raise ValueError(f"1, 2, 4, ... or 128 levels fit into a byte with their signs, not {count}")
    check_flat(blocks * count, levels.view(-1), dtype=torch.float32)
