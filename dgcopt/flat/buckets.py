"""Buckets: parameters laid out in one flat tensor, each a named view that starts at a block boundary."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TypeVar

import torch
from torch import Tensor

from ..kernels import BLOCK
from .segments import Segment

__all__ = ["Bucket", "build_buckets"]


@dataclass(eq=False)
class Bucket:
    """Parameters of one dtype, device and kind that lie in flat tensors together.

    Attributes: `numel`, the length of its flat tensors; `kind`, the algorithm's kind for its parameters.
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
        bucket_bytes: size at which a bucket is full.
        first_bucket_bytes: the same for the first one, small so that the exchange starts early.
        group_of: the user's group by parameter name; a group has one bucket of any size.
        make: the class of the buckets.

    Returns the buckets in the order in which their last gradients become ready: the launch order.
    """
    closed: list[tuple[int, Hashable, list[tuple[str, Tensor]]]] = []
    filling: dict[Hashable, list[tuple[str, Tensor]]] = {}
    filled: dict[Hashable, int] = {}
    last: dict[Hashable, int] = {}
    for place, (name, param) in enumerate(named):
        group = None if group_of is None else group_of.get(name)
        key = (param.device, param.dtype, kind_of(name, param), group)
        filling.setdefault(key, []).append((name, param))
        filled[key] = filled.get(key, 0) + param.numel() * param.element_size()
        last[key] = place
        if group is None and filled[key] >= (bucket_bytes if closed else first_bucket_bytes):
            closed.append((place, key[2], filling.pop(key)))
            del filled[key], last[key]
    closed += [(last[key], key[2], members) for key, members in filling.items()]  # type: ignore[index]
    buckets = []
    for index, (_, kind, members) in enumerate(sorted(closed, key=lambda entry: entry[0])):
        segments, start = [], 0
        for name, param in members:
            segments.append(Segment(name, param, start))
            start += -(-param.numel() // BLOCK) * BLOCK
        buckets.append(make(index, tuple(segments), kind, start))
    return buckets
