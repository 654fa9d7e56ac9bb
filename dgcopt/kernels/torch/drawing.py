"""Positions drawn at random."""

from __future__ import annotations

from torch import Tensor

from .rounding import draws

__all__ = ["draw_from_spans"]


def draw_from_spans(starts: Tensor, lengths: Tensor, key: int) -> Tensor:
    """One position of each span, which is shorter than 2^31: 32 random bits times its length, in units of 2^32.

    All are int64; the random bits are those of `draws`.
    """
    drawn = draws(len(starts), key, starts.device).long() & 0xFFFFFFFF
    return starts + (drawn * lengths >> 32)
