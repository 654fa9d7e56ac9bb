"""Checks of lengths before a kernel reads out of bounds; they need no wait."""

from __future__ import annotations

from torch import Tensor

from ..blocks import BLOCK

__all__ = ["blocks_of", "check_length"]


def check_length(numel: int, *tensors: Tensor) -> None:
    """Raises ValueError unless there are so many elements, or more."""
    for tensor in tensors:
        if tensor.numel() < numel:
            raise ValueError(f"at least {numel} elements are needed, not {tensor.numel()}")


def blocks_of(values: Tensor) -> int:
    """Return the number of blocks. Raises ValueError if the last one is incomplete."""
    if values.numel() % BLOCK:
        raise ValueError(f"whole blocks of {BLOCK} elements are needed, not {values.numel()} elements")
    return values.numel() // BLOCK
