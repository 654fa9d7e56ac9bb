"""The gradients of one optimizer on their way: when their exchanges start, and when results may be used.

Buckets are launched in one fixed order on all ranks, each as soon as its gradients are ready and its predecessor was
launched, and run to their first collective while backward goes on. Before any result is used, `synchronize` takes a
vote (`dgcopt.exchange.vote`). If some rank's gradients are not finite, what was sent is taken back, all memory stays
what it was, and nobody takes the step. If some rank's gradients have changed since they were sent (one more backward
pass, clipping, unscaling), it is taken back and sent anew. Otherwise all exchanges are finished, in bucket order
(`dgcopt.exchange.exchanges`).

The first step sends nothing early. Its gradients say in which order they become ready and which are sparse; the ranks
agree on rank 0's order, and buckets are laid out by it. The same happens when other parameters are trained.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Generator, Sequence
from typing import Any

import torch
from torch import Tensor

from ..comm import Comm, Handle
from ..errors import ConfigError, MismatchError
from ..exchange.agreement import SAME_MODEL, compare
from ..exchange.commit import (
    Arrived,
    NotFinite,
    commit_gradients,
    commit_memory,
    inspect,
    prepare_gradients,
    prepare_memory,
)
from ..exchange.divergence import check_finite, replicas
from ..exchange.group_settings import GroupSettings
from ..exchange.parameters import plain
from ..exchange.participation import Participation
from ..exchange.runner import Job, Runner, on_their_way
from ..exchange.telemetry import Telemetry
from ..exchange.vote import Ballot, Touch, Verdict, checksum, fingerprint, in_whole_replica, used_anywhere, vote
from ..flat.store import Store
from .changes import Changes
from .flush import flush_residuals
from .layout import Layout, bucket_sizes, lay_out
from .outgoing import OutgoingBuckets
from .settings import Settings
from .tracker import EarlyLaunch, GradientTracker
from .turns import Turns, turns_over
from .wrapped import Wrapped

__all__ = ["Engine"]

log = logging.getLogger("dgcopt")

REMEDY = (
    f"{SAME_MODEL} What only one rank has loaded, dgcopt.broadcast_optimizer_state(optimizer, root_rank=0) before the "
    f"first step gives to all."
)

CHANGED = (
    f"{SAME_MODEL} What a compressor of your own keeps from step to step belongs into its context (ctx.remember, "
    f"ctx.keep_residual), not into attributes, by which ranks compare settings."
)


class Engine:
    """The exchanges of one optimizer's gradients on one rank.

    Args:
        wrapped: the optimizer and its parameters, whose number may grow.
        comm: the wire.
        settings: how gradients are exchanged.

    Attributes: `step`, how many were made; `void`, whether the step that was synchronised last must not be taken, on
    any rank; `infinite`, the ranks whose gradients were not finite then; `participation`, who has data; `early`,
    whether buckets may be launched before the step; `outgoing`, what has left; `layout`, which gradients travel
    together; `store`, what lasts; `sends_all`, True for the final exchange, which flushes the residuals; `due`, True if
    a step is expected although no gradient arrived; `touched`, whether averaged gradients were changed before the last
    step; `moved_on`, whether another rank has moved this one to the end of its step already; `looks_at_sums`, True if
    dense sums that arrive are looked at, too.
    """

    def __init__(self, wrapped: Wrapped, comm: Comm, settings: Settings) -> None:
        self.wrapped = wrapped
        self.names = wrapped.names
        self.compressor = wrapped.compressor
        self.comm = comm
        self.settings = settings
        self.void = False
        self.infinite: list[int] = []
        self.sends_all = False
        self.due = False
        self.participation = Participation(comm.size)
        self.early = EarlyLaunch()
        self.turns: Turns[Engine] = turns_over(comm)
        self.store = Store()
        self._begun = False
        self._sparse: set[Tensor] = set()
        self._rule = ""  # the compressor's settings, as they were at the last step
        self._warned = False
        self.looks_at_sums = False
        self._groups = GroupSettings(wrapped.optimizer, settings.may_differ)
        self._changes = Changes(comm.rank, settings.on_divergence)
        self.touched = Touch.UNKNOWN
        self.moved_on = False
        self.runner = Runner(comm, "optimizer", self._offer, self._forget_step)
        self._tracker = GradientTracker()
        self.outgoing = OutgoingBuckets(wrapped, settings, self.participation, self._tracker, self.runner.scheduler)

    @property
    def step(self) -> int:
        """How many steps were made."""
        return self.outgoing.step

    @property
    def layout(self) -> Layout:
        """Which gradients travel together."""
        return self.outgoing.layout

    # -- during backward ---------------------------------------------------------------------------------------------

    @property
    def telemetry(self) -> Telemetry:
        """Bytes and seconds so far."""
        return self.runner.scheduler.telemetry

    @property
    def in_flight(self) -> bool:
        """Whether gradients of a step have come in that `synchronize` has not finished."""
        return bool(self._tracker.additions)

    @property
    def pending(self) -> bool:
        """Whether another rank has moved this one's step on, whose end, or error, `synchronize` has to tell."""
        return self.moved_on or self.runner.busy or self.runner.failed

    def added(self, param: Tensor) -> None:
        """Take note of a gradient that was added to in a pass that does not count."""
        self._tracker.added(param)
        found = self.layout.place.get(param)
        if found is not None:
            bucket, place = found
            bucket.release(place)

    def arrived(self, param: Tensor) -> None:
        """Take note of a backward pass that has added to a gradient, and launch what is complete.

        Raises RuntimeError if it is one pass more than the user said there would be.
        """
        tracker, outgoing = self._tracker, self.outgoing
        announced = self.settings.backward_passes_per_step
        if not tracker.additions:
            if self.runner.busy:
                with torch.no_grad():
                    self.runner.progress()  # the end of a `join` that other ranks have left since
            self.moved_on = False
            self.wrapped.commit.check(self.comm.rank)
            before, self._rule = self._rule, repr(self.compressor)
            # of settings that have changed on some ranks only, the vote is to tell before messages differ
            layout = outgoing.layout
            fits = not layout.leaves_early or layout.fits(self._trained(), self._sparse)
            outgoing.outdated = before != self._rule or not fits
        is_last = tracker.arrived(param, announced)
        if announced > 1 and tracker.passes[param] > announced:
            raise RuntimeError(
                f"rank {self.comm.rank}: the gradient of parameter {self.names[param]!r} was computed "
                f"{tracker.passes[param]} times before step(), but backward_passes_per_step is {announced}. Raise it "
                f"(set_backward_passes_per_step), do all but the last pass inside no_sync(), or call step() after "
                f"every {announced} passes."
            )
        found = outgoing.layout.place.get(param)
        if found is None:
            return
        bucket, place = found
        bucket.release(place)
        if outgoing.outdated or outgoing.stale or not self.participation.here:
            return
        if bucket.index < outgoing.launched:
            outgoing.stale = True
            return
        if not is_last or not bucket.leaves_early:
            return
        if not tracker.completed(bucket, place) or not self._may_leave_early:
            return
        if not tracker.has_all_of(bucket):
            outgoing.fill_waiting(bucket)
        else:
            try:
                outgoing.launch_full()
            except BaseException:
                self.abandon()
                raise

    def discard(self) -> None:
        """Forget this step's gradients, which the user has set to zero; what was sent is taken back at the next."""
        if self.outgoing.launched:
            self.outgoing.stale = True
            self.early.was_mistaken(self.step)
        self._tracker.forget()
        self.layout.release_gradients()

    def hold(self) -> None:
        """From now on launch nothing before the step, because until then gradients are scaled."""
        self.early.possible = False
        if self.outgoing.launched:
            self.outgoing.stale = True  # scaling them back does not count as a change

    @property
    def _may_leave_early(self) -> bool:
        if self.comm.survives:  # a loss must fail the step, which is tried again, and not backward
            return False
        return self.early.may(self.step) and self.turns.expected is self

    def _trained(self) -> list[Tensor]:
        """The parameters that travel: also one that was frozen after backward, whose gradient the step will use."""
        own = self._tracker.has_added_to
        return [p for p in self.names if p.numel() and (p.requires_grad or (own(p) and p.grad is not None))]

    # -- at the end of the step --------------------------------------------------------------------------------------

    def synchronize(self) -> None:
        """Finish the exchange of every gradient; afterwards each `param.grad` is the averaged one, or None.

        It is None where no rank has a gradient; one that is missing on some ranks counts as zero there. If `void` is
        true afterwards, gradients are as they were and the step must not be taken. Raises what the wire raises,
        naming rank and bucket; the step is lost then.
        """
        if not self.moved_on:
            self.runner.finish(self._drive)
        self.moved_on = False

    def agree_on_overflow(self) -> bool:
        """Whether gradients hold NaN or Inf on any rank, so that loss scaling can react alike; collective."""
        verdict = self.runner.ask(self._take_vote(final=False))
        return verdict is not None and bool(verdict.void)

    def serve_step(self) -> Job:
        """Take part in a step of the ranks that still have data; or learn that there are none."""
        self.participation.here = False
        yield from self._drive()
        if self.participation.ranks:
            self.wrapped.step_without_data()
        else:
            self.participation.all_here()

    def _offer(self) -> Job | None:
        """What another rank may wait for: this step, once it is due or has gradients, or the next one without data."""
        if not self.participation.here:
            return self.serve_step()
        return self._move_on() if (self.in_flight or self.due) and not self.moved_on else None

    def _move_on(self) -> Job:
        yield from self._drive()
        self.moved_on = True

    def abandon(self) -> None:
        """Forget a step that failed, so that the error is the last word about it."""
        self.runner.clear()
        self._forget_step()

    def _forget_step(self) -> str:
        outgoing = self.outgoing
        not_sent = self.layout.buckets[outgoing.launched :]
        told = on_their_way(outgoing.exchanges, [bucket.label for bucket in not_sent])
        outgoing.rollback()
        self.wrapped.rollback()
        self._end_step()
        self.layout.release_gradients()
        self.wrapped.failed()
        return told

    @torch.no_grad()
    def _drive(self) -> Job:
        """Everything that is left of the step."""
        scheduler, outgoing = self.runner.scheduler, self.outgoing
        self.wrapped.commit.check(self.comm.rank)
        self.void = False
        verdict = yield from self._take_vote()
        while not verdict.final:  # others' scalers have asked for it, and this rank, without data, has none to ask
            if verdict.void:
                self._abort(verdict.void)
                self._check_weights()
                return
            verdict = yield from self._take_vote()
        yield from self._take_turn(verdict)
        if not verdict.alike:
            yield from scheduler.through(compare(self._described(), self.comm.rank, "parameters", CHANGED))
        before, self.participation.ranks = self.participation.ranks, verdict.active_ranks
        is_same = verdict.prepared and verdict.same_settings and verdict.active_ranks == before
        again = verdict.stale or not is_same or bool(verdict.averaged_changed)
        if again or verdict.void or not verdict.active_ranks:
            yield from outgoing.cancel(verdict.launched, bool(verdict.void))
        self.participation.check(verdict.absent)
        if verdict.void or not verdict.active_ranks:
            self.comm.confirm(scheduler.start)
            self._abort(verdict.void)
            if verdict.void and self.settings.check_replicas_every:  # weights of one rank may be why
                yield from self._check_replicas()
            self._check_weights()
            return
        first = min({*range(self.comm.size)} - {*verdict.absent})
        if verdict.absent:  # whose schedulers stand still
            yield from scheduler.through(self._groups.take_over(first, self.comm, not self.participation.here))
        if not verdict.prepared:
            yield from self._lay_out()
        if not verdict.same_settings:
            yield from scheduler.through(self._groups.agree(first, self.comm, self.settings.on_divergence))
        self.touched = Touch.UNKNOWN
        self._changes.check(verdict, self.step)
        trained, used = self.layout.trained, None
        if not verdict.complete:
            there = [self.participation.here and param.grad is not None for param in trained]
            if not verdict.used_alike:
                there = yield from scheduler.through(used_anywhere(there, "gradients that there are"))
            used = dict(zip(trained, there, strict=True))
            if not any(there) and self.participation.here and not self._warned:
                self._warned = True
                log.warning(
                    "dgcopt: rank %d, step %d: no parameter of this %s has a gradient, on any rank, so it changes "
                    "nothing. If backward() was called, zero_grad() came between it and step(), or the model's "
                    "parameters are not the optimizer's any more: make the optimizer after layers are replaced, or "
                    "loaded with assign=True",
                    *(self.comm.rank, self.step, type(self.wrapped.optimizer).__name__),
                )
        outgoing.launch_rest(used, together=again or not verdict.launched)
        yield from scheduler.finish(outgoing.exchanges, self.compressor.in_turn)
        start = time.perf_counter()
        arrived = outgoing.arrived(used)
        not_finite = inspect(arrived, self.comm, self.looks_at_sums)
        if not (yield from scheduler.through(in_whole_replica(not not_finite, self.comm, "results"))):
            outgoing.rollback()
            self.comm.confirm(scheduler.start)
            self._abort([], not_finite or [NotFinite("another shard of this replica", [])])
            return
        prepare_memory(arrived)
        all_here = True
        if self.sends_all:
            arrived = yield from self._commit_and_flush(arrived, used)
        else:
            writes = prepare_gradients(arrived)
            all_here = self.comm.confirm(scheduler.start)
            self.wrapped.commit.begin("memory and gradients")
            commit_memory(arrived, self.telemetry)
            commit_gradients(writes)
        outgoing.count_step(arrived)
        self.wrapped.averaged(False)
        self.wrapped.commit.end()
        self.telemetry.apply_seconds += time.perf_counter() - start
        self._end_step()
        if not all_here:  # nobody is left to exchange with before the next step
            return
        if self.wrapped.buffers is not None:
            yield from scheduler.through(self.wrapped.buffers.exchange(self.comm, self.step, self.participation.here))
        every = self.settings.check_replicas_every
        if verdict.averaged_changed or (every and self.step % every == 0):
            yield from self._check_replicas()

    def _check_replicas(self) -> Job:
        check = replicas(self.wrapped.replicated(), self.comm, self.step, self.settings.on_divergence)
        yield from self.runner.scheduler.through(check)

    def _check_weights(self) -> None:
        """Raise DivergenceError if this rank's gradients were not finite because its weights are not."""
        if self.comm.rank in self.infinite:
            check_finite(self.names, self.comm.rank, self.step, self.settings.on_divergence)

    def _commit_and_flush(
        self, arrived: Sequence[Arrived], used: dict[Tensor, bool] | None
    ) -> Generator[Handle, Tensor, list[Arrived]]:
        """Commit the last step with exchanges, to whose gradients all residuals are added; returns these gradients."""
        outgoing, scheduler = self.outgoing, self.runner.scheduler
        self.wrapped.commit.begin("memory and gradients")
        commit_memory(arrived, self.telemetry)
        contexts = outgoing.layout.contexts
        yield from flush_residuals(outgoing.exchanges, contexts, used, self.compressor, scheduler)
        arrived = outgoing.arrived(used)
        commit_gradients(prepare_gradients(arrived))
        return arrived

    def _take_vote(self, final: bool = True) -> Generator[Handle, Tensor, Verdict]:
        trained, tracker, outgoing = self._trained(), self._tracker, self.outgoing
        layout = outgoing.layout
        grads = [param.grad for param in trained]
        if not self.settings.sparse_as_dense:
            self._sparse |= {p for p, grad in zip(trained, grads, strict=True) if grad is not None and grad.is_sparse}
        changed = tracker.changed()
        if final and any(bucket.index < outgoing.launched for bucket in changed):
            if not outgoing.stale:  # not by one more backward pass, which is expected from now on
                self.early.was_mistaken(self.step)
            outgoing.stale = True
        used = [grad is not None for grad in grads]
        prepared = layout.fits(trained, self._sparse)
        names = layout.names if prepared else [self.names[param] for param in trained]
        if not prepared:
            layout.check_sizes()
        elif final and not outgoing.stale and self.compressor.sends == "gradient":
            tracker.put_back(changed)
            outgoing.fill_rest()
            changed = []
        self.comm.finish_on_device()
        infinite = tracker.find_infinite(trained, grads, changed) if self.participation.here else None
        if infinite is not None:
            log.log(
                logging.WARNING if self.early.possible else logging.INFO,  # loss scaling expects it
                "dgcopt: rank %d, step %d: the gradient of parameter %r holds NaN or Inf; no rank takes this step",
                *(self.comm.rank, self.step, self.names[infinite]),
            )
        finite = in_whole_replica(infinite is None, self.comm, "vote of shards")
        ballot = Ballot(
            active=self.participation.here,
            finite=(yield from self.runner.scheduler.through(finite)),
            step=self.step,
            trained=checksum([plain(self.compressor), self._not_taken, *names]),
            launched=(self.turns.expected or self).outgoing.launched,
            stale=outgoing.stale,
            prepared=prepared,
            complete=all(used),
            final=final,
            here=self.participation.here,
            settings=self._groups.checksum(),
            own=tracker.touch,
            averaged=self.touched,
            used=fingerprint(used),
        )
        return (yield from self.runner.scheduler.through(vote(ballot, self.comm.size, "vote")))

    def _take_turn(self, verdict: Verdict) -> Job:
        """Begin this step for all optimizers of the wire: another one that was expected takes back what it has sent."""
        expected = self.turns.expected
        self.turns.came(self)
        if expected is not None and expected is not self and verdict.launched:
            yield from expected.outgoing.cancel(verdict.launched)
            verdict.launched = 0

    def _abort(self, ranks: list[int], arrived: Sequence[NotFinite] = ()) -> None:
        """End a step that nobody takes: gradients of `ranks` are not finite, or what has `arrived`."""
        self.void, self.infinite = True, ranks
        self.wrapped.commit.end()
        if ranks or arrived:
            self.telemetry.skipped += 1
        if ranks and self.comm.rank not in ranks:  # else it has said so when it found them
            log.info("dgcopt: step %d is skipped: NaN or Inf in the gradients of rank(s) %s", self.step, ranks)
        if arrived:
            log.warning(
                "dgcopt: rank %d, step %d is skipped, on all ranks: NaN or Inf arrived in %s",
                *(self.comm.rank, self.step, ", ".join(map(str, arrived))),
            )
        self._end_step()
        self.layout.release_gradients()
        self.wrapped.averaged(True)

    def _end_step(self) -> None:
        self.wrapped.release_state()
        self._tracker.clear()
        self.outgoing.clear()
        self.due = False

    def end(self) -> None:
        """No exchange comes any more, between steps: momentum that the compressor has taken over goes back."""
        self.store.release()
        self.outgoing.layout = Layout(order=self.layout.order)
        momenta = self.store.memory().get("momentum", {})
        self.compressor.give_back({param: momenta[name] for param, name in self.names.items() if name in momenta})
        self.store.drop("momentum")

    # -- which gradients travel together -----------------------------------------------------------------------------

    def _lay_out(self) -> Job:
        """Compare parameters, and lay out buckets by the order in which gradients became ready.

        What was kept for parameters in buckets of before waits for the new ones.
        """
        scheduler, settings = self.runner.scheduler, self.settings
        trained = self._trained()
        named = [(self.names[param], param) for param in trained]
        wanted = () if self.layout.buckets or self.layout.sparse else self.layout.order  # which was restored
        if {*wanted} != {name for name, _ in named}:  # other parameters are trained since: as if it never stopped
            wanted = ()
        self.store.release()
        self.outgoing.layout = Layout(order=wanted)
        sizes = bucket_sizes(settings, self.compressor, named)
        lines = [*self._described(), "buckets: {:g} MB, the first {:g}".format(*sizes)]
        if self._begun:
            yield from scheduler.through(compare(lines, self.comm.rank, "parameters"))
        else:  # before the first step over this wire: do all ranks start alike?
            start = self._groups.describe() + self.wrapped.describe_start(warn=self.comm.rank == 0)
            if settings.on_divergence == "warn":
                yield from scheduler.through(compare(lines, self.comm.rank, "parameters"))
                try:
                    yield from scheduler.through(compare(start, self.comm.rank, "what ranks start from", REMEDY))
                except MismatchError as error:
                    log.warning('dgcopt: %s Training goes on, as on_divergence="warn" asks', error)
            else:
                yield from scheduler.through(compare(lines + start, self.comm.rank, "what ranks start from", REMEDY))
            weights = {name: [param] for param, name in self.names.items()}
            yield from scheduler.through(replicas(weights, self.comm, 0, settings.on_divergence))
            self._begun = True
        wanted = wanted or [self.names[param] for param in self._tracker.additions]
        laid_out = lay_out(named, wanted, self._sparse, self.compressor, settings, self.comm, self.store)
        self.outgoing.layout = yield from scheduler.through(laid_out)
        self._sparse |= {param for _, param in self.layout.sparse}

    def _described(self) -> list[str]:
        """What must be equal on all ranks when buckets are laid out, a line each."""
        return [self._not_taken, *self.wrapped.describe(self.settings, set(self._trained()))]

    @property
    def _not_taken(self) -> str:
        """For the comparison of ranks: whether the optimizer has taken the steps that were exchanged."""
        number = self.wrapped.not_taken
        return f"steps that were exchanged and not taken: {number}" + (
            " (optimizer.step() failed, or was left out: restore all ranks from a checkpoint)" if number else ""
        )

    # -- what persists -----------------------------------------------------------------------------------------------

    def state(self) -> dict[str, Any]:
        """A copy of all that `restore` takes: "order" is that of the buckets, empty before the first step."""
        return {"step": self.step, "order": list(self.layout.order), **self.store.state()}

    def restore(self, state: dict[str, Any]) -> None:
        """Take over what `state` gave; buckets are laid out anew at the next step.

        Gradients that have come in and were not sent stay where they are; their passes are counted anew. Raises
        ConfigError if some were sent, or for memory of a parameter that does not exist or fit.
        """
        if self.comm.elastic:
            self.abandon()  # the step that failed, on all ranks
        if self.outgoing.launched or self.runner.busy:
            raise ConfigError("state cannot be loaded between backward() and step(): finish the step first")
        self.runner.clear()
        self.store.restore(state, {name: param.shape for param, name in self.names.items()})
        self._tracker.clear()
        self.outgoing.layout, self.outgoing.step = Layout(order=state["order"]), state["step"]
