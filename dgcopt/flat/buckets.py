"""Buckets: parameters laid out in one flat tensor, each in a segment that starts at a block boundary.

A block of 64 elements belongs to one parameter only, so per-tensor work on a whole bucket is vector work on its
blocks. The gaps behind parameters are zero in every gradient that an exchange is given, and in all memory; its result
may hold anything there.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import TypeAlias, TypeVar

import torch
from torch import Tensor

from ..errors import ConfigError
from ..kernels import BLOCK, sent

__all__ = ["Bucket", "PerTensor", "Segment", "build_buckets"]

IN_ROWS = torch.contiguous_format

LONGEST = 2**31 - BLOCK
"""Largest length of a bucket with several parameters, unless the user has grouped them: positions fit into an int32."""


@dataclass(frozen=True, eq=False)
class Segment:
    """The span `start .. stop` of a flat tensor that belongs to one parameter."""

    name: str
    param: Tensor
    start: int

    @cached_property
    def numel(self) -> int:
        return self.param.numel()

    @property
    def stop(self) -> int:
        return self.start + self.numel

    def check_size(self) -> None:
        """Raise ConfigError if the parameter's number of elements has changed."""
        if self.param.numel() != self.numel:
            raise ConfigError(
                f"parameter {self.name!r} had {self.numel} elements when it was last exchanged, and has "
                f"{self.param.numel()}: make the optimizer anew for parameters of another size"
            )

    def view(self, flat: Tensor) -> Tensor:
        """Return this parameter's part of `flat` in its shape, and channels-last if the parameter is."""
        span, (order, strides) = flat[self.start : self.stop], self._lies
        return span.view(self.param.shape) if order is IN_ROWS else span.as_strided(self.param.shape, strides)

    def flatten(self, tensor: Tensor) -> Tensor:
        """Return the inverse of `view` for a tensor of the parameter's shape, contiguous.

        An alias of the tensor, or a copy if its memory order is another one.
        """
        if tensor.layout != torch.strided:
            tensor = tensor.to_dense()
        tensor = tensor.detach().resolve_neg()  # loops read memory, in which a lazy negation has not happened
        order, _ = self._lies
        if order is IN_ROWS:
            return tensor.reshape(-1).contiguous()
        return tensor.contiguous(memory_format=order).as_strided((self.numel,), (1,))

    @cached_property
    def _lies(self) -> tuple[torch.memory_format, tuple[int, ...]]:
        """The parameter's memory order and strides at the first use; memory keeps them."""
        param = self.param
        for order, dims in ((torch.channels_last, 4), (torch.channels_last_3d, 5)):
            if param.dim() == dims and not param.is_contiguous() and param.is_contiguous(memory_format=order):
                return order, param.stride()
        return IN_ROWS, ()


class PerTensor:
    """Statistics per parameter of a flat tensor, of all parameters at once.

    Attributes:
        numels: number of elements of each parameter, int64 `[parameters]`.
        of_block: index of each block's parameter, int64 `[blocks]`.
    """

    def __init__(self, segments: Sequence[Segment]) -> None:
        device = segments[0].param.device
        numels = torch.tensor([s.numel for s in segments])
        blocks = (numels + BLOCK - 1) // BLOCK
        self.numels = sent(numels, device)
        self.of_block = sent(torch.arange(len(segments)).repeat_interleave(blocks), device)
        stops, lengths = torch.tensor([s.stop for s in segments]), blocks * BLOCK - numels
        behind = torch.arange(int(lengths.sum())) - (lengths.cumsum(0) - lengths).repeat_interleave(lengths)
        self._gaps = sent(stops.repeat_interleave(lengths) + behind, device)

    def sum(self, flat: Tensor) -> Tensor:
        """Return the sum of each parameter's elements, in float32 at least; gaps must be zero. Shape `[parameters]`."""
        wide = torch.promote_types(flat.dtype, torch.float32)
        by_block = flat.view(-1, BLOCK).sum(1, dtype=wide).double()  # added up one after the other
        return by_block.new_zeros(len(self.numels)).index_add_(0, self.of_block, by_block).to(wide)

    def amax(self, flat: Tensor) -> Tensor:
        """Return the largest magnitude of each parameter. Shape `[parameters]`."""
        by_block = flat.view(-1, BLOCK).abs().amax(1)
        return by_block.new_zeros(len(self.numels)).scatter_reduce_(0, self.of_block, by_block, "amax")

    def spread(self, numbers: Tensor) -> Tensor:
        """Return each parameter's number at all of its elements. Shape `[numel]`."""
        return numbers[self.of_block].repeat_interleave(BLOCK)

    def outside(self, positions: Tensor) -> Tensor:
        """Return True if any position (int64) is in a gap or out of range."""
        if not len(positions):
            return torch.zeros((), dtype=torch.bool)
        first, last = positions.aminmax()
        beyond = (first < 0) | (last >= BLOCK * len(self.of_block))
        if not len(self._gaps):
            return beyond
        blocks = positions.div(BLOCK, rounding_mode="floor").clamp_(0, len(self.of_block) - 1)
        return beyond | (positions - BLOCK * blocks >= self._room[blocks]).any()

    @cached_property
    def _room(self) -> Tensor:
        """Return the number of elements in each block."""
        room = torch.full_like(self.of_block, BLOCK)
        last = (self.of_block.diff(append=self.of_block.new_tensor([-1])) != 0).nonzero().squeeze(1)
        room[last] = (self.numels - 1) % BLOCK + 1
        return room

    def clear_gaps(self, flat: Tensor) -> None:
        """Set the gaps between parameters to zero, in place."""
        flat.index_fill_(0, self._gaps, 0)


