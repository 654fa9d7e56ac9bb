"""Scaled copies of gradients, and their largest magnitudes, in C."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence

import torch
from torch import Tensor
from torch.autograd.graph import increment_version

from ..blocks import is_dense, is_flat
from ..native.library import FLOATS, Float, Length, Pointer, array, check_alike, function, shared

__all__ = [
    "copy_scaled",
    "peaks",
]


def copy_scaled(grads: Sequence[Tensor], outs: Sequence[Tensor], scale: float) -> Tensor:
    """See `copy_scaled` in torch.py."""
    loop, count = _copy(grads[0].dtype), len(grads)
    numels, rooms = [g.numel() for g in grads], [out.numel() for out in outs]
    for numel, room in zip(numels, rooms, strict=True):
        if numel > room:
            raise ValueError(f"{numel} elements do not fit into {room}")
    check_alike(is_flat, *grads, *outs)
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


def peaks(tensors: Sequence[Tensor]) -> Tensor:
    """See `peaks` in torch.py."""
    check_alike(is_dense, *tensors)
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
