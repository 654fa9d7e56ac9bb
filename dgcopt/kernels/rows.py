"""Rows of various lengths, one after the other in a flat tensor: those of the messages that are coded together."""

from __future__ import annotations

import torch
from torch import Tensor

__all__ = ["by_row", "firsts", "sent"]


def sent(numbers: Tensor, device: torch.device) -> Tensor:
    """A few numbers from the CPU, on a device; neither waits for the other."""
    return (numbers.pin_memory() if device.type == "cuda" else numbers).to(device, non_blocking=True)


def firsts(counts: Tensor, device: torch.device) -> Tensor:
    """Return the starts of rows of `counts` elements (int64, on the CPU)."""
    return sent(counts.cumsum(0) - counts, device)


def by_row(counts: Tensor, device: torch.device) -> tuple[Tensor, Tensor]:
    """Return the row of every element, and its number within the row."""
    total = int(counts.sum())
    row = torch.arange(len(counts), device=device).repeat_interleave(sent(counts, device), output_size=total)
    return row, torch.arange(total, device=device) - firsts(counts, device)[row]