@dataclass(eq=False)
class Bucket:
    """Parameters of one dtype, device and kind that lie in flat tensors together.

    Attributes:
        numel: length of its flat tensors.
        kind: the algorithm's kind for its parameters.
    """

    index: int
    segments: tuple[Segment, ...]
    kind: Hashable
    numel: int

    @property
    def label(self) -> str:
        """The name of the bucket in messages: its index, its first and its last parameter."""
        first, last = self.segments[0].name, self.segments[-1].name
        return f"bucket {self.index} ({first}{f' ... {last}' if len(self.segments) > 1 else ''})"

    @property
    def device(self) -> torch.device:
        return self.segments[0].param.device

    @property
    def is_cpu(self) -> bool:
        return self.device.type == "cpu"

    def empty(self) -> Tensor:
        """Return a flat tensor of zeros in the parameters' dtype."""
        return self.segments[0].param.new_zeros(self.numel, requires_grad=False)

    @torch.no_grad()
    def read(self) -> Tensor:
        """Return a flat copy of the parameters."""
        flat = self.empty()
        torch._foreach_copy_([s.view(flat) for s in self.segments], [s.param.detach() for s in self.segments])
        return flat

    @torch.no_grad()
    def write(self, flat: Tensor) -> None:
        """Copy `flat` to the parameters."""
        torch._foreach_copy_([s.param.detach() for s in self.segments], [s.view(flat) for s in self.segments])

    def by_name(self, flat: Tensor) -> Iterator[tuple[str, Tensor]]:
        """Yield each parameter's name and its view of a flat tensor."""
        for segment in self.segments:
            yield segment.name, segment.view(flat)


AnyBucket = TypeVar("AnyBucket", bound=Bucket)

Key: TypeAlias = tuple[torch.device, torch.dtype, Hashable, int | None]
"""Properties that parameters of a bucket share: device, dtype, kind, and the user's group."""


def build_buckets(
    named: Sequence[tuple[str, Tensor]],
    kind_of: Callable[[str, Tensor], Hashable],
    bucket_bytes: int,
    first_bucket_bytes: int,
    group_of: Mapping[str, int] | None,
    make: type[AnyBucket],
) -> list[AnyBucket]:
    """Lay parameters out in buckets, in the order in which their gradients become ready.

    Args:
        named: parameters in gradient-ready order.
        kind_of: returns a parameter's kind; a bucket has one kind, dtype and device.
        bucket_bytes: size at which a bucket is full; it is too if the next parameter would make it longer than LONGEST.
        first_bucket_bytes: the same for the first one, small so that the exchange starts early.
        group_of: the user's group by parameter name; a group has one bucket of any size.
        make: the class of the buckets.

    Returns the buckets in the order in which their last gradients become ready: the launch order.
    """
    closed: list[tuple[int, Hashable, list[tuple[str, Tensor]]]] = []
    filling: dict[Key, list[tuple[str, Tensor]]] = {}
    filled: dict[Key, int] = {}
    lengths: dict[Key, int] = {}
    last: dict[Key, int] = {}

    def close(key: Key) -> None:
        closed.append((last.pop(key), key[2], filling.pop(key)))
        del filled[key], lengths[key]

    for place, (name, param) in enumerate(named):
        group = None if group_of is None else group_of.get(name)
        key = (param.device, param.dtype, kind_of(name, param), group)
        length = -(-param.numel() // BLOCK) * BLOCK
        if group is None and key in filling and lengths[key] + length > LONGEST:
            close(key)
        filling.setdefault(key, []).append((name, param))
        filled[key] = filled.get(key, 0) + param.numel() * param.element_size()
        lengths[key] = lengths.get(key, 0) + length
        last[key] = place
        if group is None and filled[key] >= (bucket_bytes if closed else first_bucket_bytes):
            close(key)
    for key in list(filling):
        close(key)
    buckets = []
    for index, (_, kind, members) in enumerate(sorted(closed, key=lambda entry: entry[0])):
        segments, start = [], 0
        for name, param in members:
            segments.append(Segment(name, param, start))
            start += -(-param.numel() // BLOCK) * BLOCK
        buckets.append(make(index, tuple(segments), kind, start))
    return buckets
