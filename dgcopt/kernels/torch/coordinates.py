"""Reading and changing a flat tensor at few positions; int64, each within it."""

from __future__ import annotations

import torch
from torch import Tensor

__all__ = ["clear_at", "gather", "positions_above", "subtract_at"]


def gather(flat: Tensor, positions: Tensor) -> Tensor:
    """What a flat tensor holds at some positions."""
    return flat.index_select(0, positions)


def subtract_at(flat: Tensor, positions: Tensor, values: Tensor) -> None:
    """Subtract float32 values at positions of which none is named twice; rounded once, to the dtype of `flat`."""
    flat.index_copy_(0, positions, (flat.index_select(0, positions) - values).to(flat.dtype))


def clear_at(flat: Tensor, positions: Tensor) -> None:
    """Make zero what lies at some positions."""
    flat.index_fill_(0, positions, 0)


def positions_above(flat: Tensor, least: float, most: int) -> Tensor | None:
    """Where magnitudes are `least`, above 0, or more; NaN is not. Ascending; None if they are more than `most`."""
    positions = (flat.abs() >= torch.tensor(least, dtype=flat.dtype)).nonzero().squeeze(1)
    return None if len(positions) > most else positions
