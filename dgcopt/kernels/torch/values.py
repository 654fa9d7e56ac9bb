"""Values in few bits each, with numbers per block of them; the last block may be shorter."""

from __future__ import annotations

import torch
from torch import Tensor

from .sums import finite, sum_of_rows

__all__ = ["in_blocks", "nearest_levels", "of_levels", "of_steps", "round_steps", "sums_above"]


def round_steps(values: Tensor, block: int, most: int) -> tuple[Tensor, Tensor]:
    """The largest magnitude of each block over `most`, as bfloat16; and each value as a multiple of that, int8."""
    blocks = in_blocks(finite(values), block, fill=0)
    steps = (blocks.abs().amax(1) / most).to(torch.bfloat16)
    multiples = (blocks / steps.float().unsqueeze(1)).nan_to_num_(0).round_().clamp_(-most, most)
    return steps, multiples.view(-1)[: len(values)].to(torch.int8)


def of_steps(multiples: Tensor, steps: Tensor, block: int) -> Tensor:
    """Multiples, int8, of each block's step, float32."""
    return (in_blocks(multiples.float(), block, fill=0) * steps.unsqueeze(1)).view(-1)[: len(multiples)]


def nearest_levels(values: Tensor, levels: Tensor, block: int) -> Tensor:
    """The nearest of each block's magnitudes, float32 `[blocks, levels]`, none descending: 2 j + 1 if negative, uint8.

    Halfway between two it is the lower one.
    """
    values = finite(values)
    sizes = in_blocks(values.abs(), block, fill=0)
    nearest = torch.zeros_like(sizes, dtype=torch.uint8)
    for between in ((levels[:, 1:] + levels[:, :-1]) / 2).unbind(1):
        nearest += sizes > between.unsqueeze(1)
    return (values < 0).to(torch.uint8) | nearest.view(-1)[: len(values)] << 1


def of_levels(fields: Tensor, levels: Tensor, block: int) -> Tensor:
    """What `nearest_levels` wrote: float32."""
    signed = torch.stack((levels, -levels), 2).flatten(1)
    return signed.gather(1, in_blocks(fields, block, fill=0).long()).view(-1)[: len(fields)]


def sums_above(values: Tensor, least: Tensor, block: int) -> tuple[Tensor, Tensor]:
    """Of the magnitudes in each block that are above its `least`: their sum, as in `sum_of_rows`, and number."""
    sizes = in_blocks(finite(values).abs(), block, fill=-1)
    above = (sizes > least.unsqueeze(1)) & (sizes >= 0)
    return sum_of_rows(torch.where(above, sizes, 0)), above.sum(1, dtype=torch.float32)


def in_blocks(values: Tensor, block: int, fill: float) -> Tensor:
    """Shape `[blocks, block]`; the last one is filled up."""
    return torch.nn.functional.pad(values, (0, -len(values) % block), value=fill).view(-1, block)
