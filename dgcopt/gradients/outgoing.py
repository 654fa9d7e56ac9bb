"""What leaves of one optimizer's gradients on one rank, how it is taken back, and where its results go."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from ..compressors import GradientExchange
from ..compressors.context import Absorbed
from ..compressors.sparse_rows import gather_rows
from ..errors import ConfigError, MismatchError
from ..exchange.commit import Arrived
from ..exchange.participation import Participation
from ..exchange.runner import Job
from ..exchange.scheduler import CollectiveScheduler, PendingExchange, exchange_of
from ..flat.gradient import GradientBucket, SparseSum
from .layout import Layout
from .settings import Settings
from .tracker import GradientTracker
from .wrapped import Wrapped

__all__ = ["OutgoingBuckets"]


class OutgoingBuckets:
    """What has left since the last step, and what is to leave in it.

    Args:
        wrapped: the optimizer and its parameters.
        settings: how gradients are exchanged.
        participation: who has data.
        tracker: the gradients that have come in.
        scheduler: starts collectives.

    Attributes: `layout`, which gradients travel together; `step`, how many were made; `exchanges`, exchanges that were
    launched; `launched`, of how many buckets; `outdated`, whether buckets were laid out for other parameters or other
    settings; `stale`, whether gradients have changed since they left.
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
        self.clear()

    def clear(self, outdated: bool = False) -> None:
        """Nothing has left."""
        self.exchanges: list[PendingExchange[GradientBucket | Tensor]] = []
        self.launched = 0
        self.outdated = outdated
        self.stale = False

    # -- launching ---------------------------------------------------------------------------------------------------

    def fill_waiting(self, bucket: GradientBucket) -> None:
        """Copy what waits for a bucket into it."""
        self.tracker.fill_waiting(bucket, self._scale_taken(bucket))

    def fill(self, bucket: GradientBucket) -> None:
        """Copy what is not in a bucket yet into it; zeros on a rank without data."""
        if bucket.in_place:
            return
        if self.participation.here:
            self.tracker.fill(bucket, self._scale_taken(bucket))
        else:
            bucket.grad.zero_()

    @torch.no_grad()
    def fill_rest(self) -> None:
        """Copy all gradients that are not in their buckets yet, which looks for NaN and Inf in the same pass."""
        for bucket in self.layout.buckets[self.launched :]:
            self.fill(bucket)

    @torch.no_grad()
    def launch_full(self) -> None:
        """Launch the next buckets as long as all their gradients are there; all ranks have yet to agree on the step."""
        for bucket in self.layout.buckets[self.launched :]:
            if not self.tracker.has_all_of(bucket):
                break
            self.fill(bucket)
            self._launch(bucket)

    def launch_rest(self, used: dict[Tensor, bool] | None, together: bool) -> None:
        """Launch all that is left, once all ranks have agreed on the step, and on which parameters are `used`.

        `together` says whether that is all of it, on all ranks.
        """
        if self.compressor.sends == "update" and self.participation.here:
            self._make_update()
        rest = self.layout.buckets[self.launched :]
        self.fill_rest()
        if self._prepares_gradients:
            self._prepare([(bucket.grad, bucket) for bucket in self.layout.buckets])
        certain = used is None and not self.scheduler.comm.survives  # else memory may have to stay as it is
        launches = (self._exchange(bucket, certain, together) for bucket in rest)
        if self.compressor.in_turn or self.layout.leaves_early:
            for pending, exchange in launches:
                self.scheduler.launch(pending, exchange)
        else:  # all ranks launch the same ones now
            self.scheduler.launch_together(launches)
        for name, param in self.layout.sparse:
            if used is not None and not used[param]:
                param.grad = None
            else:
                self._launch_rows(name, param)

    def _launch(self, bucket: GradientBucket) -> None:
        if bucket.in_place:
            self.tracker.read(bucket)
        self.scheduler.launch(*self._exchange(bucket, certain=False))
        context = self.layout.contexts[bucket]
        if context.peak is not None:
            self.tracker.bounded(bucket, context.peak)

    def _exchange(
        self, bucket: GradientBucket, certain: bool, together: bool = False
    ) -> tuple[PendingExchange[Any], GradientExchange]:
        """The exchange of a bucket that is about to be launched."""
        self.launched += 1
        context = self.layout.contexts[bucket]
        context.step, context.certain = self.step, certain
        if bucket.in_place:
            context.local = bucket.local(self.participation.here, self._scale(bucket))
        elif self._scale(bucket) != self._scale_taken(bucket):
            bucket.grad.mul_(self._scale(bucket) / self._scale_taken(bucket))
        pending = PendingExchange[GradientBucket | Tensor](bucket.label, bucket)
        self.exchanges.append(pending)
        return pending, exchange_of(bucket, self.compressor, context, together)

    def _launch_rows(self, name: str, param: Tensor) -> None:
        """Launch a sparse gradient, which travels alone."""
        grad = param.grad if self.participation.here else None
        if grad is None:
            grad = torch.zeros_like(param).to_sparse(1)
        elif not grad.is_sparse:
            grad = grad.to_sparse(1)
        pending = PendingExchange[GradientBucket | Tensor](f"sparse gradient {name}", param)
        self.exchanges.append(pending)
        divisor = self.scheduler.comm.size if self.settings.op == "average" else 1
        self.scheduler.launch(pending, gather_rows(grad * self._weight, divisor))

    # -- what an exchange sees ---------------------------------------------------------------------------------------

    @property
    def _weight(self) -> float:
        """What gradients are multiplied by before they are exchanged, where the exchange itself divides by all."""
        share = self.participation.share if self.settings.op == "average" else 1.0
        return share / self.settings.gradient_predivide_factor

    def _scale(self, bucket: GradientBucket) -> float:
        """What gradients are multiplied by before an exchange sees them."""
        return self._weight * self.layout.contexts[bucket].prescale

    def _scale_taken(self, bucket: GradientBucket) -> float:
        """What of that they are multiplied by while they are copied."""
        return 1.0 if self._prepares_gradients else self._scale(bucket)

    @property
    def _prepares_gradients(self) -> bool:
        """Whether `Compressor.prepare` sees gradients before they are multiplied."""
        return self.compressor.whole_model and self.compressor.sends == "gradient"

    def _make_update(self) -> None:
        """Make what travels of this rank's gradients: what the optimizer would add to its parameters."""
        if self.scheduler.comm.survives:
            self.wrapped.hold_state()
        if self.compressor.whole_model:
            graded = [(param, param.grad) for param in self.layout.trained if param.grad is not None]
            for param, grad in graded:
                if grad.is_sparse:
                    raise ConfigError(
                        f"rank {self.scheduler.comm.rank}: {self.compressor!r} clips gradients before updates are made "
                        f"of them, and that of {self.wrapped.names[param]!r} is sparse: leave the clip away"
                    )
            self._prepare([(grad, self.layout.place[param][0]) for param, grad in graded])
        self.wrapped.make_update(self.settings.sparse_as_dense)
        self.wrapped.commit.begin("the optimizer's state")

    def _prepare(self, grads: Sequence[tuple[Tensor, GradientBucket]]) -> None:
        """Let a compressor that wants to see all gradients first change them, each given with its bucket."""
        contexts = self.layout.contexts
        for context in contexts.values():
            context.step = self.step
        self.compressor.prepare([grad for grad, _ in grads], [contexts[bucket] for _, bucket in grads])

    # -- what becomes of it ------------------------------------------------------------------------------------------

    def cancel(self, launched: int, is_void: bool = False) -> Job:
        """Start what some rank has `launched` already, wait for the end of all of it, and undo what it meant.

        It is to be sent anew, unless the step `is_void`.
        """
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
        yield from self.scheduler.cancel(self.exchanges)
        if self.exchanges and not is_void:
            self.scheduler.telemetry.repeated += 1
        self.rollback()
        self.tracker.put_back()
        self.clear(self.outdated)

    def rollback(self) -> None:
        """Return memory to the last commit; gradients that it has absorbed already are cleared, as they stay in it."""
        for bucket, context in self.layout.contexts.items():
            if context.absorbed is Absorbed.WHOLLY:
                bucket.clear_gradients()
            elif context.absorbed is Absorbed.PARTLY:
                self.wrapped.commit.begin("memory")
            context.rollback()

    def arrived(self, used: dict[Tensor, bool] | None) -> list[Arrived]:
        """The gradients that the step's exchanges have made, to be written where this rank's own are."""
        factor = self.settings.gradient_predivide_factor
        arrived = []
        for pending in self.exchanges:
            of = pending.of
            if isinstance(of, Tensor):
                write = functools.partial(_prepare_sparse, of, factor=factor)
                arrived.append(Arrived(pending, None, None, write, of.numel()))
                continue
            flags = _flags(of, used)
            write = functools.partial(of.prepare, used=flags, factor=factor)
            arrived.append(Arrived(pending, self.layout.contexts[of], flags, write, of.elements))
        return arrived

    def count_step(self, arrived: Sequence[Arrived]) -> None:
        """The step was made."""
        self.scheduler.count_step(sum(one.numel for one in arrived))
        self.step += 1


def _prepare_sparse(param: Tensor, result: Tensor | SparseSum, factor: float) -> Callable[[], None]:
    """What makes a sparse gradient the sum that has arrived."""
    assert isinstance(result, Tensor)
    grad = result if factor == 1 else result * factor
    return lambda: setattr(param, "grad", grad)


def _flags(bucket: GradientBucket, used: dict[Tensor, bool] | None) -> list[bool] | None:
    """Which of a bucket's parameters are used; None if all are."""
    return None if used is None else [used[segment.param] for segment in bucket.segments]
