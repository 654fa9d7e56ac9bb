"""The magnitudes that reach a threshold."""

from __future__ import annotations

import torch
from torch import Tensor

from ..blocks import bits_of

__all__ = ["add_and_select_above", "select_above"]


def select_above(flat: Tensor, least: float, most: int) -> tuple[Tensor, Tensor]:
    """Return positions (int64, ascending) and values of magnitudes of at least `least` > 0; NaN is not selected.

    Of more than `most` the largest, and of equal ones those that come first.
    """
    positions = (flat.abs() >= torch.tensor(least, dtype=flat.dtype)).nonzero().squeeze(1)
    if len(positions) <= most:
        return positions, flat.index_select(0, positions)
    codes = bits_of(flat).index_select(0, positions)
    codes &= torch.iinfo(codes.dtype).max
    cut = codes.topk(most, sorted=False).values.amin() if most else codes.amax() + 1
    chosen = codes > cut
    ties = (codes == cut).nonzero().squeeze(1)[: most - int(chosen.sum())]
    chosen[ties] = True
    positions = positions[chosen]
    return positions, flat.index_select(0, positions)


def add_and_select_above(
    g: Tensor, e: Tensor, decay: float, out: Tensor, least: float, most: int
) -> tuple[Tensor, Tensor]:
    """Write g + decay * e to `out`, of the dtype of e; and select from that."""
    return select_above(torch.add(g, e, alpha=decay, out=out), least, most)
