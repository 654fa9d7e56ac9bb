"""Outgoing buckets of one optimizer on one rank: launching, cancelling, and writing results back to gradients."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from ..collectives import AllReduce
from ..compressors import GradientExchange
from ..compressors.sparse.rows import gather_rows
from ..errors import ConfigError, MismatchError
from ..exchange.commit import FinishedExchange, Write, rollback_memory
from ..exchange.flush import flush_residuals
from ..exchange.participation import Participation
from ..exchange.runner import Job
from ..exchange.scheduler import CollectiveScheduler, PendingExchange, exchange_of
from ..flat.gradient import GradientBucket, SparseSum, copy_shared_gradients
from ..flat.local_shard import LocalShard
from .layout import Layout
from .settings import Settings
from .tracker import GradientTracker
from .wrapped import Wrapped

__all__ = ["OutgoingBuckets"]


class OutgoingBuckets:
    """The buckets launched since the last step, and those still to be launched in it.

    Args:
        wrapped: the optimizer and its parameters.
        settings: how gradients are exchanged.
        participation: which ranks have data.
        tracker: the gradients that have arrived.
        scheduler: starts collectives.

    Attributes:
        layout: assignment of gradients to buckets.
        step: number of committed steps.
        exchanges: launched exchanges.
        launched: number of launched buckets.
        outdated: True if the layout is for other parameters or settings.
        stale: True if gradients have changed since their launch.
    """

    def __init__(
        self,
        wrapped: Wrapped,
        settings: Settings,
        participation: Participation,
        tracker: GradientTracker,
        scheduler: CollectiveScheduler,
    ) -> None:
        self.wrapped = wrapped
        self.compressor = wrapped.compressor
        self.settings = settings
        self.participation = participation
        self.tracker = tracker
        self.scheduler = scheduler
        self.layout = Layout()
        self.step = 0
        self.outdated = False
        self._norm: Tensor | None = None
        self.clear()

    def clear(self) -> None:
        """Start the next step, with nothing launched."""
        self.exchanges: list[PendingExchange[GradientBucket | Tensor]] = []
        self.launched = 0
        self.stale = False

    def adopt(self, layout: Layout) -> None:
        """Launch the buckets of another layout from now on."""
        self.layout = layout

    def restore(self, order: Sequence[str], step: int) -> None:
        """Restore the ready order of parameters, for the layout at the next step, and the number of steps."""
        self.layout, self.step = Layout(order=order), step

    def count_step(self) -> None:
        """Count a committed step."""
        self.step += 1

    def mark_stale(self) -> None:
        """Note that gradients have changed since their launch."""
        self.stale = True

    def mark_outdated(self, outdated: bool) -> None:
        """Set whether buckets were laid out for other parameters or settings."""
        self.outdated = outdated

    # -- during backward ---------------------------------------------------------------------------------------------

    def added(self, param: Tensor) -> None:
        """Release a parameter's previous gradient after autograd has added to it."""
        found = self.layout.place.get(param)
        if found is not None:
            bucket, place = found
            bucket.release(place)

    def arrived(self, param: Tensor, is_last: bool) -> GradientBucket | None:
        """Record a gradient, complete if `is_last`; return its bucket if it should be filled and may launch early."""
        try:
            bucket, place = self.layout.place[param]  # no call here, since it would run for each gradient
        except KeyError:
            return None
        bucket.release(place)
        if self.outdated or self.stale or not self.participation.here:
            return None
        if bucket.index < self.launched:
            self.stale = True
            return None
        if not is_last or not bucket.launches_early or not self.tracker.completed(bucket, place):
            return None
        return bucket

    # -- launching ---------------------------------------------------------------------------------------------------

    def fill_waiting(self, bucket: GradientBucket) -> None:
        """Copy the waiting gradients of a bucket into it."""
        self.tracker.fill_waiting(bucket, self._scale_taken(bucket))

    def fill(self, bucket: GradientBucket) -> None:
        """Copy the missing gradients of a bucket into it; zeros on a rank without data."""
        if bucket.in_place:
            return
        if self.participation.here:
            self.tracker.fill(bucket, self._scale_taken(bucket))
        else:
            bucket.grad.zero_()

    def fill_rest(self) -> None:
        """Copy all remaining gradients into their buckets, and look for NaN and Inf in the same pass."""
        for bucket in self.layout.buckets[self.launched :]:
            self.fill(bucket)

    def launch_full(self) -> None:
        """Launch the next buckets while they are complete; the ranks have not agreed on the step yet."""
        for bucket in self.layout.buckets[self.launched :]:
            if not self.tracker.has_all_of(bucket):
                break
            self.fill(bucket)
            self._launch(bucket)

    def launch_rest(self, used: Sequence[bool] | None, together: bool) -> None:
        """Launch all other buckets, after all ranks have agreed to take the step; see `Step.launch`."""
        copy_shared_gradients(self.layout.trained)
        if self.compressor.sends == "update" and self.participation.here:
            self._make_update()
        rest = self.layout.buckets[self.launched :]
        self.fill_rest()
        if self._prepares_gradients:
            self._prepare([(bucket.grad, bucket) for bucket in self.layout.buckets])
        certain = used is None and not self.scheduler.comm.survives  # an uncertain step must not change memory
        launches = (self._exchange(bucket, certain, together) for bucket in rest)
        if self.compressor.in_turn or self.layout.launches_early:
            for pending, exchange in launches:
                self.scheduler.launch(pending, exchange)
        else:  # all ranks launch the same ones now
            self.scheduler.launch_together(launches)
        by_param = self._by_param(used)
        for name, param in self.layout.sparse:
            if by_param is not None and not by_param[param]:
                param.grad = None
            else:
                self._launch_rows(name, param)

    def _launch(self, bucket: GradientBucket) -> None:
        if not self.launched:
            self.tracker.sample(bucket)
        if bucket.in_place:
            self.tracker.read(bucket)
        self.scheduler.launch(*self._exchange(bucket, certain=False))
        context = self.layout.contexts[bucket]
        if context.peak is not None:
            self.tracker.bounded(bucket, context.peak)

    def _exchange(
        self, bucket: GradientBucket, certain: bool, together: bool = False
    ) -> tuple[PendingExchange[Any], GradientExchange]:
        """Return the exchange of a bucket that is about to launch."""
        self.launched += 1
        context = self.layout.contexts[bucket]
        local = bucket.local(self.participation.here, self._scale(bucket)) if bucket.in_place else None
        context.begin(self.step, certain, local, share=self._weight)
        if not bucket.in_place and self._scale(bucket) != self._scale_taken(bucket):
            bucket.grad.mul_(self._scale(bucket) / self._scale_taken(bucket))
        pending = PendingExchange[GradientBucket | Tensor](bucket.label, bucket)
        self.exchanges.append(pending)
        return pending, exchange_of(bucket, self.compressor, context, together)

    def _launch_rows(self, name: str, param: Tensor) -> None:
        """Launch the exchange of a sparse gradient, which shares no bucket."""
        grad = param.grad if self.participation.here else None
        if grad is None:
            grad = torch.zeros_like(param).to_sparse(1)
        elif not grad.is_sparse:
            grad = grad.to_sparse(1)
        pending = PendingExchange[GradientBucket | Tensor](f"sparse gradient {name}", param)
        self.exchanges.append(pending)
        divisor = self.scheduler.comm.size if self.settings.op == "average" else 1
        self.scheduler.launch(pending, gather_rows(grad * self._weight, divisor))

    # -- scaling and preparing ---------------------------------------------------------------------------------------

    @property
    def _weight(self) -> float:
        """Return the factor of gradients before an exchange that itself divides by all ranks."""
        share = self.participation.share if self.settings.op == "average" else 1.0
        return share / self.settings.gradient_predivide_factor

    def _scale(self, bucket: GradientBucket) -> float:
        """Return the factor of gradients in the exchange of a bucket."""
        return self._weight * self.layout.contexts[bucket].place.prescale

    def _scale_taken(self, bucket: GradientBucket) -> float:
        """Return the part of that factor that is applied while gradients are copied."""
        return 1.0 if self._prepares_gradients else self._scale(bucket)

    @property
    def _prepares_gradients(self) -> bool:
        """True if `Compressor.prepare` sees gradients before they are scaled."""
        return self.compressor.whole_model and self.compressor.sends == "gradient"

    def _make_update(self) -> None:
        """Replace this rank's gradients by the updates that its optimizer makes from them."""
        if self.scheduler.comm.survives:
            self.wrapped.hold_state()
        if self.compressor.whole_model:
            graded = [(param, param.grad) for param in self.layout.trained if param.grad is not None]
            for param, grad in graded:
                if grad.is_sparse:
                    raise ConfigError(
                        f"rank {self.scheduler.comm.rank}: {self.compressor!r} clips gradients before making updates, "
                        f"and the gradient of {self.wrapped.names[param]!r} is sparse. Remove `clip`."
                    )
            self._prepare([(grad, self.layout.place[param][0]) for param, grad in graded])
        self.wrapped.make_update(self.step, self.settings.sparse_as_dense, self.layout.trained)
        self.wrapped.commit.begin("the optimizer's state")

    def measure_norm(self) -> Job:
        """Measure the norm of this replica's gradients, if the compressor clips it and other ranks hold shards."""
        ranks = self.scheduler.comm.size_of("replica")
        if ranks == 1 or not self.compressor.clips_model:
            return
        square = torch.zeros(1, dtype=torch.float64)
        for param in self.layout.trained if self.participation.here else ():
            if isinstance(param, LocalShard) and param.grad is not None:
                square += torch.linalg.vector_norm(param.grad, dtype=torch.float64).cpu() ** 2 / param.copies(ranks)
        summed = AllReduce(square, "sum", group="replica", label="norm over shards")
        self._norm = (yield self.scheduler.start(summed, summed.label)).sqrt()[0]

    def _prepare(self, grads: Sequence[tuple[Tensor, GradientBucket]]) -> None:
        """Let a compressor that needs all gradients first change them, each given with its bucket."""
        contexts = self.layout.contexts
        for context in contexts.values():
            context.begin(self.step)
            context.set_norm(self._norm)
        self.compressor.prepare([grad for grad, _ in grads], [contexts[bucket] for _, bucket in grads])

    # -- cancelling and finishing ------------------------------------------------------------------------------------

    def launch_until(self, launched: int) -> None:
        """Launch buckets, empty ones if incomplete, until as many are `launched`."""
        if launched > len(self.layout.buckets):
            raise MismatchError(
                f"rank {self.scheduler.comm.rank} lost its buckets while other ranks have sent theirs: load state or "
                f"change parameters on all ranks alike, between steps"
            )
        while self.launched < launched:
            bucket = self.layout.buckets[self.launched]
            if not bucket.in_place:
                bucket.keep_clear(bucket.grads())
                bucket.grad.zero_()
            self._launch(bucket)

    def rollback(self) -> None:
        """Return memory to the last commit, and clear gradients that it has already absorbed."""
        rollback_memory(self.layout.contexts.items(), self.wrapped.commit)

    def finished(self, used: Sequence[bool] | None) -> list[FinishedExchange]:
        """Return the finished exchanges, each with the place to write its result."""
        factor = self.settings.gradient_predivide_factor
        by_param = self._by_param(used)
        finished = []
        for pending in self.exchanges:
            of = pending.of
            if isinstance(of, Tensor):
                write = functools.partial(_prepare_sparse, of, factor=factor)
                finished.append(FinishedExchange(pending, None, None, write, of.numel()))
                continue
            flags = None if by_param is None else [by_param[segment.param] for segment in of.segments]
            write = functools.partial(of.prepare, used=flags, factor=factor)
            finished.append(FinishedExchange(pending, self.layout.contexts[of], flags, write, of.elements))
        return finished

    def flush(self, used: list[bool] | None) -> Job:
        """Add all residuals to the results of the exchanges, and the parameters that have some to those `used`."""
        contexts, by_param = self.layout.contexts, self._by_param(used)
        yield from flush_residuals(self.exchanges, contexts, by_param, self.compressor, self.scheduler)
        if used is not None and by_param is not None:
            used[:] = by_param.values()

    def _by_param(self, used: Sequence[bool] | None) -> dict[Tensor, bool] | None:
        return None if used is None else dict(zip(self.layout.trained, used, strict=True))


def _prepare_sparse(param: Tensor, result: Tensor | SparseSum, factor: float) -> Write:
    """Return the assignment of a sparse sum to the gradient."""
    assert isinstance(result, Tensor)
    grad = result if factor == 1 else result * factor
    return lambda: setattr(param, "grad", grad)
