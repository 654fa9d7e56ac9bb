"""One step's gradients on one rank: how often each was added to, which are in their buckets, and whether they changed.

A backward pass adds to a gradient once, but reentrant checkpointing runs backward passes of its own within the user's:
a layer that is used in two checkpoints is added to twice. What must come before a launch are all additions; what
`backward_passes_per_step` announces are the user's passes.

Gradients are taken into buckets while backward runs, in the hope that they are final. Autograd, clipping and loss
scaling change them afterwards without telling; torch counts most changes of a tensor, and that is compared.
"""

from __future__ import annotations

import sys
import threading
from collections.abc import Collection, Iterable
from dataclasses import dataclass, field
from types import FrameType

import torch
from torch import Tensor

from ..flat.gradient import GradientBucket, is_finite, values_of
from ..kernels import peaks

__all__ = ["Arrivals", "EarlyLaunch"]

ENOUGH = 2**18
"""Elements that wait to be copied: so few that they are still in the cache, so many that a call costs little beside.

One by one, ResNet-50's gradients take 3% more of a step's CPU time.
"""

LONGEST_PAUSE = 1024
"""Steps without early launches after launches that proved too early again and again."""

_BACKWARD = torch.autograd.backward.__code__
_NODE = torch.autograd.function.BackwardCFunction.apply.__code__


@dataclass(eq=False)
class _Filling:
    """A bucket that gradients come into: the places of those that have, and what of them waits to be copied."""

    places: set[int] = field(default_factory=set)
    waiting: dict[int, Tensor] = field(default_factory=dict)
    numel: int = 0


