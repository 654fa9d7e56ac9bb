"""The magnitudes that reach a threshold."""

from __future__ import annotations

import torch
from torch import Tensor

from ..blocks import bits_of

__all__ = ["positions_above"]


def positions_above(flat: Tensor, least: float, most: int) -> Tensor:
    """Where magnitudes are `least`, above 0, or more; NaN is not. int64, ascending.

    Of more than `most` the largest, and of equal ones those that come first.
    """
    positions = (flat.abs() >= torch.tensor(least, dtype=flat.dtype)).nonzero().squeeze(1)
    if len(positions) <= most:
        return positions
    codes = bits_of(flat).index_select(0, positions)
    codes &= torch.iinfo(codes.dtype).max
    cut = codes.topk(most, sorted=False).values.amin() if most else codes.amax() + 1
    chosen = codes > cut
    ties = (codes == cut).nonzero().squeeze(1)[: most - int(chosen.sum())]
    chosen[ties] = True
    return positions[chosen]
