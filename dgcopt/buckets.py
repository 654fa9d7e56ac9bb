"""Flat gradient memory: parameters laid out one after another, each a named view on block boundaries.

A block of 64 elements belongs to one parameter only, so per-tensor work on a whole bucket is vector work on its
blocks. The gaps are zero and stay zero. Tensors that a compressor keeps (residual, momentum) have the same layout,
and move with their parameters when buckets are built anew.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

__all__ = ["BLOCK", "Bucket", "Memory", "Segment", "block_maxima", "build_buckets", "chunks"]

BLOCK = 64
"""Elements per block; every parameter starts on a block boundary."""

CHUNK = 2048 * BLOCK
"""Elements on which several operations follow one another on a CPU: 512 kB of float32, which stay in its cache."""

Memory = dict[str, dict[str, Tensor]]
"""What compressors keep, by kind and parameter name, in the parameters' shapes: `{"residual": {"fc.weight": ...}}`."""


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
        for order, dims in ((torch.channels_last, 4), (torch.channels_last_3d, 5)):
            if param.dim() == dims and not param.is_contiguous() and param.is_contiguous(memory_format=order):
                return span.as_strided(param.shape, param.stride())
        return span.view(param.shape)


@dataclass(eq=False)
class Bucket:
    """Parameters of one dtype, device and kind whose gradients travel together.

    Attributes: `grad`, the flat gradient; `memory`, flat tensors of the same layout that the compressor keeps;
    `kind`, what the compressor said of its parameters.
    """

    index: int
    segments: tuple[Segment, ...]
    kind: Hashable
    grad: Tensor
    memory: dict[str, Tensor] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.views = [segment.view(self.grad) for segment in self.segments]
        self._lent: list[Tensor] = []
        self._lent_from: Tensor | None = None
        self._versions: list[int] = []
        self._other: Tensor | None = None
        first, last = self.segments[0].name, self.segments[-1].name
        self.label = f"bucket {self.index} ({first}{f' ... {last}' if len(self.segments) > 1 else ''})"

    def keep_clear(self) -> None:
        """Before a step's first gradient is taken: move away if gradients themselves live in the flat one.

        They do after `hand_out(self.grad)` and `zero_grad(set_to_none=False)`. The exchange overwrites the flat
        gradient, and what the user's code accumulated must outlive an exchange that has to be repeated.
        """
        if _same_memory(self._lent_from, self.grad) and any(
            segment.param.grad is view for segment, view in zip(self.segments, self._lent, strict=True)
        ):
            other = torch.zeros_like(self.grad) if self._other is None else self._other
            self.grad, self._other = other, self.grad
            self.views = [segment.view(self.grad) for segment in self.segments]

    def fill(self, place: int, grad: Tensor | None) -> Tensor:
        """Take one parameter's gradient in; None counts as zero.

        Returns the sum of its elements, in float32 at least: NaN or Inf if any element is. It costs next to nothing
        while they are in the cache.
        """
        view = self.views[place]
        wide = torch.promote_types(view.dtype, torch.float32)
        if grad is None:
            return view.zero_().new_zeros((), dtype=wide)
        if grad.layout != torch.strided:
            grad = grad.to_dense()
        if not (view.is_contiguous() and grad.is_contiguous()):
            return view.copy_(grad).sum(dtype=wide)
        here, there = view.view(-1), grad.view(-1)
        return torch.stack(
            [here[span].copy_(there[span]).sum(dtype=wide) for span in chunks(0, here.numel(), here.device)]
        ).sum()

    def hand_out(self, flat: Tensor, used: Sequence[bool] | None = None) -> None:
        """Make every parameter's gradient its view of `flat`, or None where it was not `used` on any rank.

        Each view counts its changes by itself, which `written` and the engine rely on.
        """
        if not _same_memory(self._lent_from, flat):
            self._lent_from = flat
            self._lent = [segment.view(flat).data for segment in self.segments]
        self._versions = [view._version for view in self._lent]
        for place, segment in enumerate(self.segments):
            segment.param.grad = self._lent[place] if used is None or used[place] else None

    @property
    def written(self) -> bool:
        """Whether gradients that were handed out have been changed since, by the user or the optimizer."""
        return any(view._version != version for view, version in zip(self._lent, self._versions, strict=True))

    def export(self, into: Memory) -> None:
        """Write the memory out by parameter name."""
        for kind, flat in self.memory.items():
            for segment in self.segments:
                into.setdefault(kind, {})[segment.name] = segment.view(flat).clone()

    def adopt(self, memory: Memory) -> None:
        """Take the memory of this bucket's parameters in; parameters that have none start at zero."""
        for kind, by_name in memory.items():
            held = [(segment, by_name[segment.name]) for segment in self.segments if segment.name in by_name]
            if not held:
                continue
            flat = self.memory.get(kind)
            if flat is None:
                flat = self.memory[kind] = torch.zeros_like(self.grad, dtype=held[0][1].dtype)
            for segment, tensor in held:
                segment.view(flat).copy_(tensor)


def chunks(start: int, stop: int, device: torch.device) -> Iterator[slice]:
    """The span `start .. stop` in parts that fit into a CPU's cache; in one part on other devices."""
    step = CHUNK if device.type == "cpu" else max(1, stop - start)
    for first in range(start, stop, step):
        yield slice(first, min(first + step, stop))


def block_maxima(flat: Tensor, out: Tensor | None = None) -> Tensor:
    """The largest magnitude of each block of 64. Shape `[numel / 64]`; NaN where a block holds one.

    Two reductions that need no memory of their own are several times faster than one over `flat.abs()`.
    """
    blocks = flat.view(-1, BLOCK)
    return torch.maximum(blocks.amax(1), blocks.amin(1).neg_(), out=out)


def _same_memory(one: Tensor | None, other: Tensor) -> bool:
    """A wire may return another view of the tensor that it was given."""
    return one is not None and one.data_ptr() == other.data_ptr() and one.dtype == other.dtype


def build_buckets(
    named: Sequence[tuple[str, Tensor]],
    kind_of: Callable[[str, Tensor], Hashable],
    bucket_bytes: int,
    first_bucket_bytes: int,
    group_of: Mapping[str, int] | None = None,
) -> list[Bucket]:
    """Lay parameters out in buckets, in the order in which their gradients become ready.

    Args:
        named: parameters in gradient-ready order.
        kind_of: parameters share a bucket only if this, their dtype and their device are equal.
        bucket_bytes: a bucket is closed once it holds as much.
        first_bucket_bytes: the same for the first one, small so that the exchange starts early.
        group_of: names of parameters that the user put in groups, which share one bucket of any size.

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
        flat = torch.zeros(start, dtype=members[0][1].dtype, device=members[0][1].device)
        buckets.append(Bucket(index, tuple(segments), kind, flat))
    return buckets
