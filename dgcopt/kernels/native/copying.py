"""Copying gradients and looking at them, in C."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor
from torch.autograd.graph import increment_version

from .library import FLOATS, Float, Length, Pointer, at, check_flat, function, instructions, shared, takes_floats

__all__ = ["copy_scaled", "peaks", "takes_copies", "takes_dense"]


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


def takes_dense(tensors: Sequence[Tensor]) -> bool:
    """Whether loops know the one dtype of all these tensors, and nothing lies between the elements of any."""
    alike = len({x.dtype for x in tensors}) == 1 and tensors[0].dtype in FLOATS
    return alike and all(map(_is_dense, tensors)) and bool(instructions())


def _is_dense(x: Tensor) -> bool:
    if not x.is_cpu or x.layout is not torch.strided:
        return False
    order = {4: torch.channels_last, 5: torch.channels_last_3d}.get(x.dim(), torch.contiguous_format)
    return x.is_contiguous() or x.is_contiguous(memory_format=order)


def peaks(tensors: Sequence[Tensor]) -> Tensor:
    """See `dgcopt.kernels.torch.peaks`."""
    if not takes_dense(tensors):
        raise ValueError("tensors of one dtype are needed, each in one piece")
    numels, count = [x.numel() for x in tensors], len(tensors)
    loop = function(f"peaks_{FLOATS[tensors[0].dtype]}", *[Pointer] * 2, *[Length] * 3, Pointer)
    places, lengths = (Pointer * count)(*[x.data_ptr() for x in tensors]), (Length * count)(*numels)
    tops = []  # as integers, in the order of which magnitudes are

    def span(start: int, stop: int) -> None:
        found = torch.zeros(count, dtype=torch.int32)
        loop(places, lengths, count, start, stop, found.data_ptr())
        tops.append(found)

    shared(span, sum(numels))
    return (tops[0] if len(tops) == 1 else torch.stack(tops).amax(0)).view(torch.float32)
