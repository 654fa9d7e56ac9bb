"""Copying gradients and looking at them, in C."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence

import torch
from torch import Tensor
from torch.autograd.graph import increment_version

from ..blocks import is_dense
from .library import FLOATS, Float, Length, Pointer, array, function, instructions, is_flat, shared

__all__ = ["copy_scaled", "peaks", "takes_copies", "takes_dense"]


def takes_copies(grads: Sequence[Tensor], outs: Sequence[Tensor], scale: float) -> bool:
    """Whether loops can run over all of these tensors, and know their one dtype."""
    dtype = grads[0].dtype
    for x in (*grads, *outs):
        if x.dtype is not dtype or x.dim() != 1 or not is_flat(x):
            return False
    return dtype in FLOATS and bool(instructions())


def copy_scaled(grads: Sequence[Tensor], outs: Sequence[Tensor], scale: float) -> Tensor:
    """See `dgcopt.kernels.torch.copy_scaled`. `takes_copies` has looked at all but lengths."""
    loop, count = _copy(grads[0].dtype), len(grads)
    numels, rooms = [g.numel() for g in grads], [out.numel() for out in outs]
    for numel, room in zip(numels, rooms, strict=True):
        if numel > room:
            raise ValueError(f"{numel} elements do not fit into {room}")
    places = (array(Pointer, [g.data_ptr() for g in grads]), array(Pointer, [out.data_ptr() for out in outs]))
    lengths = (array(Length, numels), array(Length, rooms))
    tops = _shared_tops(
        count, sum(numels), lambda start, stop, found: loop(*places, *lengths, count, start, stop, scale, found)
    )
    increment_version(outs)  # as torch's own operations do: autograd looks for it
    return tops


@functools.cache
def _copy(dtype: torch.dtype) -> Callable[..., int]:
    return function(f"copy_scaled_{FLOATS[dtype]}", *[Pointer] * 4, *[Length] * 3, Float, Pointer)


def takes_dense(tensors: Sequence[Tensor]) -> bool:
    """Whether loops know the one dtype of all these tensors, and nothing lies between the elements of any."""
    alike = len({x.dtype for x in tensors}) == 1 and tensors[0].dtype in FLOATS
    return alike and all(x.is_cpu and is_dense(x) for x in tensors) and bool(instructions())


def peaks(tensors: Sequence[Tensor]) -> Tensor:
    """See `dgcopt.kernels.torch.peaks`."""
    if not takes_dense(tensors):
        raise ValueError("tensors of one dtype are needed, each in one piece")
    count, numels = len(tensors), [x.numel() for x in tensors]
    loop = function(f"peaks_{FLOATS[tensors[0].dtype]}", *[Pointer] * 2, *[Length] * 3, Pointer)
    operands = (array(Pointer, [x.data_ptr() for x in tensors]), array(Length, numels), count)
    return _shared_tops(count, sum(numels), lambda start, stop, found: loop(*operands, start, stop, found))


def _shared_tops(count: int, numel: int, loop: Callable[[int, int, int], object]) -> Tensor:
    """The largest of the threads' results for each of `count` tensors, as integers, which sort as magnitudes do."""
    tops: list[Tensor] = []

    def span(start: int, stop: int) -> None:
        found = torch.zeros(count, dtype=torch.int32)
        loop(start, stop, found.data_ptr())
        tops.append(found)

    shared(span, numel)
    return (tops[0] if len(tops) == 1 else torch.stack(tops).amax(0)).view(torch.float32)
