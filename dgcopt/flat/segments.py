"""Where parameters lie in flat memory, and numbers of each of them, found for all at once.

A block of 64 elements belongs to one parameter only, so per-tensor work on a whole bucket is vector work on its
blocks. The gaps behind parameters are zero in every gradient that an exchange is given, and in all memory; what it
returns may hold anything there.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

__all__ = ["BLOCK", "CHUNK", "PerTensor", "Segment", "bits_of", "block_maxima", "chunks"]

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


class PerTensor:
    """Numbers per parameter of a flat tensor, all parameters at once.

    Attributes: `numels`, elements of each parameter, float32 `[parameters]`; `of_block`, the parameter that each block
    belongs to, int64 `[blocks]`.
    """

    def __init__(self, segments: Sequence[Segment]) -> None:
        device = segments[0].param.device
        blocks = torch.tensor([-(-s.numel // BLOCK) for s in segments], device=device)
        self.numels = torch.tensor([float(s.numel) for s in segments], device=device)
        self.of_block = torch.arange(len(segments), device=device).repeat_interleave(blocks)
        gaps = [torch.arange(s.stop, -(-s.stop // BLOCK) * BLOCK, device=device) for s in segments]
        self._gaps = torch.cat(gaps)

    def sum(self, flat: Tensor) -> Tensor:
        """The sum of each parameter's elements, in float32 at least; the gaps must be zero. Shape `[parameters]`."""
        by_block = flat.view(-1, BLOCK).sum(1, dtype=torch.promote_types(flat.dtype, torch.float32))
        return by_block.new_zeros(len(self.numels)).index_add_(0, self.of_block, by_block)

    def amax(self, flat: Tensor) -> Tensor:
        """The largest magnitude of each parameter. Shape `[parameters]`."""
        by_block = flat.view(-1, BLOCK).abs().amax(1)
        return by_block.new_zeros(len(self.numels)).scatter_reduce_(0, self.of_block, by_block, "amax")

    def spread(self, numbers: Tensor) -> Tensor:
        """Each parameter's number at every one of its elements. Shape `[numel]`."""
        return numbers[self.of_block].repeat_interleave(BLOCK)

    def clear_gaps(self, flat: Tensor) -> None:
        """Make what lies between parameters zero, in place."""
        flat.index_fill_(0, self._gaps, 0)


def chunks(start: int, stop: int, device: torch.device) -> Iterator[slice]:
    """The span `start .. stop` in parts that fit into a CPU's cache; in one part on other devices."""
    step = CHUNK if device.type == "cpu" else max(1, stop - start)
    for first in range(start, stop, step):
        yield slice(first, min(first + step, stop))


def bits_of(flat: Tensor) -> Tensor:
    """The integers that floats are in memory. Without their sign bit they are ordered as the floats are, NaN last."""
    return flat.view({2: torch.int16, 4: torch.int32, 8: torch.int64}[flat.element_size()])


def block_maxima(flat: Tensor, out: Tensor | None = None) -> Tensor:
    """The largest magnitude of each block of 64. Shape `[numel / 64]`; NaN where a block holds one.

    The largest integers of rows are found several times faster than the largest floats.
    """
    maxima = torch.empty(flat.numel() // BLOCK, dtype=flat.dtype, device=flat.device) if out is None else out
    bits = bits_of(flat)
    torch.amax((bits & torch.iinfo(bits.dtype).max).view(-1, BLOCK), 1, out=bits_of(maxima))
    return maxima
