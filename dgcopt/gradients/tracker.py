"""The gradients of one step on one rank: additions, completeness of buckets, and later changes.

A backward pass adds to a gradient once, but reentrant checkpointing runs backward passes of its own within the user's:
a layer that is used in two checkpoints is added to twice. A launch waits for all additions;
`backward_passes_per_step` counts the user's passes.

Gradients are taken into buckets while backward runs, in the hope that they are final. Autograd, clipping and loss
scaling change them afterwards without telling; torch counts most changes of a tensor, and that is compared.
"""

from __future__ import annotations

import operator
from collections.abc import Collection, Iterable, Sequence
from types import FrameType

import torch
from torch import Tensor

from ..collectives import in_memory
from ..exchange.vote import Touch
from ..flat.gradient import GradientBucket, is_finite, values_of
from ..kernels import BLOCK, peaks
from .introspection import user_backward_call

__all__ = ["EarlyLaunch", "GradientTracker"]

ENOUGH = 2**18
"""Elements of gradients to collect before a copy on a CPU: few enough for its cache, enough to amortise a call.

Other devices copy a whole bucket at once, as each call is a launch. Copying ResNet-50's gradients one by one takes 3%
more of a step's CPU time.
"""

WEIGHT_CHANGES = 3
"""Changes of weights without a step that are no accident."""

LONGEST_PAUSE = 1024
"""Longest pause, in steps, of early launches after repeated mistakes."""

NOTHING = object()
"""Mark of a gradient that is not in its bucket."""

_VERSION = operator.attrgetter("_version")


class _Filling:
    """A bucket that is filled with gradients while backward runs.

    Attributes:
        count: number of gradients of a full bucket.
        copies_each: True to copy gradients as they become complete; False to copy all at once or to read them in place.
        complete: places of complete gradients.
        waiting: places of complete gradients that are not copied yet.
        numel: number of elements of the waiting gradients.
        taken: by place, the gradient that was copied or read in place; `NOTHING` if it is missing.
        missing: number of gradients that are neither copied nor read.
        versions: by place, torch's version count of the gradient when it was taken.
        peaks: largest magnitudes of the taken gradients, one tensor per copy.
    """

    def __init__(self, bucket: GradientBucket) -> None:
        self.bucket = bucket
        self.count = len(bucket.segments)
        self.copies_each = bucket.is_cpu and not (bucket.in_place or bucket.has_small_parts)
        self.complete: set[int] = set()
        self.waiting: set[int] = set()
        self.numel = 0
        self.taken: list[object] = [NOTHING] * self.count
        self.missing = self.count
        self.versions = [0] * self.count
        self.peaks: list[Tensor] = []

    def has_changed(self) -> bool:
        """True if a gradient has changed since it was read."""
        now, taken = self.bucket.grads(), self.taken
        versions = _versions(now)
        if versions == self.versions and all(map(operator.is_, now, taken)):
            return False
        return any(
            before is not NOTHING and (now[place] is not before or versions[place] != self.versions[place])
            for place, before in enumerate(taken)
        )

    def take(self, places: Sequence[int], grads: list[Tensor | None], peaks: Tensor | None) -> None:
        """Record the current versions of the gradients at `places`."""
        versions = _versions(grads)
        if len(places) == self.count:
            self.taken, self.versions, self.peaks, self.missing = list(grads), versions, [], 0
        else:
            for place, grad, version in zip(places, grads, versions, strict=True):
                self.missing -= self.taken[place] is NOTHING
                self.taken[place], self.versions[place] = grad, version
        if peaks is not None:
            self.peaks.append(peaks)


