"""How loops divide flat tensors: into blocks of 64 elements, and into chunks that a CPU's cache can hold."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

__all__ = ["BLOCK", "CHUNK", "bits_of", "chunks", "is_dense", "is_flat", "is_in_rows", "is_plain"]

BLOCK = 64
"""Elements per block; every parameter starts on a block boundary."""

CHUNK = 2048 * BLOCK
"""Elements on which several operations follow one another on a CPU: 512 kB of float32, which stay in its cache."""


def chunks(start: int, stop: int, device: torch.device) -> Iterator[slice]:
    """The span `start .. stop` in parts that fit into a CPU's cache; in one part on other devices."""
    step = CHUNK if device.type == "cpu" else max(1, stop - start)
    for first in range(start, stop, step):
        yield slice(first, min(first + step, stop))


def bits_of(flat: Tensor) -> Tensor:
    """The integers that floats are in memory. Without their sign bit they are ordered as the floats are, NaN last."""
    return flat.resolve_neg().view({2: torch.int16, 4: torch.int32, 8: torch.int64}[flat.element_size()])


def is_plain(x: Tensor) -> bool:
    """Return True if memory holds the elements themselves, not their negatives, as of `torch.imag(z.conj())`."""
    return x.layout is torch.strided and not x.is_neg()


def is_flat(x: Tensor) -> bool:
    """Return True if a tensor's elements are in memory one after the other, in order."""
    return is_plain(x) and x.is_contiguous()


def is_in_rows(x: Tensor) -> bool:
    """Return True if the elements of each row are in memory one after the other; rows may lie apart."""
    return is_plain(x) and (x.is_contiguous() or x.stride(-1) == 1)


def is_dense(x: Tensor) -> bool:
    """Return True if a tensor's elements are dense in memory, in any order."""
    if not is_plain(x):
        return False
    order = {4: torch.channels_last, 5: torch.channels_last_3d}.get(x.dim(), torch.contiguous_format)
    return x.is_contiguous() or x.is_contiguous(memory_format=order)
