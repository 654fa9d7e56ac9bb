"""The attribute `optimizer.averaging`: the schedule of rounds, with means on request, rejoining, and saved state."""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch.optim import Optimizer

from ..collectives import AllReduce
from ..comm import Comm, current_comm
from ..errors import ConfigError
from ..exchange.buffers import Buffers
from ..exchange.held import check_names, held, hold
from ..exchange.late_warning import LateWarning
from ..exchange.runner import Job
from ..flat.optimizer_state import (
    SHARD,
    STATE_KEY,
    THROUGH_TORCH,
    check_owner,
    check_shard,
    kept_by,
    put_mark,
    take_mark,
    unmarked,
)
from ..flat.store import check_format
from ..gradients.introspection import broadcasting_root
from ..gradients.replicas import shard_of
from ..gradients.synchronised import synchronised
from .replica import Replica
from .schedule import Schedule
from .sync import Round, Sync
from .weights import distance

__all__ = ["Rounds"]

log = logging.getLogger("dgcopt")

KEY = "averaging"
"""Key of the averaging state in `optimizer.state_dict()`."""


class Rounds(Schedule):
    """Averaging of one optimizer's weights on one rank, its attribute `averaging`; see also `Schedule`."""

    def __init__(self, sync: Callable[[Round], Sync], replica: Replica, comm: Comm | None) -> None:
        optimizer = replica.optimizer
        if held(optimizer).averaging is not None:
            raise ConfigError(
                f"this optimizer is already averaged by {held(optimizer).averaging.rule!r}. Wrap it once."
            )
        check_names(optimizer, [KEY])
        super().__init__(sync, replica, comm)
        self._late_warning = LateWarning(optimizer, THROUGH_TORCH)
        self.resume_at(take_mark(optimizer.param_groups, KEY, self.comm.rank))
        hold(optimizer, averaging=self)
        optimizer.averaging = self  # type: ignore[attr-defined]
        optimizer.register_state_dict_post_hook(_save)
        optimizer.register_load_state_dict_pre_hook(_load)
        self.sync.join()

    # -- means -------------------------------------------------------------------------------------------------------

    def residual_norm(self) -> float:
        """Euclidean norm of this rank's residuals; 0.0 for algorithms without any."""
        return math.hypot(self.replica.store.residual_norm(), *(outer.residual_norm() for outer in self.outers))

    def consensus_distance(self) -> float:
        """Consensus distance: the root mean square over ranks of |x_i - mean x|. Collective: an allreduce.

        Not counted by `telemetry`. Source: Kong et al., "Consensus Control for Decentralized Deep Learning", ICML 2021.
        """
        self.finish_round()
        return math.sqrt(self.comm.drive(distance(self.buckets(), self.comm)))

    @contextmanager
    def averaged(self) -> Iterator[None]:
        """Context in which weights are the mean over ranks, for evaluation or saving; restores own weights. Collective.

        Not counted by `telemetry`, and not part of the algorithm, unlike `average()`.
        """
        self.finish_round()
        own = {bucket: bucket.read() for bucket in self.buckets()}
        try:
            for bucket, x in own.items():
                bucket.write(self.comm.run(AllReduce(x.clone(), label="weights to evaluate")))
            yield
        finally:
            for bucket, x in own.items():
                bucket.write(x)

    def average(self) -> None:
        """Set all ranks' weights to their exact mean, for example at the end of training. Collective."""
        self.finish_round()
        self.runner.add(self._average())
        self.runner.go()

    def _average(self) -> Job:
        yield from self._share_buffers(0)
        for bucket in self.buckets():
            bucket.write((yield self.runner.scheduler.start(AllReduce(bucket.read()), f"mean of {bucket.label}")))
        self.replica.mark_synced(self.names)

    # -- other ranks and data ----------------------------------------------------------------------------------------

    def serving(self, throws: bool) -> Sequence[Rounds]:
        """Return the parts of this optimizer that serve ranks with data; see `dgcopt.join`."""
        return [self]

    def join(self, divides: bool, throws: bool) -> None:
        """Allow ranks to run out of data from now on; see `Participation.begin`."""
        self.finish_round()
        self.joining = True
        self.participation.begin(divides, throws)

    def rejoin(self, comm: Comm | None = None) -> None:
        """Continue over another wire after ranks have left or joined, from the mean of their weights.

        All ranks of `comm` must call it. The DistributedOptimizer of a warm-up rejoins too.
        """
        if self.comm.joins_replicas:
            raise ConfigError(
                "averaging of sharded parameters cannot rejoin, as other ranks would hold other shards: restart all "
                "ranks from a checkpoint"
            )
        self.sync.abort()
        state, telemetry = self.state(), self.runner.scheduler.telemetry
        state["memory"]["weights"] = self.replica.weights()
        steps = synchronised(self.optimizer)
        comes_along = steps is not None and steps.comm is self.comm
        self._join_wire(current_comm(comm))
        state["saved_by"] = -self.comm.size  # each rank brings its own weights
        if steps is not None and comes_along:
            steps.rejoin(self.comm)
        self.runner.scheduler.count_in(telemetry)
        self.restore(state)
        self.sync.join()

    def sync_buffers(self, buffers: Buffers) -> None:
        """Synchronise buffers of the model in rounds from now on."""
        self.buffers = buffers

    def set_steps_per_epoch(self, steps: int) -> None:
        """Set the number of local steps per epoch; see `Averaging.set_steps_per_epoch`."""
        self.sync.set_steps_per_epoch(steps)

    # -- persistence -------------------------------------------------------------------------------------------------

    def state(self) -> dict[str, Any]:
        """Return a checkpointable copy, for `restore`."""
        replica, state = self.replica, self.replica.state()
        if not replica.needs_merge and (replica.steps_since_sync or not self.rule.identical(self.local_step)):
            # another number of ranks resumes from the mean of all weights
            state["memory"]["weights"] = replica.weights()
        if (shard := self.shard()) is not None:
            state[SHARD] = shard
        under_way = self._missed or self.sync.in_flight
        return kept_by(self.comm.rank, self.comm.size, step=self.step, under_way=under_way, **state)

    def shard(self) -> dict[str, Any] | None:
        """Return this rank's shard in a checkpoint's form; None for whole parameters."""
        return shard_of(self.names, self.comm) if self.comm.joins_replicas else None

    def restore(self, state: dict[str, Any]) -> None:
        """Restore a `state`; ranks compare or merge at the next step.

        Raises ConfigError if it does not fit the parameters.
        """
        if self.runner.busy:
            self.runner.finish()
        self.sync.cancel()
        self.runner.clear()
        self.sync.abort()
        self._add_new_parameters()
        self.commit.end()
        self.replica.restore(state)
        self.step, self._missed = state["step"], state["under_way"]
        self.last_own_step = self.local_step
        self._follow_warm_up()

    def entry(self) -> dict[str, Any]:
        """Return averaging's entry in `optimizer.state_dict()`, of this rank."""
        self.commit.check(self.comm.rank)
        state = self.state()
        entry = {STATE_KEY: state}
        self.sync.save(entry, state)
        return entry

    def restore_entry(self, entry: dict[str, Any]) -> None:
        """Restore an `entry`; ranks compare or merge at the next step."""
        self._late_warning.cancel()
        self.restore(entry[STATE_KEY])
        self.sync.load(entry, entry[STATE_KEY])

    def _load_entry(self, state_dict: dict[str, Any]) -> dict[str, Any]:
        """Restore averaging's entry in a state of the optimizer, and return the rest of that state."""
        self._has_loaded = True
        groups = [unmarked(group) for group in state_dict["param_groups"]]
        rest = {key: value for key, value in state_dict.items() if key != KEY} | {"param_groups": groups}
        if KEY not in state_dict:
            self.resume_without(state_dict["param_groups"])
            return rest
        state = state_dict[KEY][STATE_KEY]
        check_format(state)
        why = (
            f"each rank has its own weights. dgcopt.checkpoint.load distributes it to any number of ranks; or delete "
            f"state_dict[{KEY!r}] to start without it."
        )
        check_shard(state, self.shard())
        check_owner(state, self.comm.rank, self.comm.size, "", why)
        self.restore_entry(state_dict[KEY])
        return rest

    def resume_without(self, groups: list[dict[str, Any]]) -> None:
        """Resume at the step that the marks of loaded parameter groups name, without averaging's entry."""
        tell = self._late_warning.set if self.comm.joins_replicas else log.warning  # dgcopt.sharded.load may follow
        if step := take_mark([dict(group) for group in groups], KEY, self.comm.rank, tell):
            self.resume_at(step)

    def resume_at(self, step: int) -> None:
        """Set the step count from a state without averaging memory, before this rank has made a step."""
        if not self.replica.started:
            self.step = step
            self._follow_warm_up()

    def give_state(self) -> dict[str, Any] | None:
        """Return the state for a rank that rejoins: without residual; None before the first step.

        That rank takes the weights separately.
        """
        if not self.replica.started:
            return None
        entry: dict[str, Any] = {STATE_KEY: self.state()}
        entry[STATE_KEY]["memory"].pop("weights", None)
        self.sync.save(entry, entry[STATE_KEY])
        for outer in entry.get("outers", ()):
            outer["param_groups"] = [*map(unmarked, outer["param_groups"])]
            if STATE_KEY in outer:
                outer[STATE_KEY]["memory"] = {}
        return entry

    @torch.no_grad()
    def take_state(self, entry: dict[str, Any]) -> None:
        """Continue from the state of a live rank, after its weights: there is nothing to compare or merge.

        A late rank keeps its residual and its progress, which is applied to the anchor that it receives.
        """
        here = {"rank": int(self.comm.rank), "world_size": self.comm.size}
        is_late, since = self.replica.started, self.replica.steps_since_sync
        for outer, mine in zip(entry.get("outers", ()), self.outers, strict=True):
            if STATE_KEY in outer:
                outer[STATE_KEY] |= here
                outer[STATE_KEY]["memory"] = mine.state_dict()[STATE_KEY]["memory"] if is_late else {}
        progress = self.sync.progress() if is_late else {}
        state = {**entry[STATE_KEY], **here, "saved_by": self.comm.size}
        self._follow()
        self.restore(state)
        self.sync.load(entry, state)
        self._start_all()
        if is_late:
            self.sync.move_progress(progress)
            self.replica.keep_steps(since)

    @property
    def has_begun(self) -> bool:
        """True once this rank has compared its start with the others, or taken the state of one."""
        return self.replica.started


def _save(optimizer: Optimizer, state_dict: dict[str, Any]) -> None:
    rounds: Rounds = held(optimizer).averaging
    state_dict[KEY] = rounds.entry()
    state = state_dict[KEY][STATE_KEY]
    if broadcasting_root() is None:  # Horovod's broadcast would take it for a setting
        put_mark(state_dict, KEY, rounds.step, state["memory"], state["shared"])


def _load(optimizer: Optimizer, state_dict: dict[str, Any]) -> dict[str, Any]:
    rounds: Rounds = held(optimizer).averaging
    return rounds._load_entry(state_dict)
