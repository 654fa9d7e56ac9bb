"""The exchange of one optimizer's gradients on one rank: buckets launched during backward, and the job of each step.

Buckets are launched in one fixed order on all ranks, each as soon as its gradients are ready and its predecessor was
launched, and run to their first collective during backward. Before any result is used the ranks vote, and all
commit or abort the step (`dgcopt.exchange.step`). If gradients of some rank have changed since they were launched, by
one more backward pass, clipping or unscaling, all ranks cancel their exchanges and launch them again.
"""

from __future__ import annotations

import logging
from typing import Any

import torch
from torch import Tensor

from ..comm import Comm
from ..compressors.tuner import Tuner
from ..errors import ConfigError
from ..exchange.divergence import check_finite, replicas
from ..exchange.runner import Job, Runner, describe_in_flight
from ..exchange.telemetry import Telemetry
from ..exchange.vote import Verdict
from ..flat.gradient import GradientBucket
from .gradient_step import GradientStep
from .layout import Layout
from .settings import Settings
from .tracker import WEIGHT_CHANGES
from .wrapped import Wrapped

__all__ = ["Engine"]

log = logging.getLogger("dgcopt")

TUNING = "tuning"
"""Key of a tuned compressor's choice in the state."""


class Engine:
    """The exchanges of one optimizer's gradients on one rank.

    Args:
        wrapped: the optimizer and its parameters, whose number may grow.
        comm: the wire.
        settings: how gradients are exchanged.

    Attributes:
        gradients: the step of all gradients.
        runner: its jobs that wait for other ranks.
        store: memory by parameter name.
        participation: which ranks have data.
        turns: the order of the optimizers that share the wire.
        moved_on: True if another (simulated) rank has already advanced this one to the end of its step.
    """

    def __init__(self, wrapped: Wrapped, comm: Comm, settings: Settings) -> None:
        self.wrapped = wrapped
        self.names = wrapped.names
        self.comm = comm
        self.settings = settings
        self.moved_on = False
        self.runner = Runner(comm, "optimizer", self._offer, self._fail)
        self._is_expected = False
        self.gradients = GradientStep(wrapped, settings, self.runner.scheduler)
        fixed = settings.bucket_mb is not None or settings.first_bucket_mb is not None or settings.groups is not None
        self._tuner = wrapped.compressor.tuner(wrapped.names, comm, fixed)
        self.store, self.turns = self.gradients.store, self.gradients.turns
        self.participation = self.gradients.participation

    # -- state of the step -------------------------------------------------------------------------------------------

    @property
    def step(self) -> int:
        """Number of committed steps."""
        return self.gradients.outgoing.step

    @property
    def layout(self) -> Layout:
        """Assignment of parameters to buckets."""
        return self.gradients.outgoing.layout

    @property
    def launched(self) -> int:
        """Number of buckets launched since the last step."""
        return self.gradients.outgoing.launched

    @property
    def telemetry(self) -> Telemetry:
        """Bytes and seconds so far."""
        return self.runner.scheduler.telemetry

    @property
    def in_flight(self) -> bool:
        """True if gradients have arrived in a step that `synchronize` has not finished."""
        return bool(self.gradients.tracker.additions)

    @property
    def pending(self) -> bool:
        """True if another rank has advanced this rank's step; `synchronize` must still report its end or error."""
        return self.moved_on or self.runner.busy or self.runner.failed

    # -- during backward ---------------------------------------------------------------------------------------------

    def added(self, param: Tensor) -> None:
        """Record an addition to a gradient by a backward pass that does not count."""
        self.gradients.tracker.added(param)
        self.gradients.outgoing.added(param)

    def arrived(self, param: Tensor) -> None:
        """Record an addition to a gradient by a backward pass, and launch complete buckets.

        Raises RuntimeError for more passes than `backward_passes_per_step`.
        """
        gradients = self.gradients
        tracker, outgoing = gradients.tracker, gradients.outgoing
        announced = self.settings.backward_passes_per_step
        if not tracker.additions:
            self.moved_on = False
            gradients.start()
        before = tracker.weight_changes
        is_last = tracker.arrived(param, announced)
        if tracker.weight_changes == WEIGHT_CHANGES > before:
            self._warn_of_weight_changes()
        if self._tuner is not None and self._tuner.watching:
            self._tuner.arrived(param)
        if announced > 1 and tracker.passes[param] > announced and not self._is_replaced_for(param):
            raise self._too_many_passes(param, announced)
        bucket = outgoing.arrived(param, is_last)
        if bucket is not None and gradients.may_launch_early:
            self._launch_early(bucket)

    @torch.no_grad()
    def _launch_early(self, bucket: GradientBucket) -> None:
        """Copy the complete gradients of a bucket, or launch it if all are complete."""
        tracker, outgoing = self.gradients.tracker, self.gradients.outgoing
        if not tracker.has_all_of(bucket):
            outgoing.fill_waiting(bucket)
            return
        try:
            outgoing.launch_full()
            if self.turns.are_shared:
                self.turns.count_sent(outgoing.launched)
        except BaseException:
            self.abort()
            raise

    def _warn_of_weight_changes(self) -> None:
        last = self.turns.last
        if last not in (None, self.gradients) and not self.names.keys().isdisjoint(last.names):
            return  # another wrapped optimizer trains these parameters now
        log.warning(
            "dgcopt: rank %s: weights changed after the last backward passes, but this %s's step() was not called: no "
            "gradient is averaged, and ranks train apart. If it moves weights by other methods, as SAM does by "
            "first_step() and second_step(), wrap the optimizer inside it (sam.base_optimizer = "
            "dgcopt.DistributedOptimizer(sam.base_optimizer, ...)), or call optimizer.synchronize() before each of "
            "these methods",
            *(self.comm.rank, type(self.wrapped.optimizer).__name__),
        )

    def _is_replaced_for(self, param: Tensor) -> bool:
        """Return True if a later optimizer trains a parameter: this one steps no more, and may be freed late."""
        return any(param in other.names for other in self.turns.added_after(self.gradients))

    def _too_many_passes(self, param: Tensor, announced: int) -> RuntimeError:
        return RuntimeError(
            f"rank {self.comm.rank}: the gradient of parameter {self.names[param]!r} was computed "
            f"{self.gradients.tracker.passes[param]} times before step(), but backward_passes_per_step is {announced}. "
            f"Raise it (set_backward_passes_per_step), do all but the last pass inside no_sync(), or call step() after "
            f"every {announced} passes."
        )

    # -- around a step -----------------------------------------------------------------------------------------------

    def expect_step(self) -> None:
        """Expect a step even if no gradient arrives."""
        self._is_expected = True

    def synchronize(self) -> None:
        """Finish the exchange of every gradient; afterwards each `param.grad` is the averaged one, or None.

        It is None where no rank has a gradient; one that is missing on some ranks counts as zero there. If `void` is
        true afterwards, gradients are as they were and the step must not be taken. Raises the errors of the wire,
        naming rank and bucket; the step is lost then.
        """
        if not self.moved_on:
            self.runner.finish(self._drive)
        self.moved_on = False

    def skips_on_overflow(self) -> bool:
        """Vote on gradients that are still scaled; skip the step and return True if some rank's hold NaN or Inf."""
        verdict = self.runner.ask(self.gradients.vote(final=False))
        if verdict is None or not verdict.void:
            return False
        self.gradients.cleared()
        self.gradients.skip()
        return True

    def join(self, divides: bool, throws: bool) -> None:
        """Allow ranks to run out of data from now on; see `Participation.begin`."""
        self.participation.begin(divides, throws)

    def serve_step(self) -> Job:
        """Take part in a step of the ranks that still have data, or learn that there are none."""
        self.participation.leave()
        yield from self._drive()
        if self.participation.ranks:
            with torch.enable_grad():  # as in the user's loop
                self.wrapped.step_without_data()
        else:
            self.participation.all_here()

    def _offer(self) -> Job | None:
        """Return a job for a waiting rank: this step, or the next one without data."""
        if not self.participation.here:
            return self.serve_step()
        return self._move_on() if (self.in_flight or self._is_expected) and not self.moved_on else None

    def _move_on(self) -> Job:
        yield from self._drive()
        self.moved_on = True

    def _drive(self) -> Job:
        """Take the step, then synchronise buffers, compare replicas and tune the compressor if that is due."""
        if self._tuner is not None and self._tuner.watching:
            self._tuner.synchronizing()
        verdict = yield from self.gradients.run()
        self._is_expected = False
        if verdict is not None and (self.gradients.void or self.gradients.same_ranks_left):
            yield from self._follow_up(verdict)
        if self.gradients.void and self.comm.rank in self.gradients.infinite:
            check_finite(self.names, self.comm.rank, self.step, self.settings.on_divergence)

    def _follow_up(self, verdict: Verdict) -> Job:
        through, wrapped, every = self.runner.scheduler.through, self.wrapped, self.settings.check_replicas_every
        if self.gradients.void:
            is_due = every > 0 and bool(verdict.void)  # weights of one rank may be the cause
        else:
            is_due = bool(verdict.averaged_changed or (every and self.step % every == 0))
            yield from self.gradients.average_last_momentum()
            if wrapped.buffers is not None:
                yield from through(wrapped.buffers.exchange(self.comm, self.step, self.participation.here))
        if is_due:
            yield from through(replicas(wrapped.replicated(), self.comm, self.step, self.settings.on_divergence))
        if self._tuner is not None and not self.gradients.void:
            yield from self._tune(self._tuner)

    def _tune(self, tuner: Tuner) -> Job:
        """Ask the tuner for a change of the compressor, made by a later step."""
        if not self.gradients.changes_compressor:
            change = yield from self.runner.scheduler.through(tuner.stepped(self.step))
            if change is not None:
                self.gradients.change_compressor(change)

    def abort(self) -> None:
        """Roll back a failed step; return no further error."""
        self.runner.clear()
        self._fail()

    def _fail(self) -> str:
        outgoing = self.gradients.outgoing
        told = describe_in_flight(
            outgoing.exchanges, [bucket.label for bucket in self.layout.buckets[outgoing.launched :]]
        )
        self._is_expected = False
        self.gradients.fail()
        return told

    # -- persistence -------------------------------------------------------------------------------------------------

    def state(self) -> dict[str, Any]:
        """Return a copy of the state, for `restore`; "order" is that of the buckets, empty before the first step."""
        tuning = {} if self._tuner is None else {TUNING: self._tuner.state()}
        return {"step": self.step, "order": list(self.layout.order), **self.store.state(), **tuning}

    def restore(self, state: dict[str, Any]) -> None:
        """Restore a `state`; buckets are laid out anew at the next step.

        Gradients that have arrived and were not launched stay, and their passes are counted anew. Raises ConfigError if
        some were launched, or for memory of a parameter that does not exist or fit.
        """
        if self.comm.elastic:
            self.abort()  # the step that failed, on all ranks
        if self.gradients.outgoing.launched or self.runner.busy:
            raise ConfigError("state cannot be loaded between backward() and step(): finish the step first")
        self.runner.clear()
        self.gradients.restore(state)
        if self._tuner is not None:
            self._tuner.restore(state.get(TUNING))
