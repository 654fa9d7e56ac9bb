"""The gradient of several parameters: in one piece, where autograd left its parts, or as a sum of few coordinates."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from .buckets import Bucket
from .segments import BLOCK, CHUNK, Segment, chunks

__all__ = ["GradientBucket", "HiddenGradients", "LocalGradient", "SparseSum", "is_finite", "sum_of", "values_of"]


def values_of(grad: Tensor) -> Tensor:
    """What a gradient holds; of a sparse one only the elements that it has."""
    return grad._values() if grad.is_sparse else grad


def sum_of(grad: Tensor) -> Tensor:
    """NaN or Inf if any element is; in float32 at least, where half precision would overflow."""
    values = values_of(grad)
    return values.sum(dtype=torch.promote_types(values.dtype, torch.float32))


def is_finite(grad: Tensor, total: Tensor | float | None = None) -> bool:
    """Whether no element is NaN or Inf. Waits for the device.

    The sum tells nearly always, at the cost of one pass, or of none if `total` is that sum already; finite numbers may
    have an infinite one.
    """
    total = sum_of(grad) if total is None else total
    return math.isfinite(total) or bool(values_of(grad).isfinite().all())


class HiddenGradients:
    """Gradients out of an optimizer's sight: its own step passes over parameters without one."""

    def __init__(self) -> None:
        self._hidden: list[tuple[Tensor, Tensor | None]] = []

    def hide(self, params: Iterable[Tensor]) -> None:
        """Make the gradients of `params` None, until `show`."""
        for param in params:
            self._hidden.append((param, param.grad))
            param.grad = None

    def show(self) -> None:
        """Put all back that were hidden."""
        while self._hidden:
            param, grad = self._hidden.pop()
            param.grad = grad


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

    def add_to(self, flat: Tensor) -> Tensor:
        """Add the sum to a flat gradient, and return that."""
        for positions, values in self.messages:
            flat.index_add_(0, positions, values.to(flat.dtype))
        return flat


class LocalGradient:
    """One rank's gradient of a bucket, read where it lies: in one piece, or where autograd left its parts.

    Args:
        parts: each parameter's gradient as `Segment.flatten` gives it; None counts as zero.
        scale: what it is multiplied by.
    """

    def __init__(self, segments: Sequence[Segment], parts: Sequence[Tensor | None], scale: float = 1.0) -> None:
        self._parts = [(s.start, s.stop, part) for s, part in zip(segments, parts, strict=True)]
        self.scale = scale
        self._clear: set[int] = set()

    @staticmethod
    def of_flat(flat: Tensor, segments: Sequence[Segment]) -> LocalGradient:
        """The same for a gradient that is in one piece already."""
        gradient = LocalGradient(segments, [None] * len(segments))
        gradient._parts = [(0, len(flat), flat)]
        return gradient

    def within(self, start: int, stop: int, clear: bool = False) -> Iterator[tuple[slice, Tensor | None]]:
        """The gradient from `start` to `stop`, yet to be multiplied by `scale`: where each part lies, and the part.

        None is zero. With `clear` whoever takes a part makes it zero.
        """
        for first, last, part in self._parts:
            span = slice(max(start, first), min(stop, last))
            if span.start < span.stop:
                yield span, None if part is None else part[span.start - first : span.stop - first]
                if clear and part is not None and start <= first and last <= stop:
                    self._clear.add(first)

    def is_clear(self, segment: Segment) -> bool:
        """Whether a parameter's gradient was made zero by who took it `within` a span."""
        return segment.start in self._clear


@dataclass(eq=False)
class GradientBucket(Bucket):
    """A bucket with its gradients, on their way into an exchange and out of it.

    Attributes: `in_place`, whether gradients stay where autograd left them, and are not copied into a flat one.
    """

    in_place: bool = False

    def __post_init__(self) -> None:
        self._grad: Tensor | None = None
        self._views: list[Tensor] = []
        self._gaps: list[Tensor | None] = []
        self._other: Tensor | None = None
        self._lent: list[Tensor] = []
        self._lent_from: Tensor | None = None
        self._local: LocalGradient | None = None
        self._touched: list[tuple[Segment, Tensor, Tensor, int]] = []

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


def _same_memory(one: Tensor | None, other: Tensor) -> bool:
    """A wire may return another view of the tensor that it was given."""
    return one is not None and one.data_ptr() == other.data_ptr() and one.dtype == other.dtype
