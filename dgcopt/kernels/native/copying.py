"""Copying gradients, in C."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor
from torch.autograd.graph import increment_version

from .library import FLOATS, Float, Length, Pointer, at, check_flat, function, shared, takes_floats

__all__ = ["copy_scaled", "takes_copies"]


def takes_copies(grads: Sequence[Tensor], outs: Sequence[Tensor], scale: float) -> bool:
    """Whether loops can run over all of these tensors, and know their one dtype."""
    return len({tensor.dtype for tensor in (*grads, *outs)}) == 1 and takes_floats(*grads, *outs)


def copy_scaled(grads: Sequence[Tensor], outs: Sequence[Tensor], scale: float) -> Tensor:
    """See `dgcopt.kernels.torch.copy_scaled`."""
    dtype = grads[0].dtype
    loop = function(f"copy_scaled_{FLOATS[dtype]}", Pointer, Pointer, Length, Float)
    peaks = []  # as integers, in the order of which magnitudes are
    for g, out in zip(grads, outs, strict=True):
        numel = len(g)
        check_flat(numel, g, dtype=dtype)
        check_flat(len(out), out, dtype=dtype)
        if len(out) < numel:
            raise ValueError(f"{numel} elements do not fit into {len(out)}")
        tops: list[int] = []

        def span(start: int, stop: int, g: Tensor = g, out: Tensor = out, tops: list[int] = tops) -> None:
            tops.append(loop(at(g, start), at(out, start), stop - start, scale))

        shared(span, numel)
        peaks.append(max(tops))
        if len(out) > numel:
            out[numel:].zero_()
        increment_version(out)  # as torch's own operations do: autograd looks for it
    return torch.tensor(peaks, dtype=torch.int32).view(torch.float32)
