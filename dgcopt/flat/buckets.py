"""Which parameters lie in flat memory together: one after another, each a named view on block boundaries."""

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

    Attributes: `numel`, the length of its flat tensors; `kind`, what an algorithm said of its parameters.
    """

    index: int
    segments: tuple[Segment, ...]
    kind: Hashable
    numel: int

    @property
    def label(self) -> str:
        """For messages: its place, its first parameter and its last."""
        first, last = self.segments[0].name, self.segments[-1].name
        return f"bucket {self.index} ({first}{f' ... {last}' if len(self.segments) > 1 else ''})"

    @property
    def device(self) -> torch.device:
        return self.segments[0].param.device

    @property
    def is_cpu(self) -> bool:
        return self.device.type == "cpu"

    def empty(self) -> Tensor:
        """A flat tensor of zeros, of the parameters' dtype."""
        return self.segments[0].param.new_zeros(self.numel, requires_grad=False)

    @torch.no_grad()
    def read(self) -> Tensor:
        """A flat copy of the parameters themselves."""
        flat = self.empty()
        torch._foreach_copy_([s.view(flat) for s in self.segments], [s.param.detach() for s in self.segments])
        return flat

    @torch.no_grad()
    def write(self, flat: Tensor) -> None:
        """Make the parameters what `flat` holds."""
        torch._foreach_copy_([s.param.detach() for s in self.segments], [s.view(flat) for s in self.segments])

    def by_name(self, flat: Tensor) -> Iterator[tuple[str, Tensor]]:
        """Each parameter's view of a flat tensor."""
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
        kind_of: parameters share a bucket only if this, their dtype and their device are equal.
        bucket_bytes: a bucket is closed once it holds as much.
        first_bucket_bytes: the same for the first one, small so that the exchange starts early.
        group_of: names of parameters that the user put in groups, which share one bucket of any size.
        make: the class of the buckets.

    Returns the buckets by the time when their last gradient is ready: the order to launch them in.
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
