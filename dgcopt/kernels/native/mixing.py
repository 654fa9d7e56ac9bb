"""Weighted sums, in C."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.autograd.graph import increment_version

from .library import Float, Length, Pointer, at, check_flat, function, shared

__all__ = ["mix", "unmix"]


def mix(x: Tensor, keep: float, y: Tensor, add: float, out: Tensor) -> None:
    """See `dgcopt.kernels.torch.mix`."""
    check_flat(len(out), x, y, out, dtype=torch.float32)
    loop = function("mix", Pointer, Float, Pointer, Float, Length, Pointer)

    def span(start: int, stop: int) -> None:
        loop(at(x, start), keep, at(y, start), add, stop - start, at(out, start))

    shared(span, len(out))
    increment_version(out)


def unmix(mixed: Tensor, keep: float, y: Tensor, add: float) -> None:
    """See `dgcopt.kernels.torch.unmix`."""
    check_flat(len(mixed), mixed, y, dtype=torch.float32)
    loop = function("unmix", Pointer, Float, Pointer, Float, Length)

    def span(start: int, stop: int) -> None:
        loop(at(mixed, start), keep, at(y, start), add, stop - start)

    shared(span, len(mixed))
    increment_version(mixed)
