"""One rank's part in averaging: it hooks into the optimizer's step, and has rounds of the algorithm made when due.

After each local step the algorithm says whether a round is due. What that is, `Sync` knows; who takes part, the ranks
vote on, where all meet anyway or beside a round that overlaps with training: are the weights of all finite, do all
train the same parameters, who still has data?

Where ranks take turns, none can wait for the others in its own step: the last one to step takes the round to its end
for all of them (`dgcopt.exchange.runner`).
"""

from __future__ import annotations

import math
from collections.abc import Generator, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, cast

import torch
from torch import Tensor
from torch.optim import Optimizer

from ..checkpoint import STATE_KEY, check_owner, kept_by, put_mark, take_mark, unmarked
from ..collectives import AllReduce
from ..comm import Comm, Handle, broadcasting_root, current_comm
from ..compressors.own_step import check_steps_alone
from ..errors import ConfigError, MismatchError
from ..exchange.agreement import SAME_MODEL, compare
from ..exchange.attendance import Attendance
from ..exchange.buffers import Buffers
from ..exchange.divergence import replicas
from ..exchange.flights import Flight
from ..exchange.parameters import given_names
from ..exchange.runner import Job, Runner
from ..exchange.telemetry import Telemetry
from ..exchange.vote import Ballot, checksum, vote
from ..flat.buckets import Bucket
from ..gradients.optimizer import Distributed, DistributedOptimizer
from ..gradients.stepping import Mode, in_own_step
from .amp import ScaledSteps
from .base import Averaging
from .replica import Replica
from .weights import Weights, distance

__all__ = ["Rounds"]

FAR = 1_000_000
"""Steps ahead in which a rank without data looks for the next exchange."""

LOADED_BY_ALL = (
    f"{SAME_MODEL} State is loaded on all ranks or on none, each rank's own: dgcopt.checkpoint.load hands it out."
)

KEY = "averaging"
"""Where `optimizer.state_dict()` keeps what is here."""


