"""One step's gradients on one rank: how often each was added to, which are in their buckets, and whether they changed.

Gradients are taken into buckets while backward runs, in the hope that they are final. Autograd, clipping and loss
scaling change them afterwards without telling; torch counts most changes of a tensor, and that is compared.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable

import torch
from torch import Tensor

from .buckets import Bucket

__all__ = ["Gradients"]


class Gradients:
    """What has come in since the last step.

    Attributes: `arrivals`, backward passes that added to a parameter's gradient, in the order of the first ones;
    `taken`, parameters whose gradient is in its bucket.
    """

    def __init__(self) -> None:
        self.arrivals: dict[Tensor, int] = {}
        self.taken: dict[Tensor, tuple[Tensor | None, int]] = {}
        self._usual: dict[Tensor, int] = {}
        self._sums: dict[Tensor, Tensor] = {}
        self._filled: dict[Bucket, int] = {}

    def arrived(self, param: Tensor, announced: int) -> bool:
        """Count a backward pass; whether it is the last one, by what was `announced` or what has been usual."""
        passes = self.arrivals[param] = self.arrivals.get(param, 0) + 1
        usual = self._usual.get(param, 1)
        if passes > max(announced, usual):
            self._usual[param] = usual = passes
        return passes >= max(announced, usual)

    def take(self, param: Tensor, bucket: Bucket, place: int) -> None:
        """Copy a gradient into its bucket, if that wants it."""
        if bucket not in self._filled and not bucket.in_place:
            bucket.keep_clear()
        if param not in self.taken:
            self._filled[bucket] = self._filled.get(bucket, 0) + 1
        grad = param.grad
        if not bucket.in_place:
            self._sums[param] = bucket.fill(place, grad)
        self.taken[param] = (grad, 0 if grad is None else grad._version)

    def has_filled(self, bucket: Bucket) -> bool:
        """Whether all of the bucket's gradients are in it."""
        return self._filled.get(bucket, 0) == len(bucket.segments)

    def bounded(self, bucket: Bucket, peak: Tensor) -> None:
        """The exchange has looked at all of a bucket's gradients: a `peak` of NaN or Inf stands for theirs."""
        for segment in bucket.segments:
            self._sums[segment.param] = peak

    def has_changed(self, param: Tensor) -> bool:
        """Whether a gradient is not the one any more that was taken."""
        grad, version = self.taken[param]
        return param.grad is not grad or (grad is not None and grad._version != version)

    def find_infinite(self, params: Iterable[Tensor], changed: Collection[Tensor]) -> Tensor | None:
        """The first parameter whose gradient holds NaN or Inf. A sum tells nearly always, at the cost of one pass."""
        graded = [param for param in params if param.grad is not None]
        by_device: dict[torch.device, dict[int, Tensor]] = {}
        for param in graded:
            known = param in self._sums and param not in changed
            total = self._sums[param] if known else _sum(param.grad)
            by_device.setdefault(total.device, {})[id(total)] = total
        if all(bool(torch.stack([t.double() for t in s.values()]).isfinite().all()) for s in by_device.values()):
            return None
        for param in graded:  # finite numbers may have an infinite sum
            if not torch.isfinite(_values(param.grad)).all():
                return param
        return None

    def put_back(self) -> None:
        """Empty the buckets; what has arrived stays."""
        self.taken, self._sums, self._filled = {}, {}, {}

    def clear(self) -> None:
        """Begin the next step."""
        self.put_back()
        self.arrivals = {}


def _values(grad: Tensor | None) -> Tensor:
    assert grad is not None
    return grad._values() if grad.is_sparse else grad


def _sum(grad: Tensor | None) -> Tensor:
    """NaN or Inf if any element is; in float32 at least, where half precision would overflow."""
    values = _values(grad)
    return values.sum(dtype=torch.promote_types(values.dtype, torch.float32))