class GradientTracker:
    """The gradients that have arrived since the last step.

    Attributes:
        additions: number of additions to the gradient of each parameter, in the order of the first additions.
        passes: number of backward passes that added to it, if `backward_passes_per_step` is more than 1.
        uncounted: parameters whose gradients got additions from passes that do not count (`no_sync`).
        weight_changes: number of changes of weights between backward passes.
    """

    def __init__(self) -> None:
        self.additions: dict[Tensor, int] = {}
        self.passes: dict[Tensor, int] = {}
        self.uncounted: set[Tensor] = set()
        self.weight_changes = 0
        self._weights: tuple[Tensor, int] | None = None
        self._seen_in: dict[Tensor, int] = {}
        self._pass = 0
        self._watched: tuple[Tensor, Tensor | None, int] | None = None
        self._graph_task: int | None = None
        self._call: FrameType | None = None
        self._sample: tuple[GradientBucket, Tensor] | None = None
        self._usual: dict[Tensor, int] = {}
        self._filling: dict[GradientBucket, _Filling] = {}

    def arrived(self, param: Tensor, announced: int) -> bool:
        """Count an addition; return True for the last one of the step."""
        if self._watched is None or param is self._watched[0]:
            self._watch(param)
            self._count_weight_change(param)
        additions = self.additions[param] = self.additions.get(param, 0) + 1
        if announced == additions == 1 and not self._usual:
            return True
        if announced > 1 and self._seen_in.get(param) != self._current_pass():
            self._seen_in[param] = self._pass
            self.passes[param] = self.passes.get(param, 0) + 1
        usual = self._usual.get(param, 1) if self._usual else 1
        if additions > max(announced, usual):
            self._usual[param] = usual = additions
        return additions >= max(announced, usual)

    def added(self, param: Tensor) -> None:
        """Record an addition by a pass that does not count."""
        if self._watched is None or param is self._watched[0]:
            self._watch(param)
        self.uncounted.add(param)

    def _watch(self, param: Tensor) -> None:
        grad = param.grad
        self._watched = param, grad, 0 if grad is None else grad._version

    def _count_weight_change(self, param: Tensor) -> None:
        """Count a change of weights since the last backward pass; the parameter that is watched stands for all."""
        if self._weights is None:
            self._weights = param, param._version
        elif self._weights[0] is param and self._weights[1] != param._version:
            self._weights = param, param._version
            self.weight_changes += 1

    @property
    def touch(self) -> Touch:
        """Changes of the first gradient since it arrived, for all gradients, as clipping changes them alike."""
        if self._watched is None:
            return Touch.UNKNOWN
        param, grad, version = self._watched
        is_kept = param.grad is grad and (grad is None or grad._version == version)
        return Touch.KEPT if is_kept else Touch.CHANGED

    def _current_pass(self) -> int:
        """Return the number of the user's backward pass that is running."""
        graph_task = torch._C._current_graph_task_id()
        if graph_task != self._graph_task:
            self._graph_task = graph_task
            call = user_backward_call()
            # the frame is kept until the end of the step, so that no later pass can reuse its identity
            if call is None or call is not self._call:
                self._pass, self._call = self._pass + 1, call
        return self._pass

    def has_added_to(self, param: Tensor) -> bool:
        """Return True if a gradient is this rank's own; passes that do not count included."""
        return param in self.additions or param in self.uncounted

    def completed(self, bucket: GradientBucket, place: int) -> bool:
        """Record a complete gradient; return True if its bucket is complete, or `ENOUGH` elements wait to be copied."""
        filling = self._filling.get(bucket) or self._of(bucket)
        filling.complete.add(place)
        if filling.copies_each:
            filling.waiting.add(place)
            filling.numel += bucket.segments[place].numel
        return len(filling.complete) == filling.count or filling.numel >= ENOUGH

    def has_all_of(self, bucket: GradientBucket) -> bool:
        """Return True if all gradients of a bucket are complete."""
        filling = self._filling.get(bucket)
        return filling is not None and len(filling.complete) == filling.count

    def fill_waiting(self, bucket: GradientBucket, scale: float) -> None:
        """Copy `scale` times the waiting gradients of a bucket into it."""
        waiting = self._of(bucket).waiting
        if waiting:
            self._copy(bucket, sorted(waiting), scale)

    def fill(self, bucket: GradientBucket, scale: float) -> None:
        """Copy `scale` times the missing gradients of a bucket into it."""
        filling = self._of(bucket)
        everything = range(len(bucket.segments))
        if filling.missing == len(everything):
            self._copy(bucket, everything, scale)
        elif filling.missing:
            self._copy(bucket, [place for place in everything if filling.taken[place] is NOTHING], scale)

    def _copy(self, bucket: GradientBucket, places: Sequence[int], scale: float) -> None:
        filling, grads = self._of(bucket), bucket.grads()
        if not filling.peaks:
            bucket.keep_clear(grads)
        if len(places) == len(grads) and bucket.has_small_parts:
            peaks = bucket.fill_whole(grads, scale)
        else:
            grads = [grads[place] for place in places]
            peaks = bucket.fill(places, grads, scale)
        filling.take(places, grads, peaks)
        filling.waiting, filling.numel = set(), 0

    def read(self, bucket: GradientBucket) -> None:
        """Record that an exchange is about to read a bucket's gradients in place."""
        grads = bucket.grads()
        self._of(bucket).take(range(len(grads)), grads, None)

    def sample(self, bucket: GradientBucket) -> None:
        """Record some values of the bucket that is launched first."""
        self._sample = bucket, _bits_in(bucket)

    def is_rescaled(self) -> bool:
        """True if these values have changed and torch counts no change, as for `GradScaler.unscale_`."""
        if self._sample is None:
            return False
        bucket, before = self._sample
        return not self._of(bucket).has_changed() and not torch.equal(before, _bits_in(bucket))

    def bounded(self, bucket: GradientBucket, peak: Tensor) -> None:
        """Record the `peak` magnitude that an exchange has found in a bucket: NaN or Inf if any gradient holds one."""
        self._of(bucket).peaks.append(peak.reshape(1))

    def _of(self, bucket: GradientBucket) -> _Filling:
        filling = self._filling.get(bucket)
        if filling is None:
            filling = self._filling[bucket] = _Filling(bucket)
        return filling

    def changed(self) -> list[GradientBucket]:
        """Return the buckets with gradients that have changed since they were copied."""
        return [bucket for bucket, filling in self._filling.items() if filling.has_changed()]

    def find_infinite(
        self, params: Sequence[Tensor], grads: Sequence[Tensor | None], changed: Collection[GradientBucket]
    ) -> Tensor | None:
        """Return the first of `params` whose gradient holds NaN or Inf; those in buckets were inspected when copied.

        Gradients of buckets that have `changed` since are inspected again.
        """
        found, seen, count = [], [], 0
        for bucket, filling in self._filling.items():
            if filling.peaks and bucket not in changed:
                found += filling.peaks
                seen.append(filling)
                count += filling.count - filling.missing
        if count < len(params):
            found += self._peaks_of_others(params, grads, seen)
        by_device: dict[torch.device, list[Tensor]] = {}
        for peak in found:
            by_device.setdefault(peak.device, []).append(peak)
        if all(bool(torch.cat(peaks).isfinite().all()) for peaks in by_device.values()):
            return None
        graded = zip(params, grads, strict=True)
        return next((param for param, grad in graded if grad is not None and not is_finite(grad)), None)

    def _peaks_of_others(
        self, params: Sequence[Tensor], grads: Sequence[Tensor | None], seen: Sequence[_Filling]
    ) -> list[Tensor]:
        """Return the largest magnitudes of gradients outside the buckets."""
        known = {
            segment.param
            for filling in seen
            for segment, taken in zip(filling.bucket.segments, filling.taken, strict=True)
            if taken is not NOTHING
        }
        unseen: dict[tuple[torch.device, torch.dtype], list[Tensor]] = {}
        for param, grad in zip(params, grads, strict=True):
            if grad is not None and param not in known:
                unseen.setdefault((grad.device, grad.dtype), []).append(values_of(grad))
        return [peaks(alike) for alike in unseen.values()]

    def release(self, buckets: Iterable[GradientBucket] | None = None) -> None:
        """Release the copies of gradients in all buckets, or in some; the gradients stay."""
        for bucket in list(self._filling) if buckets is None else buckets:
            del self._filling[bucket]

    def clear(self) -> None:
        """Begin the next step."""
        self.release()
        self.clear_passes()
        self.weight_changes, self._weights = 0, None

    def failed(self) -> None:
        """Begin the step again after a failure: the gradients that have arrived are this rank's own still."""
        own = self.uncounted.union(self.additions)
        self.clear()
        self.uncounted = own

    def clear_passes(self) -> None:
        """Clear the record of all backward passes since the last step."""
        self.additions, self.passes, self._seen_in, self.uncounted = {}, {}, {}, set()
        self._graph_task = self._call = self._watched = self._sample = None


