"""The gradient of a bucket: flat, in place in autograd's tensors, or as a sparse sum."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from ..kernels import BLOCK, Parts, add_at, copy_scaled, peaks
from .buckets import Bucket, Segment

__all__ = [
    "GradientBucket",
    "HiddenGradients",
    "LocalGradient",
    "SparseSum",
    "copy_shared_gradients",
    "is_finite",
    "rounded",
    "values_of",
]


LARGE = 2**14
"""Elements of a large gradient: copying them takes about as long as making a view."""

SMALL = 2**12
"""Elements of a small gradient: checking it alone takes longer than copying it with many others."""


def values_of(grad: Tensor) -> Tensor:
    """Return the elements of a gradient; of a sparse one its stored values."""
    return grad._values() if grad.is_sparse else grad


def is_finite(grad: Tensor) -> bool:
    """Return True if no element is NaN or Inf. Waits for the device."""
    return bool(peaks([values_of(grad)]).isfinite())


def copy_shared_gradients(params: Sequence[Tensor]) -> None:
    """Copy gradients that are one tensor for several parameters, as users may set it: each is written to."""
    given = [param.grad for param in params]
    given = [grad for grad in given if grad is not None]
    if len(set(map(id, given))) == len(given):  # without a call for each
        return
    seen: set[int] = set()
    for param in params:
        if param.grad is not None and id(param.grad) in seen:
            param.grad = param.grad.clone()
        seen.add(id(param.grad))


class HiddenGradients:
    """Gradients that are set to None during an optimizer's own step, which skips their parameters."""

    def __init__(self) -> None:
        self._hidden: list[tuple[Tensor, Tensor | None]] = []

    def hide(self, params: Iterable[Tensor]) -> None:
        """Make the gradients of `params` None, until `show`."""
        for param in params:
            self._hidden.append((param, param.grad))
            param.grad = None

    def show(self) -> None:
        """Restore all hidden gradients."""
        while self._hidden:
            param, grad = self._hidden.pop()
            param.grad = grad


