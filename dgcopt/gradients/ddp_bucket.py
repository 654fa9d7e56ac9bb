"""One of DDP's buckets: which of its gradients travel together, and where their results are written."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass, replace
from itertools import zip_longest

import torch
from torch import Tensor

from ..flat.buckets import build_buckets
from ..flat.gradient import GradientBucket, LocalGradient, SparseSum, rounded
from ..kernels import add_at, peaks

__all__ = ["Part", "PartGradients", "gradients_of", "parts_of"]


def gradients_of(params: Sequence[Tensor], buffer: Tensor) -> list[Tensor]:
    """Views of the gradients in a bucket's buffer.

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
    """Whether its elements do not fill a span of memory, each its own place."""
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
        """The gradients where DDP has them."""
        flat = [segment.flatten(grad) for segment, grad in zip(self.bucket.segments, grads, strict=True)]
        return LocalGradient(self.bucket.parts(flat), factor)


@dataclass(eq=False)
class PartGradients:
    """Gradients of one exchange, in DDP's `buffer`, and `tells`, one number of each. No `part` if they are sparse."""

    part: Part | None
    buffer: Tensor
    grads: list[Tensor]
    tells: Tensor

    def prepare(
        self, result: Tensor | SparseSum, local: LocalGradient | None, used: Sequence[bool], scale: float
    ) -> Callable[[], None]:
        """Return what makes the gradients in DDP's memory the result times `scale`, and zero where no rank has `used` a
        parameter; all that may fail or allocate is done by then.
        """
        assert self.part is not None
        bucket = self.part.bucket
        fill: Callable[[], object] | None = None
        if isinstance(result, SparseSum) and not self.part.takes_sums:
            fill, result = bucket.filled_with(result), bucket.grad
        if isinstance(result, SparseSum):
            flat = [segment.flatten(grad) for segment, grad in zip(bucket.segments, self.grads, strict=True)]
            sums = (bucket.parts(flat), *result.times(scale, bucket.segments[0].param.dtype))
            views: list[Tensor] = []
        else:
            flat_result = rounded(result, self.buffer.dtype)
            sums, views = None, [segment.view(flat_result) for segment in bucket.segments]

        def write() -> None:
            if fill is not None:  # which memory may have read until now
                fill()
            for place, (grad, view) in enumerate(zip_longest(self.grads, views)):
                if view is not None:
                    grad.copy_(view)
                    if scale != 1:
                        grad.mul_(scale)
                elif local is None or not local.has_cleared(place):
                    grad.zero_()
            if sums is not None:
                add_at(*sums)
            for grad, was_used in zip(self.grads, used, strict=True):
                if not was_used:
                    grad.zero_()

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
