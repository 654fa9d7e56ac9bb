"""One DDP bucket: its parts that travel together, and the write-back of their results."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from ...flat.buckets import build_buckets
from ...flat.gradient import GradientBucket, LocalGradient, SparseSum, rounded
from ...kernels import peaks

__all__ = ["Part", "PartGradients", "gradients_of", "parts_of"]


def gradients_of(params: Sequence[Tensor], buffer: Tensor) -> list[Tensor]:
    """Return views of the gradients in a bucket's buffer.

    `GradBucket.gradients()` takes all of them for contiguous (torch 2.13); where a parameter is dense in memory, DDP
    lays its gradient out as the parameter (`Reducer::initialize_bucket_views`).
    """
    spans = buffer.split([param.numel() for param in params])
    return [
        span.view(param.shape)
        if param.is_contiguous() or _has_gaps(param)
        else span.as_strided(param.shape, param.stride())
        for span, param in zip(spans, params, strict=True)
    ]


def _has_gaps(param: Tensor) -> bool:
    """True if its elements do not fill a span of memory, each its own place."""
    return torch.empty_like(param, device="meta").stride() != param.stride()


@dataclass(eq=False)
class Part:
    """Parameters of one DDP bucket that travel together: `places` in that bucket.

    `takes_sums`: sparse sums are added where DDP has gradients, on a CPU, if it lays out elements as the bucket does.
    """

    bucket: GradientBucket
    places: list[int]
    takes_sums: bool

    def fill(self, grads: Sequence[Tensor], factor: float) -> Tensor:
        """Copy gradients into their bucket, if they do not stay where DDP has them.

        Returns the largest magnitude of each, which tells of NaN and Inf.
        """
        if self.bucket.in_place:
            return peaks(grads)
        return self.bucket.fill(range(len(grads)), grads, factor)

    def local(self, grads: Sequence[Tensor], factor: float) -> LocalGradient:
        """Return the gradients in DDP's memory."""
        flat = [segment.flatten(grad) for segment, grad in zip(self.bucket.segments, grads, strict=True)]
        return LocalGradient(self.bucket.parts(flat), factor)


@dataclass(eq=False)
class PartGradients:
    """Gradients of one exchange, in DDP's `buffer`, and `magnitudes`, the largest magnitude of each.

    Sparse gradients have no `part`.
    """

    part: Part | None
    params: list[Tensor]
    buffer: Tensor
    grads: list[Tensor]
    magnitudes: Tensor

    def prepare(
        self,
        result: Tensor | SparseSum,
        local: LocalGradient | None,
        used: Sequence[bool],
        zeros: Sequence[bool],
        scale: float,
    ) -> Callable[[], None]:
        """Return the function that writes the result times `scale` to DDP's gradients, or zero if no rank `used` them.

        `zeros` are True for parameters whose gradient is zero on this rank. It is written to `param.grad` too, since
        DDP leaves that as it is if no rank has used the parameter. Does everything that may fail or allocate.
        """
        assert self.part is not None
        bucket = self.part.bucket
        fill: Callable[[], object] | None = None
        if isinstance(result, SparseSum) and not self.part.takes_sums:
            fill, result = bucket.filled_with(result), bucket.grad
        add: Callable[[], object] | None = None
        views: list[Tensor] = []
        if isinstance(result, SparseSum):
            flats = [segment.flatten(grad) for segment, grad in zip(bucket.segments, self.grads, strict=True)]
            add = bucket.prepare_sum(flats, range(len(flats)), result, scale, local)
        else:
            flat_result = rounded(result, self.buffer.dtype)
            views = [segment.view(flat_result) for segment in bucket.segments]

        def write() -> None:
            if fill is not None:  # memory may have read the flat gradient until now
                fill()
            for grad, view in zip(self.grads, views, strict=False):
                grad.copy_(view)
                if scale != 1:
                    grad.mul_(scale)
            if add is not None:
                add()
            for grad, was_used in zip(self.grads, used, strict=True):
                if not was_used:
                    grad.zero_()
            for param, grad, is_zero in zip(self.params, self.grads, zeros, strict=True):
                if is_zero and param.grad is not None:
                    param.grad.copy_(grad)

        return write


def parts_of(
    names: dict[Tensor, str],
    grads: Sequence[Tensor],
    kind_of: Callable[[str, Tensor], Hashable],
    in_place: Callable[[Hashable], bool],
    first: int,
) -> list[Part]:
    """Lay out one DDP bucket of dense gradients, in its order.

    Args:
        names: its parameters and their names.
        grads: views of their gradients in DDP's memory.
        kind_of: which parameters may travel together; see `build_buckets`.
        in_place: for which kinds gradients stay where they are, on a CPU.
        first: the index of the first part among all that are exchanged.
    """
    place_of = {name: place for place, name in enumerate(names.values())}
    named = [(name, param) for param, name in names.items() if param.numel()]
    parts: list[Part] = []
    for made in build_buckets(named, kind_of, 2**62, 2**62, None, GradientBucket) if named else []:
        bucket = replace(made, index=first + len(parts))
        bucket.in_place = bucket.is_cpu and in_place(bucket.kind)
        places = [place_of[segment.name] for segment in bucket.segments]
        takes_sums = bucket.is_cpu and all(
            segment.flatten(grads[place]).data_ptr() == grads[place].data_ptr()
            for segment, place in zip(bucket.segments, places, strict=True)
        )
        parts.append(Part(bucket, places, takes_sums))
    return parts
