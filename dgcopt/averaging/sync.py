"""One rank's part in a round of averaging: from the weights after local steps to the weights before the next one.

`Rounds` decides when a round runs. A round that fails leaves weights and memory unchanged.
"""

from __future__ import annotations

import logging
from collections.abc import Generator, Iterable, Sequence
from typing import Any, Protocol

import torch
from torch import Tensor

from ..comm import Comm, Handle
from ..errors import PayloadError
from ..exchange.commit import Commit
from ..exchange.runner import Job, Runner, on_their_way
from ..exchange.scheduler import PendingExchange
from ..flat.buckets import Bucket
from ..flat.gradient import is_finite
from .replica import Replica
from .rule import Rule
from .weights import Weights

__all__ = ["Round", "Sync", "WeightSync"]

log = logging.getLogger("dgcopt")


class Round(Protocol):
    """The surroundings of a `Sync`: one optimizer's weights on one rank, and the wire.

    Attributes:
        rule: the algorithm.
        comm: the wire.
        names: all parameters and their names.
        replica: their weights and memory.
        runner: the jobs that wait for other ranks.
        joining: True while ranks may run out of data, so that all of them vote on each round and none overlaps.
        commit: the marker of a round that is being written back.
    """

    rule: Rule
    comm: Comm
    names: dict[Tensor, str]
    replica: Replica
    runner: Runner
    joining: bool
    commit: Commit

    @property
    def local_step(self) -> int:
        """Local steps since the warm-up."""

    @property
    def overlaps(self) -> bool:
        """True if a round runs during the next forward and backward pass."""

    def buckets(self) -> dict[Bucket, Weights]:
        """Return the current layout of the exchanged weights."""

    def vote(
        self, finite: bool, moved: bool, exchanges: Sequence[PendingExchange[Any]] = ()
    ) -> Generator[Handle, Tensor, bool]:
        """Vote on the round; return True if some rank has something to contribute."""

    def vote_on_arrival(self, finite: bool) -> Generator[Handle, Tensor, list[int]]:
        """Return the ranks to which the round has brought NaN or Inf."""


class Sync:
    """One rank's part in each round; created before anything is sent or changed.

    Attributes: `round`, its surroundings; `outers`, optimizers that step in a round, whose bytes and residuals count.
    """

    def __init__(self, round: Round) -> None:
        self.round = round
        self.outers: list[Any] = []

    def join(self) -> None:
        """Adapt to the wire that `round` has joined, its first or another one."""

    def set_steps_per_epoch(self, steps: int) -> None:
        """Set the number of local steps per epoch, for schedules that count epochs."""
        self.round.rule.set_steps_per_epoch(steps)

    def start(self, bucket: Bucket) -> None:
        """See the weights from which local steps start."""

    def add_parameters(self, params: Iterable[Tensor]) -> None:
        """Take in parameters that were added to the optimizer."""

    def stepped(self) -> None:
        """Note a local step, which may have made a round due."""

    def launch(self) -> None:
        """Launch a round that overlaps with training (`Averaging.overlap`)."""
        raise NotImplementedError

    def run(self) -> Job:
        """Run a round, or the rest of it. Votes through `round.vote` where all ranks meet."""
        raise NotImplementedError

    def apply(self) -> None:
        """Apply the result of an overlapping round, before a local step."""

    @property
    def in_flight(self) -> bool:
        """True if a round was launched and has not ended."""
        raise NotImplementedError

    def relaunch(self) -> None:
        """Launch the round again that was in flight when state was saved."""
        raise NotImplementedError

    def cancel(self) -> None:
        """Wait for in-flight collectives and ignore their results, on all ranks, before state is loaded."""

    def abort(self) -> str:
        """Roll back a failed round; return the words to append to an error of the wire."""
        return ""

    def save(self, entry: dict[str, Any], state: dict[str, Any]) -> None:
        """Add to averaging's `entry` in `optimizer.state_dict()`, or to the `state` in it."""

    def load(self, entry: dict[str, Any], state: dict[str, Any]) -> None:
        """Restore what `save` has added; everything else is loaded already."""