class Rounds:
    """What `optimizer.averaging` is: the averaging of one optimizer's weights on one rank.

    Attributes:
        rule: the algorithm.
        comm: the wire.
        step: local steps made so far, warm-up included.
        names: all parameters and their names.
        replica: their weights, and what is kept of them.
        sync: what this rank does in a round.
        attendance: whether this rank has data, and how many ranks do; of no account unless `joining`.
        joining: whether ranks may run out of data, so that all vote on each round and none overlaps.
        buffers: of the model, that rounds make alike; see `dgcopt.sync_buffers`.
        runner: what waits for other ranks.
    """

    def __init__(
        self,
        rule: Averaging,
        optimizer: Optimizer,
        named_parameters: Iterable[tuple[str, Tensor]] | None,
        comm: Comm | None,
    ) -> None:
        if hasattr(optimizer, KEY):
            raise ConfigError(f"this optimizer is averaged by {getattr(optimizer, KEY).rule!r} already: wrap it once")
        self.rule = rule
        self.optimizer = optimizer
        self.replica = Replica(rule, optimizer, given_names(named_parameters) or {})
        self.names = self.replica.names
        check_steps_alone(optimizer, f"{type(rule).__name__} averages weights that it has moved")
        self.sync = rule.sync(self)
        self.step = 0
        self.buffers: Buffers | None = None
        comm = current_comm(comm)
        if not rule.warmup_steps and comm.size > 1 and getattr(optimizer, "comm", None) is comm:
            raise ConfigError(
                f"this optimizer averages gradients over all ranks at every step, so there is nothing left for "
                f"{type(rule).__name__}: give it the bare optimizer, or one with a process_set of fewer ranks, or set "
                f"warmup_steps"
            )
        self._join_wire(comm)
        if rule.warmup_steps and not isinstance(optimizer, Distributed):
            DistributedOptimizer(optimizer, [(name, param) for param, name in self.names.items()], comm=comm)
        self.step = take_mark(optimizer.param_groups, KEY, comm.rank)
        self._scaled = ScaledSteps(optimizer)
        self._follow_warm_up()
        optimizer.averaging = self  # type: ignore[attr-defined]
        hook = optimizer.register_step_pre_hook(_before_step)
        # before that of a DistributedOptimizer, which exchanges gradients and may add updates to weights
        cast(Any, optimizer)._optimizer_step_pre_hooks.move_to_end(hook.id, last=False)
        optimizer.register_step_post_hook(_after_step)
        optimizer.register_state_dict_post_hook(_save)
        optimizer.register_load_state_dict_pre_hook(_load)
        self.sync.join()

    def _join_wire(self, comm: Comm) -> None:
        self.rule.check(comm, list(self.names.values()))
        self.comm = comm
        self.runner = Runner(comm, "averaging", self._offer, self.sync.abandon)
        self.replica.join(comm)
        self.attendance = Attendance(comm.size)
        self.joining = False
        self._missed = False  # whether a round that was under way is to be made again
        if comm.waits_at_start:
            comm.drive(compare(self.replica.describe(), comm.rank, "parameters and settings"))

    # -- looking -----------------------------------------------------------------------------------------------------

    @property
    def outers(self) -> list[Any]:
        """The outer optimizers of DiLoCo, a DistributedOptimizer of anchors for each fragment; otherwise none."""
        return self.sync.outers

    @property
    def telemetry(self) -> Telemetry:
        """Bytes and seconds so far, over all local steps; those of a warm-up included."""
        own = self.runner.traffic.telemetry
        return own.with_those_of(outer.telemetry for outer in self.outers) if self.outers else own

    def residual_norm(self) -> float:
        """Euclidean norm of what this rank holds back; 0.0 for algorithms that hold nothing back."""
        return math.hypot(self.replica.store.residual_norm(), *(outer.residual_norm() for outer in self.outers))

    def consensus_distance(self) -> float:
        """How far apart ranks are: the root mean square over ranks of |x_i - mean x|; collective, an allreduce.

        Not counted by `telemetry`. Source: Kong et al., "Consensus Control for Decentralized Deep Learning", ICML 2021.
        """
        self.settle()
        return math.sqrt(self.comm.drive(distance(self.buckets(), self.comm)))

    @contextmanager
    def averaged(self) -> Iterator[None]:
        """Within it, weights are the mean over ranks, to be evaluated or saved; afterwards each rank's own. Collective.

        Not counted by `telemetry`, and no part of the algorithm; `average()` is.
        """
        self.settle()
        own = {bucket: bucket.read() for bucket in self.buckets()}
        for bucket, x in own.items():
            bucket.write(self.comm.run(AllReduce(x.clone(), label="weights to evaluate")))
        try:
            yield
        finally:
            for bucket, x in own.items():
                bucket.write(x)

    def average(self) -> None:
        """Make all ranks' weights their exact mean, such as at the end of training. Collective."""
        self.settle()
        self.runner.add(self._average())
        self.runner.go()

    def _average(self) -> Job:
        if self.buffers is not None:
            yield from self._share_buffers(self.buffers, 0)
        for bucket in self.buckets():
            bucket.write((yield self.runner.traffic.start(AllReduce(bucket.read()), f"mean of {bucket.label}")))
        self.replica.synced(self.names)

    def _share_buffers(self, buffers: Buffers, step: int) -> Job:
        has_moved = self.replica.since > 0 or not self.joining
        yield from self.runner.traffic.through(buffers.exchange(self.comm, step, has_moved))

    # -- the optimizer's step ----------------------------------------------------------------------------------------

    @property
    def local_step(self) -> int:
        """Steps since the warm-up, in which gradients are averaged."""
        return self.step - self.rule.warmup_steps

    @property
    def overlaps(self) -> bool:
        """Whether a round goes on beside the next forward and backward pass."""
        return self.rule.overlap and not self.joining

    def before_step(self) -> None:
        """Called before each local step."""
        self._take_in_parameters()
        self.settle()
        buckets = self.buckets()  # so that what is new starts from weights that no local step has changed
        if self.rule.prepares and self.local_step >= 0:
            for bucket, ctx in buckets.items():
                self.rule.before_step(bucket.read(), ctx)
        self._scaled.before_step(self.names)

    def _take_in_parameters(self) -> None:
        """Those that the optimizer was given since it was wrapped."""
        self.sync.add_parameters(self.replica.find_new_parameters())

    def after_step(self) -> None:
        """Called after each local step: a round, if one is due, or its beginning if it overlaps with what is next."""
        self._scaled.after_step()
        if self.local_step < 0 and self._is_void:
            return
        self.step += 1
        self.replica.since += 1
        if self.local_step == 0:  # a warm-up has ended
            if isinstance(self.optimizer, Distributed) and self.optimizer.engine is not None:
                self.optimizer.engine.end()
            for bucket, ctx in self.buckets().items():
                self._start(bucket, ctx)
        if self.local_step > 0:
            trained = self.replica.trained
            self.replica.apart.update(trained)
            self.runner.traffic.count_step(sum(param.numel() for param in trained))
            self.sync.stepped()
            if self.rule.due(self.local_step):
                if self.buffers is not None:
                    self.runner.add(self._share_buffers(self.buffers, self.local_step))
                    self.runner.go()
                if self.overlaps:
                    self.runner.add(self._overlapping())
                    self.runner.begin()
                else:
                    self.runner.add(self.sync.run())
                    self.runner.go()
        self._follow_warm_up()

    @property
    def _is_void(self) -> bool:
        """Whether no rank has taken the last step of the warm-up, which is then none of it."""
        engine = self.optimizer.engine if isinstance(self.optimizer, Distributed) else None
        return engine is not None and engine.void

    def _overlapping(self) -> Job:
        self.sync.launch()
        yield from self.sync.run()

    def _follow_warm_up(self) -> None:
        """During a warm-up the optimizer averages gradients; not before, nor after."""
        optimizer = self.optimizer
        if self.rule.warmup_steps and isinstance(optimizer, Distributed):
            is_local = self.local_step >= 0
            if is_local != (optimizer.mode is Mode.LOCAL):
                optimizer.mode = Mode.LOCAL if is_local else Mode.EXCHANGE
            if optimizer.engine is not None:
                optimizer.engine.sends_all = self.local_step == -1  # as nothing is sent by it from then on
                self.runner.traffic.telemetry = optimizer.engine.telemetry  # one account of it all

    def settle(self) -> None:
        """Before a local step: compare with the other ranks, if it is the first one; end what is under way."""
        self.runner.finish(None if self.replica.begun else self._begin)
        self.sync.apply()

    # -- jobs: what waits for other ranks ----------------------------------------------------------------------------

    def vote(self, finite: bool, moved: bool, flights: Sequence[Flight[Any]] = ()) -> Generator[Handle, Tensor, bool]:
        """Tell all ranks, and hear from them, where each stands; returns whether any has something to contribute.

        Args:
            finite: whether this rank's weights are.
            moved: whether it has something to contribute: a local step that no round has taken to all ranks.
            flights: what it has sent already.

        Raises, on all ranks, DivergenceError if weights are not finite on any, MismatchError if they are not at the
        same step or train different parameters, OutOfData if some have no data and that is to be an error.
        """
        trained = checksum(self.names[param] for param in self.replica.trained)
        ballot = Ballot(moved, finite, self.local_step, trained, len(flights), here=self.attendance.here)
        verdict = yield from self.runner.traffic.through(vote(ballot, self.comm.size, "vote"))
        if verdict.void or not verdict.alike:
            yield from self.runner.traffic.call_off(flights)
            if verdict.void:
                raise self.replica.not_finite(self.local_step, verdict.void)
            raise MismatchError("ranks train different parameters: set requires_grad alike on every rank")
        there = self.attendance
        there.check(verdict.absent)
        there.ranks = verdict.active_ranks
        counts = moved or not (there.divides and there.ranks)
        self.replica.set_weight(there.share if counts else 0.0)
        return there.ranks > 0

    def _offer(self) -> Job | None:
        """What another rank may wait for: the comparison before the first step, or a round without data."""
        if not self.replica.begun:
            return self._begin()
        return self._round_without_data() if self.joining and not self.attendance.here else None

    def _round_without_data(self) -> Job:
        """Take part in the next round of the ranks that still have data; or learn that there are none."""
        before = self.step
        ahead = range(max(1, self.local_step + 1), self.local_step + FAR)
        due = next((step for step in ahead if self.rule.due(step)), None)
        if due is None:
            raise ConfigError(
                f"rank {self.comm.rank} has run out of data, and no exchange in which it could take part is due in the "
                f"next {FAR:,} steps: let {self.rule!r} exchange more often"
            )
        self.step += due - self.local_step
        if self.buffers is not None:
            yield from self._share_buffers(self.buffers, self.local_step)
        yield from self.sync.run()
        if not self.attendance.ranks:  # all have what each has learned, and are at the same step
            self.step, self.joining = before, False
            self.attendance.all_here()
            self.replica.set_weight(1.0)

    @torch.no_grad()
    def _begin(self) -> Job:
        """Compare what must be equal, and let the algorithm see the weights that it starts from."""
        self._take_in_parameters()
        replica, traffic = self.replica, self.runner.traffic
        whose = f"of {abs(replica.saved_by)} ranks" if replica.saved_by else "none loaded"
        lines = [*replica.describe(), f"state: {whose}{', yet to come together' if replica.saved_by < 0 else ''}"]
        yield from traffic.through(compare(lines, self.comm.rank, "parameters and settings", LOADED_BY_ALL))
        buckets = self.buckets()
        if not replica.saved_by:
            named = {name: [param] for param, name in self.names.items()}
            yield from traffic.through(replicas(named, self.comm, None, "raise"))
        elif replica.is_to_merge:
            yield from replica.merge(traffic)
            self._missed = False
        replica.saved_by = 0
        for bucket, ctx in buckets.items():
            self._start(bucket, ctx)
        replica.begun = True
        if self._missed:
            self._missed = False
            self.sync.repeat()

    def buckets(self) -> dict[Bucket, Weights]:
        """The weights that are exchanged, as they are laid out now."""
        return self.replica.lay_out(self._start)

    def _start(self, bucket: Bucket, ctx: Weights) -> None:
        """Let the algorithm see the weights that local steps start from, which a warm-up has yet to make."""
        if self.local_step >= 0:
            ctx.step = self.local_step
            self.rule.start(bucket.read(), ctx)
            ctx.settle()
            self.sync.start(bucket)

    # -- what persists -----------------------------------------------------------------------------------------------

    def state(self) -> dict[str, Any]:
        """What `restore` takes."""
        state = self.replica.state()
        replica = self.replica
        if not replica.is_to_merge and (replica.since or not self.rule.identical(self.local_step)):
            # for another number of ranks, which go on from the mean of all weights that there were
            state["memory"]["weights"] = self.replica.weights()
        return kept_by(
            self.comm.rank, self.comm.size, step=self.step, under_way=self._missed or self.sync.under_way, **state
        )

    def restore(self, state: dict[str, Any]) -> None:
        """Take over what `state` gave; ranks compare, or come together, at the next step.

        Raises ConfigError if it does not fit the parameters.
        """
        if self.runner.busy:
            self.runner.finish()
        self.sync.call_off()
        self.runner.clear()
        self.sync.abandon()
        self._take_in_parameters()
        self.replica.restore(state)
        self.step, self._missed = state["step"], state["under_way"]
        self._follow_warm_up()

    def go_on_from(self, step: int) -> None:
        """State that came without what is kept here is of that step, before this rank has made any."""
        if not self.replica.begun:
            self.step = step
            self._follow_warm_up()

    def rejoin(self, comm: Comm | None = None) -> None:
        """Go on over another wire, after ranks were lost or have come; from the mean of the weights that are there.

        All ranks of `comm` must call it. A warm-up's DistributedOptimizer comes along.
        """
        self.sync.abandon()
        state, telemetry = self.state(), self.runner.traffic.telemetry
        state["memory"]["weights"] = self.replica.weights()
        comes_along = getattr(self.optimizer, "comm", None) is self.comm
        self._join_wire(current_comm(comm))
        state["saved_by"] = -self.comm.size  # as each brings its own
        if comes_along:
            cast(Any, self.optimizer).rejoin(self.comm)
        self.runner.traffic.telemetry = telemetry
        self.restore(state)
        self.sync.join()

    def set_steps_per_epoch(self, steps: int) -> None:
        """As `Averaging.set_steps_per_epoch`, for an optimizer that is averaged already."""
        self.sync.set_steps_per_epoch(steps)

    # -- uneven data -------------------------------------------------------------------------------------------------

    def join(self) -> None:
        """From now on ranks may run out of data: see `dgcopt.join`."""
        self.settle()
        self.joining = True


