"""Flat gradient memory: parameters laid out one after another, each a named view on block boundaries.

Tensors that a compressor keeps (residual, momentum) have the same layout, and move with their parameters when buckets
are built anew.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from .segments import BLOCK, CHUNK, LocalGradient, Segment, SparseSum, chunks

__all__ = ["Bucket", "Memory", "build_buckets", "copied"]

Memory = dict[str, dict[str, Tensor]]
"""What compressors keep, by kind and parameter name, in the parameters' shapes: `{"residual": {"fc.weight": ...}}`."""


def copied(memory: Memory) -> Memory:
    """The same, in tensors of its own."""
    return {kind: {n: t.detach().clone() for n, t in by_name.items()} for kind, by_name in memory.items()}


@dataclass(eq=False)
class Bucket:
    """Parameters of one dtype, device and kind whose gradients travel together.

    Attributes: `numel`, the length of its flat tensors; `kind`, what the compressor said of its parameters; `memory`,
    flat tensors that the compressor keeps; `in_place`, whether gradients stay where autograd left them.
    """

    index: int
    segments: tuple[Segment, ...]
    kind: Hashable
    numel: int
    in_place: bool = False
    memory: dict[str, Tensor] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self._grad: Tensor | None = None
        self._views: list[Tensor] = []
        self._gaps: list[Tensor | None] = []
        self._other: Tensor | None = None
        self._lent: list[Tensor] = []
        self._lent_from: Tensor | None = None
        self._local: LocalGradient | None = None
        self._touched: list[tuple[Segment, Tensor, Tensor, int]] = []
        first, last = self.segments[0].name, self.segments[-1].name
        self.label = f"bucket {self.index} ({first}{f' ... {last}' if len(self.segments) > 1 else ''})"

    @property
    def grad(self) -> Tensor:
        """The flat gradient, for exchanges that take it in one piece."""
        if self._grad is None:
            self._own(self.empty())
        assert self._grad is not None
        return self._grad

    def _own(self, flat: Tensor) -> None:
        self._grad = flat
        self._views = [segment.view(flat) for segment in self.segments]
        ends = [-(-segment.stop // BLOCK) * BLOCK for segment in self.segments]
        self._gaps = [flat[s.stop : end] if s.stop < end else None for s, end in zip(self.segments, ends, strict=True)]

    @property
    def is_cpu(self) -> bool:
        return self.segments[0].param.is_cpu

    def empty(self) -> Tensor:
        """A flat tensor of zeros, of the parameters' dtype."""
        return self.segments[0].param.new_zeros(self.numel, requires_grad=False)

    def keep_clear(self) -> None:
        """Before a step's first gradient is taken: move away if gradients themselves live in the flat one.

        They do after `hand_out(self.grad)` and `zero_grad(set_to_none=False)`. The exchange overwrites the flat
        gradient, and what the user's code accumulated must outlive an exchange that has to be repeated.
        """
        if _same_memory(self._lent_from, self.grad) and any(
            segment.param.grad is view for segment, view in zip(self.segments, self._lent, strict=True)
        ):
            other = self.empty() if self._other is None else self._other
            self._other = self.grad
            self._own(other)

    def fill(self, place: int, grad: Tensor | None) -> Tensor:
        """Take one parameter's gradient in, and make the gap behind it zero; None counts as zero.

        What the last exchange left in the flat gradient, where it worked in place or its result was copied to, fills
        gaps as well, and would count as gradient where compressors take means and norms of blocks.

        Returns the sum of its elements, in float32 at least: NaN or Inf if any element is. It costs next to nothing
        while they are in the cache.
        """
        wide = torch.promote_types(self.grad.dtype, torch.float32)
        view, gap = self._views[place], self._gaps[place]
        if gap is not None:
            gap.zero_()
        if grad is None:
            return view.zero_().new_zeros((), dtype=wide)
        if grad.layout != torch.strided:
            grad = grad.to_dense()
        if view.numel() <= CHUNK or not (view.is_contiguous() and grad.is_contiguous()):
            return view.copy_(grad).sum(dtype=wide)
        here, there = view.view(-1), grad.view(-1)
        return torch.stack(
            [here[span].copy_(there[span]).sum(dtype=wide) for span in chunks(0, here.numel(), here.device)]
        ).sum()

    def local(self, active: bool, scale: float) -> LocalGradient:
        """The gradient where autograd left it; zero unless `active`."""
        grads = [segment.param.grad if active else None for segment in self.segments]
        flat = [None if g is None else s.flatten(g) for s, g in zip(self.segments, grads, strict=True)]
        self._local = LocalGradient(self.segments, flat, scale)
        return self._local

    def hand_out(self, result: Tensor | SparseSum, used: Sequence[bool] | None = None, factor: float = 1.0) -> None:
        """Make every parameter's gradient its part of `result` times `factor`, or None where no rank `used` it."""
        if isinstance(result, SparseSum):
            if self.in_place:
                self._scatter(result, used, factor)
                return
            result = result.add_to(self.grad.zero_())
        flat = result if factor == 1 else result * factor
        if flat.dtype != self.segments[0].param.dtype:
            flat = self.grad.copy_(flat)
        self._touched = []
        if not _same_memory(self._lent_from, flat):
            self._lent_from = flat
            self._lent = [segment.view(flat).data for segment in self.segments]  # each counts its changes by itself
        for place, segment in enumerate(self.segments):
            segment.param.grad = self._lent[place] if used is None or used[place] else None

    def _scatter(self, result: SparseSum, used: Sequence[bool] | None, factor: float) -> None:
        """Write a sum over the gradients where autograd left them, so that it needs no memory of its own."""
        starts = torch.tensor([s.start for s in self.segments], device=self.segments[0].param.device)
        cuts = [[*torch.searchsorted(p, starts).tolist(), len(p)] for p, _ in result.messages]
        self._lent, self._lent_from, self._touched = [], None, []
        for place, segment in enumerate(self.segments):
            if used is not None and not used[place]:
                segment.param.grad = None
                continue
            flat = self._cleared(segment)
            touched = []
            for (positions, values), cut in zip(result.messages, cuts, strict=True):
                span = slice(cut[place], cut[place + 1])
                here = positions[span] - segment.start
                flat.index_add_(0, here, (values[span] if factor == 1 else values[span] * factor).to(flat.dtype))
                touched.append(here)
            grad = segment.param.grad
            assert grad is not None
            self._touched.append((segment, torch.cat(touched), grad, grad._version))

    def _cleared(self, segment: Segment) -> Tensor:
        """The parameter's gradient, made zero where it lies, or a new one where that cannot be; flat."""
        param, grad = segment.param, segment.param.grad
        if grad is not None and grad.layout == torch.strided and grad.grad_fn is None and grad.dtype == param.dtype:
            flat = segment.flatten(grad)
            if flat.data_ptr() == grad.data_ptr():
                return flat if self._local is not None and self._local.is_clear(segment) else flat.zero_()
        flat = param.new_zeros(segment.numel, requires_grad=False)
        param.grad = Segment(segment.name, param, 0).view(flat)  # in whatever order the bucket has its elements
        return flat

    def touched(self) -> Iterator[tuple[Segment, Tensor]]:
        """Parameters whose gradient is as a sparse sum left it, and the only positions where it is not zero.

        Positions are in `Segment.flatten`'s order, and may be named twice.
        """
        for segment, positions, grad, version in self._touched:
            if segment.param.grad is grad and grad._version == version:
                yield segment, positions

    def let_go(self) -> None:
        """Keep no gradient alive that autograd made: the exchange, or the optimizer's step, is over."""
        self._local, self._touched = None, []

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
                flat = self.memory[kind] = self.empty().to(held[0][1].dtype)
            for segment, tensor in held:
                segment.view(flat).copy_(tensor)


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
        buckets.append(Bucket(index, tuple(segments), kind, start))
    return buckets
