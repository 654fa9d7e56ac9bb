"""Where parameters lie in flat memory, and the gradient of several of them before and after its exchange.

A block of 64 elements belongs to one parameter only, so per-tensor work on a whole bucket is vector work on its
blocks. The gaps behind parameters are zero and stay zero.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

__all__ = ["BLOCK", "CHUNK", "LocalGradient", "Segment", "SparseSum", "block_maxima", "chunks"]

BLOCK = 64
"""Elements per block; every parameter starts on a block boundary."""

CHUNK = 2048 * BLOCK
"""Elements on which several operations follow one another on a CPU: 512 kB of float32, which stay in its cache."""


@dataclass(frozen=True, eq=False)
class Segment:
    """The span `start .. stop` of a flat tensor that belongs to one parameter."""

    name: str
    param: Tensor
    start: int

    @property
    def numel(self) -> int:
        return self.param.numel()

    @property
    def stop(self) -> int:
        return self.start + self.param.numel()

    def view(self, flat: Tensor) -> Tensor:
        """This parameter's part of `flat`, in its shape and, where it is channels-last, in its memory order."""
        span, param = flat[self.start : self.stop], self.param
        if self._order is torch.contiguous_format:
            return span.view(param.shape)
        return span.as_strided(param.shape, param.stride())

    def flatten(self, tensor: Tensor) -> Tensor:
        """The inverse of `view`, for a tensor of the parameter's shape: an alias of it, unless it lies otherwise."""
        if tensor.layout != torch.strided:
            tensor = tensor.to_dense()
        return tensor.detach().contiguous(memory_format=self._order).as_strided((self.numel,), (1,))

    @property
    def _order(self) -> torch.memory_format:
        param = self.param
        for order, dims in ((torch.channels_last, 4), (torch.channels_last_3d, 5)):
            if param.dim() == dims and not param.is_contiguous() and param.is_contiguous(memory_format=order):
                return order
        return torch.contiguous_format


class SparseSum:
    """What an exchange returns that knows all but a few coordinates of the result to be zero.

    Holds positions in the flat gradient (int64, strictly ascending within one message) and values, which are added up
    in the order in which they were added here.
    """

    def __init__(self) -> None:
        self.messages: list[tuple[Tensor, Tensor]] = []

    def add(self, positions: Tensor, values: Tensor) -> None:
        """Add one message."""
        self.messages.append((positions, values))

    def to_dense(self, like: Tensor) -> Tensor:
        """The sum as a tensor of the shape, dtype and device of `like`."""
        dense = torch.zeros_like(like)
        for positions, values in self.messages:
            dense.index_add_(0, positions, values.to(like.dtype))
        return dense


class LocalGradient:
    """One rank's gradient of a bucket, read where autograd left it.

    Args:
        parts: each parameter's gradient as `Segment.flatten` gives it; None counts as zero.
        scale: what it is multiplied by.
    """

    def __init__(self, segments: Sequence[Segment], parts: Sequence[Tensor | None], scale: float = 1.0) -> None:
        self._parts = list(zip(segments, parts, strict=True))
        self._scale = scale
        self._clear: set[Segment] = set()

    @staticmethod
    def lying_flat(flat: Tensor, segments: Sequence[Segment]) -> LocalGradient:
        """The same for a gradient that is in one piece already."""
        return LocalGradient(segments, [flat[segment.start : segment.stop] for segment in segments])

    def within(self, start: int, stop: int, clear: bool = False) -> Iterator[tuple[slice, Tensor]]:
        """The gradient from `start` to `stop`, in parts that fit into a CPU's cache, and where they lie.

        Gaps are left out. With `clear` the gradient is zero afterwards.
        """
        for segment, part in self._parts:
            if not start <= segment.start < stop:
                continue
            for span in chunks(segment.start, segment.stop, segment.param.device):
                if part is None:
                    yield span, segment.param.new_zeros(()).expand(span.stop - span.start)
                    continue
                here = part[span.start - segment.start : span.stop - segment.start]
                yield span, here if self._scale == 1 else here * self._scale
                if clear:
                    here.zero_()
            if clear and part is not None:
                self._clear.add(segment)

    def is_clear(self, segment: Segment) -> bool:
        """Whether a parameter's gradient was made zero by `within`."""
        return segment in self._clear


def chunks(start: int, stop: int, device: torch.device) -> Iterator[slice]:
    """The span `start .. stop` in parts that fit into a CPU's cache; in one part on other devices."""
    step = CHUNK if device.type == "cpu" else max(1, stop - start)
    for first in range(start, stop, step):
        yield slice(first, min(first + step, stop))


def block_maxima(flat: Tensor, out: Tensor | None = None) -> Tensor:
    """The largest magnitude of each block of 64. Shape `[numel / 64]`; NaN where a block holds one.

    Without their sign bit, floats are ordered as the integers of their bits are, NaN last; and the largest integers of
    rows are found several times faster than the largest floats.
    """
    bits = _BITS[flat.element_size()]
    maxima = torch.empty(flat.numel() // BLOCK, dtype=flat.dtype, device=flat.device) if out is None else out
    torch.amax((flat.view(bits) & torch.iinfo(bits).max).view(-1, BLOCK), 1, out=maxima.view(bits))
    return maxima


_BITS = {2: torch.int16, 4: torch.int32, 8: torch.int64}