class EarlyLaunch:
    """The decision to launch buckets before `step()`, while their gradients may still change.

    Attributes:
        possible: False while a GradScaler scales gradients until the step.
    """

    def __init__(self) -> None:
        self.possible = True
        self._mistakes = 0
        self._pause_until = 0

    def may(self, step: int) -> bool:
        """True if buckets may launch during backward in this step."""
        return self.possible and step >= self._pause_until

    def stop(self) -> None:
        """Stop early launches, because gradients are scaled until the step."""
        self.possible = False

    def was_mistaken(self, step: int) -> None:
        """Pause early launches, longer each time, because gradients changed after they were sent."""
        self._mistakes += 1
        self._pause_until = step + 1 + min(2**self._mistakes, LONGEST_PAUSE)


def _versions(grads: Sequence[Tensor | None]) -> list[int]:
    """Return torch's version count of each gradient; 0 if there is none."""
    try:
        return [*map(_VERSION, grads)]
    except AttributeError:
        return [0 if grad is None else grad._version for grad in grads]


def _bits_in(bucket: GradientBucket) -> Tensor:
    """Return a copy of values from all over a bucket's first gradient, as bytes: NaN equals itself."""
    first = next((values_of(grad) for grad in bucket.grads() if grad is not None), torch.empty(0)).detach().reshape(-1)
    return in_memory(first[:: len(first) // BLOCK or 1].clone()).view(torch.uint8)  # whole rows of it may be zero