def _before_step(optimizer: Optimizer, args: Any, kwargs: Any) -> None:
    if not in_own_step(optimizer):
        cast(Any, optimizer).averaging.before_step()


def _after_step(optimizer: Optimizer, args: Any, kwargs: Any) -> None:
    if not in_own_step(optimizer):
        cast(Any, optimizer).averaging.after_step()


def _save(optimizer: Optimizer, state_dict: dict[str, Any]) -> None:
    rounds: Rounds = cast(Any, optimizer).averaging
    state = rounds.state()
    state_dict[KEY] = {STATE_KEY: state}
    rounds.sync.save(state_dict[KEY], state)
    if broadcasting_root() is None:  # Horovod's would make settings of it
        put_mark(state_dict, KEY, rounds.step, state["memory"], state["shared"])


def _load(optimizer: Optimizer, state_dict: dict[str, Any]) -> dict[str, Any] | None:
    rounds: Rounds = cast(Any, optimizer).averaging
    groups = [unmarked(group) for group in state_dict["param_groups"]]
    if KEY not in state_dict:
        if step := take_mark([dict(group) for group in state_dict["param_groups"]], KEY, rounds.comm.rank):
            rounds.go_on_from(step)
        return {**state_dict, "param_groups": groups}
    state = state_dict[KEY][STATE_KEY]
    why = (
        f"each rank has weights of its own. dgcopt.checkpoint.load hands it out to any number of ranks; or delete "
        f"state_dict[{KEY!r}] to do without."
    )
    check_owner(state, rounds.comm.rank, rounds.comm.size, "", why)
    rounds.restore(state)
    rounds.sync.load(state_dict[KEY], state)
    return {key: value for key, value in state_dict.items() if key != KEY} | {"param_groups": groups}
