"""Values in few bits each, with numbers per block of them; the last block may be shorter."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from ..floats import finite
from ..reductions.torch import sum_of_rows

__all__ = ["SPAN", "in_blocks", "means", "nearest_levels", "of_levels", "of_steps", "round_steps"]

SPAN = 256
"""Between the largest and the smallest magnitude that a block tells apart."""


def round_steps(values: Tensor, block: int, most: int, cuts: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """The largest magnitude of each block over `most`, as bfloat16; and each value as a multiple of that, int8.

    `cuts`, here and below: the start of each block and the end of the last, int64; else each has `block` values.
    """
    blocks = in_blocks(finite(values), block, 0, cuts)
    steps = (blocks.abs().amax(1) / most).to(torch.bfloat16)
    multiples = (blocks / steps.float().unsqueeze(1)).nan_to_num_(0).round_().clamp_(-most, most)
    return steps, _out_of_blocks(multiples, len(values), cuts).to(torch.int8)


def of_steps(multiples: Tensor, steps: Tensor, block: int, cuts: Tensor | None = None) -> Tensor:
    """Multiples, int8, of each block's step, float32."""
    blocks = in_blocks(multiples.float(), block, 0, cuts)
    return _out_of_blocks(blocks * steps.unsqueeze(1), len(multiples), cuts)


def nearest_levels(values: Tensor, levels: Tensor, block: int, cuts: Tensor | None = None) -> Tensor:
    """The nearest of each block's magnitudes, float32 `[blocks, levels]`, none descending: 2 j + 1 if negative, uint8.

    Halfway between two it is the lower one.
    """
    values = finite(values)
    sizes = in_blocks(values.abs(), block, 0, cuts)
    nearest = torch.zeros_like(sizes, dtype=torch.uint8)
    for between in ((levels[:, 1:] + levels[:, :-1]) / 2).unbind(1):
        nearest += sizes > between.unsqueeze(1)
    return (values < 0).to(torch.uint8) | _out_of_blocks(nearest, len(values), cuts) << 1


def of_levels(fields: Tensor, levels: Tensor, block: int, cuts: Tensor | None = None) -> Tensor:
    """Decode the message of `nearest_levels` to float32."""
    signed = torch.stack((levels, -levels), 2).flatten(1)
    return _out_of_blocks(signed.gather(1, in_blocks(fields, block, 0, cuts).long()), len(fields), cuts)


def means(values: Tensor, block: int, count: int, cuts: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """Return the mean magnitude of each block, twice; with `count` 2, the means below and above a split.

    The split is halfway between those, nearly (Lloyd 1982). NaN and Inf count as 0, in sums of the order of
    `sum_of_rows`.
    """
    sizes = in_blocks(finite(values).abs(), block, -1, cuts)
    total, there = _sums_above(sizes, torch.full((len(sizes),), -1.0, dtype=torch.float32, device=values.device))
    mean = total / there
    if count == 1:
        return mean, mean
    low, high = torch.where(sizes < 0, math.inf, sizes).amin(1), sizes.amax(1)
    split = low.maximum(high / SPAN).sqrt() * high.sqrt()
    for _ in range(3):  # a fourth round takes 1-4% off the error
        part, above = _sums_above(sizes, split)
        high = torch.where(above > 0, part / above, mean)
        low = torch.where(above < there, (total - part) / (there - above), high)
        split = (low + high) / 2
    return low, high


def _sums_above(sizes: Tensor, least: Tensor) -> tuple[Tensor, Tensor]:
    """Return the sum and the number of the magnitudes above `least` in each row."""
    above = (sizes > least.unsqueeze(1)) & (sizes >= 0)
    return sum_of_rows(torch.where(above, sizes, 0)), above.sum(1, dtype=torch.float32)


def in_blocks(values: Tensor, block: int, fill: float, cuts: Tensor | None = None) -> Tensor:
    """Shape `[blocks, block]`; those that are shorter are filled up."""
    if cuts is None:
        return torch.nn.functional.pad(values, (0, -len(values) % block), value=fill).view(-1, block)
    there = _there(cuts, block)
    return torch.full(there.shape, fill, dtype=values.dtype, device=values.device).masked_scatter_(there, values)


def _out_of_blocks(blocks: Tensor, numel: int, cuts: Tensor | None) -> Tensor:
    if cuts is None:
        return blocks.view(-1)[:numel]
    at = torch.arange(numel, device=cuts.device)
    block = torch.bucketize(at, cuts, right=True) - 1
    return blocks.view(-1).index_select(0, block * blocks.shape[1] + at - cuts.index_select(0, block))


def _there(cuts: Tensor, block: int) -> Tensor:
    """Return a mask of the elements within each block."""
    return torch.arange(block, device=cuts.device) < cuts.diff().unsqueeze(1)