class SparseSum:
    """The result of an exchange in which all but a few coordinates are zero.

    Holds positions in the flat gradient (int64, strictly ascending within one message) and values, summed in the order
    of `add`. For a gradient of half precision the sum is made in float32 and rounded once, to a finite number if it is
    finite. The rounding error is lost, as in a dense sum of half precision.

    Attributes:
        messages: positions and values of each message.
        whole: the same in fewer tensors, as they arrived.
    """

    def __init__(self) -> None:
        self.messages: list[tuple[Tensor, Tensor]] = []
        self.whole: list[tuple[Tensor, Tensor]] = []

    def add(self, positions: Tensor, values: Tensor) -> None:
        """Add one message."""
        self.messages.append((positions, values))
        self.whole.append((positions, values))

    def add_rows(self, positions: Tensor, values: Tensor, counts: Tensor) -> None:
        """Add several messages, concatenated, with `counts` coordinates each."""
        rows = counts.tolist()
        self.messages += zip(positions.split(rows), values.split(rows), strict=True)
        self.whole.append((positions, values))

    def add_to(self, flat: Tensor) -> Tensor:
        """Add the sum to a flat gradient, and return it."""
        for positions, values in self.addends(flat.dtype):
            flat.index_add_(0, positions, values)
        return flat

    def addends(self, dtype: torch.dtype) -> list[tuple[Tensor, Tensor]]:
        """Return positions and values to add, one pair after the other, to a flat gradient of `dtype`."""
        return [(positions, rounded(values, dtype)) for positions, values in self._for(dtype)]

    def _for(self, dtype: torch.dtype) -> list[tuple[Tensor, Tensor]]:
        """Return the messages for a gradient of `dtype`; one with the sum of all if each addition would be rounded.

        Of a position in several messages one has the sum and the others zero: merging them would wait for the device.
        """
        wider = torch.promote_types(dtype, torch.float32)
        if wider == dtype or len(self.messages) < 2:
            return self.messages
        lengths = [len(positions) for positions, _ in self.messages]
        positions, order = torch.cat([positions for positions, _ in self.messages]).sort()
        first = torch.ones_like(positions, dtype=torch.bool)
        torch.ne(positions[1:], positions[:-1], out=first[1:])
        number = first.cumsum(0) - 1
        places = torch.empty_like(order).index_copy_(0, order, number)
        sums = torch.zeros(len(positions), dtype=wider, device=positions.device)
        for target, (_, values) in zip(places.split(lengths), self.messages, strict=True):
            sums.index_add_(0, target, values.to(wider))
        return [(positions, torch.where(first, sums.index_select(0, number), 0))]

    def times(self, factor: float, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        """Return all positions, some of them twice, and `factor` times their values, for a gradient of `dtype`."""
        if not self.messages:
            return torch.empty(0, dtype=torch.int64), torch.empty(0, dtype=torch.float32)
        positions, values = (torch.cat(column) for column in zip(*self._for(dtype), strict=True))
        return positions, _in_range(values if factor == 1 else values * factor, dtype)


def rounded(values: Tensor, dtype: torch.dtype) -> Tensor:
    """Return values in another floating dtype; finite values stay finite, clamped to its range."""
    return _in_range(values, dtype).to(dtype)


def _in_range(values: Tensor, dtype: torch.dtype) -> Tensor:
    """Return values clamped so that their rounding to `dtype` is finite if they are."""
    limit = torch.finfo(dtype).max
    if limit >= torch.finfo(values.dtype).max:
        return values
    return torch.where(values.isinf(), values, values.clamp(-limit, limit))


class LocalGradient:
    """One rank's gradient of a bucket, read in place: flat, or in autograd's tensors.

    Args:
        whole: each parameter's gradient as `Segment.flatten` returns it, or one flat gradient; None is zero.
        scale: its factor.

    Attributes:
        is_clear: True once its reader has set it to zero.
    """

    def __init__(self, whole: Tensor | Parts, scale: float = 1.0) -> None:
        self.whole = whole
        self.scale = scale
        self.is_clear = False

    def mark_clear(self) -> None:
        """Note that its reader has set it to zero."""
        self.is_clear = True

    def within(self, start: int, stop: int) -> Tensor | Parts:
        """Return the gradient from `start` to `stop`, which are bounds of parameters, without the factor `scale`."""
        if not isinstance(self.whole, Parts):
            return self.whole[start:stop]
        starts, stops = self.whole.starts, self.whole.stops
        first, last = (int(torch.searchsorted(starts, at)) for at in (start, stop))
        if last - first == len(starts):
            return self.whole
        return Parts(self.whole.tensors[first:last], starts[first:last] - start, stops[first:last] - start)

    def has_cleared(self, place: int) -> bool:
        """Return True if the gradient at a place in the bucket existed and has been set to zero."""
        return self.is_clear and isinstance(self.whole, Parts) and self.whole.tensors[place] is not None


class Flat:
    """Flat memory for the gradient of a bucket.

    Attributes:
        parts: view of each parameter.
        gaps: flat views of the gaps behind them.
        spans: flat view of each part with its gap.
    """

    def __init__(self, tensor: Tensor, segments: Sequence[Segment]) -> None:
        self.tensor = tensor
        ends = [-(-segment.stop // BLOCK) * BLOCK for segment in segments]
        self.parts = [segment.view(tensor) for segment in segments]
        self.spans = [tensor[segment.start : end] for segment, end in zip(segments, ends, strict=True)]
        self.gaps = [tensor[s.stop : end] for s, end in zip(segments, ends, strict=True) if s.stop < end]
        self._places = {part.data_ptr() for part in self.parts}

    def holds_any(self, grads: Iterable[Tensor | None]) -> bool:
        """Return True if any of the gradients is a view of this memory."""
        plain = [grad for grad in grads if type(grad) is Tensor and grad.layout is torch.strided]
        return not self._places.isdisjoint(map(Tensor.data_ptr, plain))


@dataclass(eq=False)
class Touched:
    """The gradients of a bucket after a sparse sum: `values` at `positions` of the flat gradient, else zero."""

    bucket: GradientBucket
    positions: Tensor
    values: Tensor
    grads: Sequence[Tensor | None]
    versions: Sequence[int]

    def unchanged(self) -> Iterator[tuple[int, Segment]]:
        """Yield the parameters with unchanged gradients, and their places in the bucket."""
        for place, segment in enumerate(self.bucket.segments):
            grad = segment.param.grad
            if grad is not None and grad is self.grads[place] and grad._version == self.versions[place]:
                yield place, segment


@dataclass(eq=False)
class GradientBucket(Bucket):
    """A bucket with its gradients: copied into flat memory for an exchange, and written back after it.

    An exchange overwrites the flat gradient. Until the write-back each `param.grad` is this rank's own tensor, so that
    it can be sent again. Afterwards it is the same tensor object, as a view of the flat gradient. If gradients are set
    to zero and not to None there are two flat gradients: one holds the average, to which backward adds, while the other
    is sent.

    Attributes:
        in_place: True if gradients are not copied into flat memory.
        launches_early: True if it may be launched during backward.
        elements: number of elements without gaps.
        has_small_parts: True if gradients are small on average.
        touched: coordinates of a sparse sum, until the end of the step.
    """

    in_place: bool = False
    launches_early: bool = False

    def __post_init__(self) -> None:
        self.elements = sum(segment.numel for segment in self.segments)
        self.has_small_parts = self.numel < SMALL * len(self.segments)
        self._params = [segment.param for segment in self.segments]
        self._starts = torch.tensor([segment.start for segment in self.segments])
        self._stops = torch.tensor([segment.stop for segment in self.segments])
        self._sent: Flat | None = None
        self._other: Flat | None = None
        self._local: LocalGradient | None = None
        self._before: list[Tensor | None] = [None] * len(self.segments)
        self._large = [place for place, segment in enumerate(self.segments) if segment.numel >= LARGE]
        self.touched: Touched | None = None

    def set_exchange(self, in_place: bool, early: bool = False) -> None:
        """Set how the bucket is sent.

        Args:
            in_place: True if gradients stay where autograd left them.
            early: True if it may be launched during backward.
        """
        self.in_place, self.launches_early = in_place, early

    @property
    def grad(self) -> Tensor:
        """The flat gradient."""
        return self._to_send.tensor

    @property
    def _to_send(self) -> Flat:
        if self._sent is None:
            self._sent = Flat(self.empty(), self.segments)
        return self._sent

    def grads(self) -> list[Tensor | None]:
        """Return the parameters' current gradients."""
        return [param.grad for param in self._params]

    def keep_clear(self, grads: Sequence[Tensor | None]) -> None:
        """Switch to the other flat gradient if `grads` are views of this one; called before a step's first copy.

        They are after a write-back of `self.grad` and `zero_grad(set_to_none=False)`. The exchange overwrites the flat
        gradient, and accumulated gradients must survive an exchange that is repeated.
        """
        sent = self._to_send
        if sent.holds_any(grads):
            self._sent, self._other = self._other, sent

    def release(self, place: int) -> None:
        """Free the memory of a parameter's previous gradient on a CPU, once autograd has made the new one.

        If all were freed together at the end of a step, malloc would return the pages to the system, which clears them
        before it hands them out again: that takes longer than copying the gradients.
        """
        self._before[place] = None

    def fill(self, places: Sequence[int], grads: Sequence[Tensor | None], scale: float = 1.0) -> Tensor:
        """Copy `scale` times these parameters' gradients in, and clear the gaps behind them; None counts as zero.

        The last exchange may have left values in the gaps, which would count in means and norms of blocks.

        Returns their largest magnitudes, in float32 at least: NaN or Inf if any element is. Shape `[len(places)]`.
        """
        whole = self._to_send.spans
        spans = [whole[place] for place in places]
        parts = [
            span[:0] if grad is None else self.segments[place].flatten(grad)
            for place, grad, span in zip(places, grads, spans, strict=True)
        ]
        return copy_scaled(parts, spans, scale)

    def fill_whole(self, grads: Sequence[Tensor | None], scale: float = 1.0) -> Tensor:
        """`fill` for all parameters at once, in a fixed number of operations.

        Returns the largest magnitude of all: shape `[1]`.
        """
        whole = self._to_send
        strided = [grad for grad in grads if grad is not None and grad.layout is torch.strided]
        if len(strided) == len(grads):
            torch._foreach_copy_(whole.parts, strided)
        else:
            for part, grad in zip(whole.parts, grads, strict=True):
                if grad is None:
                    part.zero_()
                else:
                    part.copy_(grad if grad.layout is torch.strided else grad.to_dense())
        if whole.gaps:
            torch._foreach_zero_(whole.gaps)
        return peaks([whole.tensor]) if scale == 1 else copy_scaled([whole.tensor], [whole.tensor], scale)

    def _that_fit(self) -> list[Tensor | None]:
        """Return the gradients that can become views of flat memory in place; None for others."""
        dtype, device = self.segments[0].param.dtype, self.device
        return [
            grad
            if type(grad) is Tensor
            and grad.dtype is dtype
            and grad.device == device
            and grad.layout is torch.strided
            and not grad.requires_grad
            else None
            for grad in self.grads()
        ]

    def local(self, active: bool, scale: float) -> LocalGradient:
        """Return the gradient in autograd's tensors; zero unless `active`."""
        grads = [segment.param.grad if active else None for segment in self.segments]
        flat = [None if g is None else s.flatten(g) for s, g in zip(self.segments, grads, strict=True)]
        self._local = LocalGradient(self.parts(flat), scale)
        return self._local

    def prepare(
        self, result: Tensor | SparseSum, used: Sequence[bool] | None = None, factor: float = 1.0
    ) -> Callable[[], None]:
        """Return the write-back: each gradient becomes its part of `result` times `factor`, None if no rank `used` it.

        Does everything that may fail or allocate, and changes no gradient.
        """
        if isinstance(result, SparseSum):
            if self.in_place:
                return self._prepare_sum(result, used, factor)
            fill = self.filled_with(result, factor)
            parts = self._to_send.parts
        else:
            flat = result if factor == 1 else result * factor
            fill, dtype = None, self.segments[0].param.dtype
            if flat.dtype != dtype or self.numel < LARGE * len(self.segments):
                fill = functools.partial(self.grad.copy_, rounded(flat, dtype))
            sent = fill is not None or (self._sent is not None and _same_memory(self._sent.tensor, flat))
            parts = self._to_send.parts if sent else [segment.view(flat) for segment in self.segments]
        grads = self._that_fit()
        before: list[Tensor | None] = [None] * len(self.segments)
        for place in self._large if self.is_cpu else ():
            grad = grads[place]
            if grad is not None and (used is None or used[place]):
                before[place] = grad.detach()
        flags = used or itertools.repeat(True)
        # changes through `data` are not counted in the version
        values = [
            None if not is_used else part if grad is not None else part.data
            for grad, part, is_used in zip(grads, parts, flags, strict=False)
        ]

        def write() -> None:
            if fill is not None:  # only now, as the commit of memory may read the gradient
                fill()
            self.touched = None
            self._before = before
            for param, grad, value in zip(self._params, grads, values, strict=True):
                if value is None or grad is None:
                    param.grad = value
                else:
                    grad.data = value

        return write

    def filled_with(self, result: SparseSum, factor: float = 1.0) -> Callable[[], object]:
        """Return the function that sets the flat gradient to `factor` times a sparse sum."""
        flat, addends = self.grad, result.addends(self.segments[0].param.dtype)

        def fill() -> None:
            flat.zero_()
            for positions, values in addends:
                flat.index_add_(0, positions, values)
            if factor != 1:
                flat.mul_(factor)

        return fill

    def _prepare_sum(self, result: SparseSum, used: Sequence[bool] | None, factor: float) -> Callable[[], None]:
        """Prepare to write a sparse sum over autograd's own gradients, so that it needs no more memory."""
        count = len(self.segments)
        kept = [self._kept(place) if used is None or used[place] else (None, None, True) for place in range(count)]
        grads = [grad for grad, _, _ in kept]
        old = [place for place, (_, _, is_new) in enumerate(kept) if not is_new]
        add = self.prepare_sum([flat for _, flat, _ in kept], old, result, factor, self._local)

        def write() -> None:
            for param, (grad, _, is_new) in zip(self._params, kept, strict=True):
                if is_new:
                    param.grad = grad
            positions, sums = add()
            versions = [0 if grad is None else grad._version for grad in grads]
            self.touched = Touched(self, positions, sums, grads, versions)

        return write

    def prepare_sum(
        self,
        flats: Sequence[Tensor | None],
        old: Iterable[int],
        result: SparseSum,
        factor: float,
        local: LocalGradient | None,
    ) -> Callable[[], tuple[Tensor, Tensor]]:
        """Return the function that writes a sum over flat gradients, and returns its positions and the values there.

        Args:
            flats: the flat gradient of each parameter; None leaves the parameter out.
            old: places of those that hold this rank's own gradient, and are cleared first.
            result: the sum.
            factor: its factor.
            local: the gradients as the exchange has read them, of which it may have cleared some; None if it has not.
        """
        parts = self.parts(flats)
        positions, values = result.times(factor, self.segments[0].param.dtype)
        own = [(place, flat) for place in old if (flat := flats[place]) is not None]

        def write() -> tuple[Tensor, Tensor]:
            for place, flat in own:
                if local is None or not local.has_cleared(place):
                    flat.zero_()
            return positions, add_at(parts, positions, values)

        return write

    def parts(self, tensors: Sequence[Tensor | None]) -> Parts:
        """Return flat tensors of the parameters as parts of one."""
        return Parts(tensors, self._starts, self._stops)

    def _kept(self, place: int) -> tuple[Tensor | None, Tensor | None, bool]:
        """Return a gradient to write a sum over, or new zeros; its flat alias; and True if it is new."""
        segment = self.segments[place]
        param, grad = segment.param, segment.param.grad
        if grad is not None and grad.layout == torch.strided and grad.grad_fn is None and grad.dtype == param.dtype:
            flat = segment.flatten(grad)
            if flat.data_ptr() == grad.data_ptr():
                return grad, flat, False
        flat = param.new_zeros(segment.numel, requires_grad=False)
        return Segment(segment.name, param, 0).view(flat), flat, True  # in the bucket's memory order

    @torch.no_grad()
    def clear_gradients(self) -> None:
        """Set all gradients to zero."""
        for segment in self.segments:
            if segment.param.grad is not None:
                segment.param.grad.zero_()

    def release_gradients(self) -> None:
        """Release references to autograd's gradients, after the exchange or the optimizer's step."""
        self._local = self.touched = None


def _same_memory(one: Tensor, other: Tensor) -> bool:
    """Return True for two views of the same memory: a wire may return a new view of its input."""
    return one.data_ptr() == other.data_ptr() and one.dtype == other.dtype