class WeightSync(Sync):
    """The exchange of all weights, bucket by bucket (`Averaging.exchange`), written back once all of it has arrived."""

    def __init__(self, round: Round) -> None:
        super().__init__(round)
        self._exchanges: list[PendingExchange[Bucket]] = []
        self._copies: dict[Bucket, Tensor] = {}
        self._buckets: dict[Bucket, Weights] = {}
        self._finite = True

    @torch.no_grad()
    def launch(self) -> None:
        round = self.round
        self._copy_weights()
        if not round.rule.meets and not self._finite:
            raise round.replica.not_finite(round.local_step, [round.comm.rank])
        for bucket, x in self._copies.items():
            ctx = self._buckets[bucket]
            ctx.step = round.local_step
            pending = PendingExchange(bucket.label, bucket)
            self._exchanges.append(pending)
            round.runner.scheduler.launch(pending, round.rule.exchange(x, ctx))
        self._copies = {}

    def _copy_weights(self) -> None:
        """Copy the current weights and settings, for the vote and for the exchange."""
        if not self._copies:
            self._buckets = self.round.buckets()
            for bucket, ctx in self._buckets.items():
                self._copies[bucket] = bucket.read()
                ctx.group = dict(ctx.group)  # a scheduler may step before others have voted
            self._finite = all(is_finite(x) for x in self._copies.values())

    @torch.no_grad()
    def run(self) -> Job:
        round = self.round
        if round.rule.meets or round.joining:
            if not self._exchanges:
                self._copy_weights()
            if not (yield from round.vote(self._finite, round.replica.steps_since_sync > 0, self._exchanges)):
                self._copies = {}
                return
        if not self._exchanges:
            self.launch()
        yield from round.runner.scheduler.finish(self._exchanges, round.rule.in_turn)
        if not (yield from self._has_arrived_whole()):
            self._roll_back()
            round.runner.scheduler.telemetry.skipped += 1
        elif not round.overlaps:
            self.apply()

    def _has_arrived_whole(self) -> Generator[Handle, Tensor, bool]:
        """Return False, on all ranks, if NaN or Inf has arrived on any: the weights that were sent were finite.

        Raises PayloadError where only this rank knows it, and does not meet the others.
        """
        round, step = self.round, self.round.local_step
        damaged = [pending.label for pending in self._exchanges if not _is_finite(pending)]
        where = f" in {', '.join(damaged)}" if damaged else ""
        if not round.rule.arrives_alike(step):
            if round.rule.meets or round.joining:
                ranks = yield from round.vote_on_arrival(not damaged)
                where += f" on rank(s) {ranks}" if ranks else ""
            elif damaged:
                raise PayloadError(
                    f"rank {round.comm.rank}: NaN or Inf arrived{where} in the round after local step {step}. This "
                    f"rank's weights are unchanged; its peers may have applied the round. Resume from a checkpoint."
                )
        if where:
            log.warning(
                "dgcopt: rank %d: the round after local step %d is skipped, on all ranks: NaN or Inf arrived%s",
                *(round.comm.rank, step, where),
            )
        return not where

    @torch.no_grad()
    def apply(self) -> None:
        if not self._exchanges:
            return
        self.round.commit.begin("memory and weights")
        for pending in self._exchanges:
            assert isinstance(pending.result, Tensor)
            self._buckets[pending.of].commit()
            pending.of.write(pending.result)
        self.round.commit.end()
        self._exchanges = []
        rule, step = self.round.rule, self.round.local_step
        self.round.replica.mark_synced(self.round.names if rule.identical(step) else (), rule.reaches_all(step))

    @property
    def in_flight(self) -> bool:
        return bool(self._exchanges)

    def relaunch(self) -> None:
        self.launch()
        self.round.runner.add(self.run())

    def abort(self) -> str:
        told = on_their_way(self._exchanges)
        if self._exchanges and not self.round.rule.meets:  # peers may have taken what this rank has sent
            self.round.commit.begin("the weights of its peers")
        self._roll_back()
        return told

    def _roll_back(self) -> None:
        self.round.replica.rollback()
        self._exchanges, self._copies = [], {}


def _is_finite(pending: PendingExchange[Bucket]) -> bool:
    assert isinstance(pending.result, Tensor)
    return is_finite(pending.result)
