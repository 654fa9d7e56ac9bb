"""The schedule of averaging: hooks around one optimizer's step that run a round whenever one is due.

After each local step the rule decides whether a round is due; a `Sync` runs it. Where all ranks meet they vote on it:
are all weights finite, do all ranks train the same parameters, which ranks still have data?

On the simulated wire ranks take turns in one thread and cannot wait for each other: the last rank to step completes the
round for all of them (`dgcopt.exchange.runner`).
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any, cast

import torch
from torch.optim import Optimizer

from ..collectives import AllReduce
from ..comm import Comm, current_comm
from ..compressors.own_step import check_steps_alone
from ..errors import ConfigError, PayloadError, VotedOut
from ..exchange.agreement import SAME_MODEL, compare
from ..exchange.buffers import Buffers
from ..exchange.commit import CommitMarker
from ..exchange.divergence import replicas
from ..exchange.held import held
from ..exchange.lost_ranks import repeat_after_lost_ranks
from ..exchange.participation import Participation
from ..exchange.runner import Job, Runner
from ..exchange.telemetry import Telemetry
from ..exchange.untraced import untraced
from ..flat.buckets import Bucket
from ..flat.local_shard import as_stepped
from ..gradients.engine import Engine
from ..gradients.optimizer import DistributedOptimizer
from ..gradients.stepping import Mode
from ..gradients.synchronised import synchronised
from .amp import ScaledSteps
from .replica import Replica
from .sync import Round, Sync
from .weights import Weights

__all__ = ["Schedule"]

log = logging.getLogger("dgcopt")

FAR = 1_000_000
"""Number of steps that a rank without data looks ahead for the next round."""

LOADED_BY_ALL = (
    f"{SAME_MODEL} Load state on all ranks or on none, each rank its own part; dgcopt.checkpoint.load distributes it."
)


class Schedule(Round):
    """Local steps of one optimizer on one rank, and its rounds of averaging between them.

    Attributes: those of `Round`, and

        step: local steps made so far, warm-up included.
        sync: this rank's part in a round.
        buffers: the model's buffers that rounds synchronise; see `dgcopt.sync_buffers`.
    """

    def __init__(self, sync: Callable[[Round], Sync], replica: Replica, comm: Comm | None) -> None:
        self.replica, self.names = replica, replica.names
        self.rule, self.optimizer = rule, optimizer = replica.rule, replica.optimizer
        check_steps_alone(optimizer, f"{type(rule).__name__} averages the weights that it steps")
        _check_keeps_no_weights(optimizer)
        self.sync = sync(self)
        self.step = self.last_own_step = 0
        self._samples = 0.0
        self._has_own_buffers = False  # True if it has made a step since buffers were exchanged
        self.buffers: Buffers | None = None
        self.commit = CommitMarker()
        comm = current_comm(comm)
        if comm.survives:
            rule.check_survives()
        steps = synchronised(optimizer)
        is_same = steps is not None and (steps.comm is comm or steps.comm.joins_replicas)  # of the same shards
        if not rule.warmup_steps and comm.size > 1 and is_same:
            raise ConfigError(
                f"this optimizer already averages gradients over all ranks at every step, so {type(rule).__name__} has "
                f"no effect. Give it the bare optimizer or one with a smaller process_set, or set warmup_steps."
            )
        self._join_wire(comm)
        self._admits = self.runner.scheduler.number == 0  # the first of the training loop's optimizers
        if rule.warmup_steps and steps is None:
            named = [(name, as_stepped(param)) for param, name in self.names.items()]
            DistributedOptimizer(optimizer, named, comm=comm)
        self._groups = optimizer.param_groups
        self._has_loaded = False
        self._scaled = ScaledSteps(optimizer)
        hook = optimizer.register_step_pre_hook(untraced(_before_step))
        # ahead of DistributedOptimizer's hook, which exchanges gradients and may add updates to weights
        cast(Any, optimizer)._optimizer_step_pre_hooks.move_to_end(hook.id, last=False)
        optimizer.register_step_post_hook(untraced(_after_step))

    @property
    def _engine(self) -> Engine | None:
        """The engine of the same optimizer's gradients; None without any, and in a single process."""
        steps = synchronised(self.optimizer)
        return steps.engine if steps is not None else None

    def _join_wire(self, comm: Comm) -> None:
        self.rule.check(comm, list(self.names.values()))
        self.comm = comm
        self._attend()
        self.replica.join(comm)
        self.joining = False
        self._missed = False  # True if a round was in flight in the loaded state, to be launched again
        if comm.waits_at_start:
            comm.drive(compare(self.replica.describe(), comm.rank, "parameters and settings"))

    def _attend(self) -> None:
        """Register as a user of the wire, with its current ranks."""
        self._generation = self.comm.generation
        self.runner = Runner(self.comm, "averaging", self._offer, self.sync.abort)
        self.participation = Participation(self.comm.size)

    @property
    def outers(self) -> list[Any]:
        """DiLoCo's outer optimizers, one DistributedOptimizer of anchors per fragment; empty for other algorithms."""
        return self.sync.outers

    @property
    def telemetry(self) -> Telemetry:
        """Bytes and seconds over all local steps, the warm-up included."""
        own = self.runner.scheduler.telemetry
        return own.with_those_of(outer.telemetry for outer in self.outers) if self.outers else own

    def _share_buffers(self, step: int) -> Job:
        """Synchronise the model's buffers, if rounds do."""
        if self.buffers is not None:
            has_seen_data = (self.replica.steps_since_sync > 0 and self._has_own_buffers) or not self.joining
            yield from self.runner.scheduler.through(self.buffers.exchange(self.comm, step, has_seen_data))
            if step % self.buffers.every == 0:
                self._has_own_buffers = False

    # -- the optimizer's step ----------------------------------------------------------------------------------------

    @property
    def local_step(self) -> int:
        return self.step - self.rule.warmup_steps

    @property
    def overlaps(self) -> bool:
        return self.rule.overlap and not self.joining

    def before_step(self) -> None:
        """Finish the round in flight before a local step; called by the step pre-hook."""
        self.replica.follow()
        self._check_load()
        self._add_new_parameters()
        if self._admits:
            self.comm.begin_step()
        self.finish_round()
        if self.local_step >= 0:
            self.replica.mark_stepped()
        buckets = self.buckets()  # new parameters start from weights before any local step
        if self.rule.prepares and self.local_step >= 0:
            for bucket, ctx in buckets.items():
                self.rule.before_step(bucket.read(), ctx)
        self._scaled.before_step(self.names)

    def _check_load(self) -> None:
        """Warn if state was loaded without torch's hooks, since torch and others replace the list of groups then."""
        before, self._groups = self._groups, self.optimizer.param_groups
        if before is not self._groups and not self._has_loaded:
            log.warning(
                "dgcopt: rank %s: %s has loaded state without torch's load_state_dict hooks, so the memory of %s was "
                "not restored. Call optimizer.averaging.restore(state['averaging']['dgcopt']) after load_state_dict",
                *(self.comm.rank, type(self.optimizer).__name__, type(self.rule).__name__),
            )
        self._has_loaded = False

    def _add_new_parameters(self) -> None:
        """Take in parameters that were added to the optimizer since it was wrapped."""
        if added := self.replica.find_new_parameters():
            self.sync.add_parameters(added)

    def after_step(self) -> None:
        """Run a round if one is due, or launch it if it overlaps; called by the step post-hook."""
        self._scaled.after_step()
        if self.local_step < 0 and (engine := self._engine) is not None and engine.gradients.void:
            return  # no rank took this step
        self.step += 1
        self.replica.count_step()
        if self.local_step == 0:  # the warm-up has ended
            if (engine := self._engine) is not None:
                engine.gradients.end_exchanges()
            for bucket, ctx in self.buckets().items():
                self._start(bucket, ctx)
        if self.local_step > 0:
            self.runner.scheduler.count_step(sum(param.numel() for param in self.replica.trained))
            self.last_own_step, self._has_own_buffers = self.local_step, True
            if self.rule.delay and self.rule.due(self.local_step + self.rule.delay) and not self.joining:
                self.sync.launch()
            if self.rule.due(self.local_step) or (self.rule.quorum is not None and self.comm.is_called):
                self.comm.close_admission()
                if self.comm.survives:
                    self._repeat_round()
                else:
                    self._take_part()
        self._follow_warm_up()

    def _repeat_round(self) -> None:
        """Take part in the round that is due, again after a loss; a rank that is late joins the others after it."""
        count_lost = self.runner.scheduler.telemetry.count_lost
        try:
            repeat_after_lost_ranks(self._take_part, self.comm, self._follow, count_lost)
        except VotedOut as error:
            if self.rule.quorum is None:
                raise
            self.comm.return_late(error)

    def add_samples(self, number: float) -> None:
        """Report samples, or tokens, of this rank's last local step: its weight in the next round of a quorum.

        Every rank reports in every step, or none does: the weight is then the number of local steps.
        """
        self._samples += number

    def _weigh(self) -> Job:
        """Set the weight of this rank's progress: its samples since the last round that it was in."""
        samples = self._samples or self.replica.steps_since_sync
        mine = self.comm.to_wire(torch.tensor([samples], dtype=torch.float64))
        total = float((yield self.runner.scheduler.start(AllReduce(mine, "sum", group="control"), "samples")))
        self.replica.set_weight(samples * self.comm.size / total if total > 0 else 1.0)

    def _take_part(self) -> None:
        """Take part in the round that is due; launch it if it overlaps."""
        if self.rule.quorum is not None:
            self.comm.gather(self.rule.quorum, self.rule.grace)
            while not self.rule.due(self.local_step):  # others have made more steps
                self.step += 1
            self.runner.add(self._weigh())
            self.runner.go()
        if self.buffers is not None:
            self.runner.add(self._share_buffers(self.local_step))
            self.runner.go()
        if self.overlaps:
            self.runner.add(self._overlapping())
            self.runner.begin()
        else:
            self.runner.add(self.sync.run())
            self.runner.go()
        if self.replica.steps_since_sync == 0:
            self._samples = 0.0

    def _follow(self) -> None:
        """Continue with the current ranks, if some were lost or have joined; memory and weights stay."""
        if self._generation == self.comm.generation:
            return
        telemetry = self.runner.scheduler.telemetry
        self.sync.abort()
        self._attend()
        self.runner.scheduler.count_in(telemetry)
        self.replica.follow_ranks()
        self.sync.join()

    def _overlapping(self) -> Job:
        self.sync.launch()
        yield from self.sync.run()

    def _follow_warm_up(self) -> None:
        """Switch the optimizer between averaged gradients (warm-up) and local steps."""
        if self.rule.warmup_steps and (steps := synchronised(self.optimizer)) is not None:
            is_local = self.local_step >= 0
            if is_local != (steps.mode is Mode.LOCAL):
                steps.switch(Mode.LOCAL if is_local else Mode.EXCHANGE)
            if steps.engine is not None:
                steps.engine.gradients.flush_next(self.local_step == -1)  # the final exchange
                self.runner.scheduler.count_in(steps.engine.telemetry)  # a single account for both

    def finish_round(self) -> None:
        """Finish the round in flight; before the first local step compare settings and weights with the other ranks."""
        if not self.runner.failed:  # otherwise the kept error is the one to report
            self.commit.check(self.comm.rank)
        if self.replica.started:
            self.runner.finish()
        else:
            self.comm.complete(self._begin_together)
        if self.overlaps:
            self.sync.apply()

    def _begin_together(self) -> None:
        self._follow()
        self.runner.finish(self._begin)

    # -- jobs that wait for other ranks ----------------------------------------------------------------------------

    def _offer(self) -> Job | None:
        """Return a job for a waiting rank: the comparison before the first step, or a round without data."""
        if not self.replica.started:
            return self._begin()
        return self._round_without_data() if self.joining and not self.participation.here else None

    def _round_without_data(self) -> Job:
        """Take part in the next round of the ranks that still have data, or learn that none has."""
        before = self.step
        ahead = range(max(1, self.local_step + 1), self.local_step + FAR)
        due = next((step for step in ahead if self.rule.due(step)), None)
        if due is None:
            raise ConfigError(
                f"rank {self.comm.rank} has run out of data, and {self.rule!r} has no round in the next {FAR:,} steps "
                f"in which it could take part. Exchange more often."
            )
        self.step += due - self.local_step
        self.replica.mark_stepped()  # the parameters that ranks with data step
        yield from self._share_buffers(self.local_step)
        skipped = self.telemetry.skipped
        yield from self.sync.run()
        was_spoiled = self.participation.ended and self.telemetry.skipped > skipped  # the next round would be too
        if was_spoiled or not self.participation.ranks:  # every rank has all progress, and all are at the same step
            self.step, self.joining = before, False
            self.participation.all_here()
            self.replica.set_weight(1.0)
        if was_spoiled:
            raise PayloadError(
                f"rank {self.comm.rank}: NaN or Inf arrived in the last round, after all ranks had run out of data, so "
                f"their weights are not averaged. Look for damaged messages by dgcopt.init(checksums=True), and at the "
                f"exchange of {self.rule!r}; then call optimizer.averaging.average(), or resume from a checkpoint."
            )

    def _begin(self) -> Job:
        """Compare settings and weights over ranks, then give the rule the initial weights."""
        self._add_new_parameters()
        replica, scheduler = self.replica, self.runner.scheduler
        source = f"of {abs(replica.saved_by)} ranks" if replica.saved_by else "none loaded"
        lines = [*replica.describe(), f"state: {source}{', not merged' if replica.saved_by < 0 else ''}"]
        yield from scheduler.through(compare(lines, self.comm.rank, "parameters and settings", LOADED_BY_ALL))
        if not replica.saved_by:
            named = {name: [param] for param, name in self.names.items()}
            yield from scheduler.through(replicas(named, self.comm, None, "raise"))
        elif replica.needs_merge:
            self._missed = False
            self.buckets()
            yield from replica.merge(scheduler)
        self._start_all()
        self._warn_of_residual()
        if self._missed:
            self.sync.relaunch()
            self._missed = False

    def _warn_of_residual(self) -> None:
        """Warn if the loaded state holds the residual of a longer warm-up, whose last step would have flushed it."""
        engine = self._engine
        if engine is None or not self.rule.warmup_steps or self.local_step < 0:
            return
        if norm := engine.store.residual_norm():
            log.warning(
                "dgcopt: rank %s: the loaded state is of step %d of a warm-up, which warmup_steps=%d ends before: its "
                "residual, of norm %.3g, is not sent. Resume with at least warmup_steps=%d",
                *(self.comm.rank, self.step, self.rule.warmup_steps, norm, self.step + 1),
            )

    def _start_all(self) -> None:
        """Give the rule the weights from which training starts or resumes."""
        for bucket, ctx in self.buckets().items():
            self._start(bucket, ctx)
        self.replica.start()

    def buckets(self) -> dict[Bucket, Weights]:
        return self.replica.lay_out(self._start, unsynced_only=self._missed)  # as in the round in flight

    def _start(self, bucket: Bucket, ctx: Weights) -> None:
        """Give the rule the weights from which local steps start; after the warm-up, if there is one."""
        if self.local_step >= 0:
            self.rule.start(bucket.read(), ctx.at(self.local_step))
            ctx.commit()
            self.sync.start(bucket)


def _check_keeps_no_weights(optimizer: Optimizer) -> None:
    """Raise ConfigError for schedule-free optimizers, told by the methods that swap two sets of weights."""
    if callable(getattr(optimizer, "train", None)) and callable(getattr(optimizer, "eval", None)):
        raise ConfigError(
            f"{type(optimizer).__name__} is schedule-free: its state holds weights beside the parameters, which "
            f"averaging would leave apart. Use DistributedOptimizer, or an optimizer with a schedule."
        )


def _before_step(optimizer: Optimizer, args: Any, kwargs: Any) -> None:
    parts = held(optimizer)
    if parts.gradients is None or not parts.gradients.in_own_step:
        parts.averaging.before_step()


def _after_step(optimizer: Optimizer, args: Any, kwargs: Any) -> None:
    parts = held(optimizer)
    if parts.gradients is None or not parts.gradients.in_own_step:
        parts.averaging.after_step()