class Arrivals:
    """What has come in since the last step.

    Attributes: `additions`, how often a parameter's gradient was added to, in the order of the first additions;
    `passes`, in how many backward passes, if their number is announced; `taken`, parameters whose gradient is in its
    bucket, or waits to be copied there; `uncounted`, those whose gradient was added to by passes that do not count.
    """

    def __init__(self) -> None:
        self.additions: dict[Tensor, int] = {}
        self.passes: dict[Tensor, int] = {}
        self.taken: dict[Tensor, tuple[Tensor | None, int]] = {}
        self.uncounted: set[Tensor] = set()
        self._seen_in: dict[Tensor, int] = {}
        self._pass = 0
        self._graph_task: int | None = None
        self._call: FrameType | None = None
        self._usual: dict[Tensor, int] = {}
        self._peaks: dict[Tensor, Tensor] = {}
        self._filling: dict[GradientBucket, _Filling] = {}

    def arrived(self, param: Tensor, announced: int) -> bool:
        """Count an addition; whether it is the last one, by what was `announced` or what has been usual."""
        additions = self.additions[param] = self.additions.get(param, 0) + 1
        if announced > 1 and self._seen_in.get(param) != self._current_pass():
            self._seen_in[param] = self._pass
            self.passes[param] = self.passes.get(param, 0) + 1
        usual = self._usual.get(param, 1) if self._usual else 1
        if additions > max(announced, usual):
            self._usual[param] = usual = additions
        return additions >= max(announced, usual)

    def _current_pass(self) -> int:
        """The number of the user's backward pass that is running."""
        graph_task = torch._C._current_graph_task_id()
        if graph_task != self._graph_task:
            self._graph_task = graph_task
            call = _users_call()
            # the frame is kept until the end of the step, so that no later call can have the same one
            if call is None or call is not self._call:
                self._pass, self._call = self._pass + 1, call
        return self._pass

    def has_added_to(self, param: Tensor) -> bool:
        """Whether a gradient is this rank's own, also by passes that do not count."""
        return param in self.additions or param in self.uncounted

    def take(self, param: Tensor, bucket: GradientBucket, place: int) -> bool:
        """Take note of a gradient that is complete; whether so many wait now that they should be copied, by `fill`."""
        filling = self._filling.get(bucket)
        if filling is None:
            filling = self._filling[bucket] = _Filling()
            if not bucket.in_place:
                bucket.keep_clear()
        filling.places.add(place)
        grad = param.grad
        self.taken[param] = (grad, 0 if grad is None else grad._version)
        if bucket.in_place:
            return False
        filling.waiting[place] = param
        filling.numel += param.numel()
        return filling.numel >= ENOUGH

    def fill(self, bucket: GradientBucket, scale: float) -> None:
        """Copy `scale` times what waits for a bucket into it, all at once."""
        filling = self._filling.get(bucket)
        if filling is not None and filling.waiting:
            params = filling.waiting.values()
            peaks = bucket.fill(list(filling.waiting), [param.grad for param in params], scale)
            self._peaks |= dict.fromkeys(params, peaks)
            filling.waiting, filling.numel = {}, 0

    def has_all_of(self, bucket: GradientBucket) -> bool:
        """Whether all of the bucket's gradients are complete."""
        filling = self._filling.get(bucket)
        return filling is not None and len(filling.places) == len(bucket.segments)

    def bounded(self, bucket: GradientBucket, peak: Tensor) -> None:
        """The exchange has looked at all of a bucket's gradients: a `peak` of NaN or Inf stands for theirs."""
        self._peaks |= dict.fromkeys((segment.param for segment in bucket.segments), peak.reshape(1))

    def has_changed(self, param: Tensor) -> bool:
        """Whether a gradient is not the one any more that was taken."""
        grad, version = self.taken[param]
        return param.grad is not grad or (grad is not None and grad._version != version)

    def find_infinite(self, params: Iterable[Tensor], changed: Collection[Tensor]) -> Tensor | None:
        """The first parameter whose gradient holds NaN or Inf: what was copied has been looked at, the rest is now."""
        graded = [(param, param.grad) for param in params if param.grad is not None]
        seen = self._peaks
        if changed:
            seen = {param: peak for param, peak in seen.items() if param not in changed}
        unseen: dict[tuple[torch.device, torch.dtype], list[Tensor]] = {}
        for param, grad in graded:
            if param not in seen:
                unseen.setdefault((grad.device, grad.dtype), []).append(values_of(grad))
        by_device: dict[torch.device, list[Tensor]] = {}
        for peak in (*{id(peak): peak for peak in seen.values()}.values(), *map(peaks, unseen.values())):
            by_device.setdefault(peak.device, []).append(peak)
        if all(bool(torch.cat(found).isfinite().all()) for found in by_device.values()):
            return None
        return next((param for param, grad in graded if not is_finite(grad)), None)

    def put_back(self) -> None:
        """Empty the buckets; what has arrived stays."""
        self.taken, self._peaks, self._filling = {}, {}, {}

    def clear(self) -> None:
        """Begin the next step."""
        self.put_back()
        self.forget()

    def forget(self) -> None:
        """As if no backward pass had been made since the last step."""
        self.additions, self.passes, self._seen_in, self.uncounted = {}, {}, {}, set()
        self._graph_task = self._call = None


class EarlyLaunch:
    """Whether buckets may be launched before the step is called for, when their gradients may still change.

    Attributes: `possible`, False as long as gradients are scaled until then.
    """

    def __init__(self) -> None:
        self.possible = True
        self._mistakes = 0
        self._pause_until = 0

    def may(self, step: int) -> bool:
        """Whether in this step those may that leave early at all."""
        return self.possible and step >= self._pause_until

    def was_mistaken(self, step: int) -> None:
        """Gradients have changed after they were sent: launch none for a while, longer each time."""
        self._mistakes += 1
        self._pause_until = step + 1 + min(2**self._mistakes, LONGEST_PAUSE)


def _users_call() -> FrameType | None:
    """The call of `backward` that runs now: the user's, not one that an autograd function makes within it.

    Autograd does not tell, call stacks do. Hooks run on the stack of that call, or in a thread of autograd's own, as
    on CUDA.
    """
    stacks = sys._current_frames()
    for frame in (stacks.pop(threading.get_ident(), None), *stacks.values()):
        call = None
        while frame is not None:
            if frame.f_code is _BACKWARD:
                call = frame
            elif frame.f_code is _NODE:
                call = None
            frame = frame.f_back
        if call is not None:
            return call
    return None
