"""One rank's part in a round of averaging: from the weights after local steps to the weights before the next one.

`Rounds` decides when a round runs. A round that fails leaves weights and memory unchanged.
"""

from __future__ import annotations

import logging
from collections.abc import Generator, Iterable, Sequence
from functools import partial
from typing import Any, Protocol

import torch
from torch import Tensor

from ..comm import Comm, Handle
from ..errors import PayloadError
from ..exchange.commit import CommitMarker, FinishedExchange, NotFinite, Write
from ..exchange.participation import Participation
from ..exchange.runner import Job, Runner, describe_in_flight
from ..exchange.scheduler import PendingExchange
from ..exchange.step import Aborted, Description, Step
from ..exchange.vote import Ballot, Verdict, checksum, vote
from ..flat.buckets import Bucket
from ..flat.gradient import SparseSum, is_finite
from .replica import Replica
from .rule import Rule
from .weights import Weights

__all__ = ["Round", "RoundStep", "Sync"]

log = logging.getLogger("dgcopt")


class Round(Protocol):
    """The context of a `Sync`: one optimizer's weights on one rank, and the wire.

    Attributes:
        rule: the algorithm.
        comm: the wire.
        names: all parameters and their names.
        replica: their weights and memory.
        runner: the jobs that wait for other ranks.
        joining: True while ranks may run out of data, so that all of them vote on each round and none overlaps.
        commit: the marker of a round that is being written back.
        participation: whether this rank has data, and how many ranks have; used while `joining`.
        last_own_step: the last local step that this rank has made with data of its own.
    """

    rule: Rule
    comm: Comm
    names: dict[Tensor, str]
    replica: Replica
    runner: Runner
    joining: bool
    commit: CommitMarker
    participation: Participation
    last_own_step: int

    @property
    def local_step(self) -> int:
        """Local steps since the warm-up."""

    @property
    def overlaps(self) -> bool:
        """True if a round runs during the next forward and backward pass."""

    def buckets(self) -> dict[Bucket, Weights]:
        """Return the current layout of the exchanged weights."""


class Sync:
    """One rank's part in each round; created before anything is sent or changed.

    A round exchanges all weights, bucket by bucket (`WeightStep`); an algorithm whose rounds do something else, as
    DiLoCo's outer steps, returns a subclass from `Averaging.sync`.

    Attributes:
        round: its surroundings.
        outers: optimizers that step in a round, whose bytes and residuals count.
    """

    def __init__(self, round: Round) -> None:
        self.round = round
        self.outers: list[Any] = []

    def join(self) -> None:
        """Adapt to the wire that `round` has joined, its first or another one."""
        self._step = WeightStep(self.round)
        self._exchanged: list[str] = []  # in the last round

    def set_steps_per_epoch(self, steps: int) -> None:
        """Set the number of local steps per epoch, for schedules that count epochs."""
        self.round.rule.set_steps_per_epoch(steps)

    def start(self, bucket: Bucket) -> None:
        """See the weights from which local steps start."""

    def add_parameters(self, params: Iterable[Tensor]) -> None:
        """Take in parameters that were added to the optimizer."""

    @torch.no_grad()
    def launch(self) -> None:
        """Launch a round that runs during local steps (`Averaging.overlap`, or `delay`)."""
        before, self._exchanged = self._exchanged, self.round.replica.exchanged()
        if self._exchanged == before or not before or not self._step.votes:
            self._step.launch()  # else `run` votes first: messages of other sizes would end processes of other ranks

    def run(self) -> Job:
        """Run a round, or the rest of it."""
        return self._step.take()

    @torch.no_grad()
    def apply(self) -> None:
        """Apply the result of an overlapping round, before a local step."""
        self._step.apply()

    @property
    def in_flight(self) -> bool:
        """True if a round was launched and has not ended."""
        return bool(self._step.exchanges) or (self.round.overlaps and self.round.runner.busy)

    @torch.no_grad()
    def relaunch(self) -> None:
        """Launch the round again that was in flight when state was saved."""
        self._step.launch()
        self.round.runner.add(self.run())

    def cancel(self) -> None:
        """Wait for in-flight collectives and ignore their results, on all ranks, before state is loaded."""

    def abort(self) -> str:
        """Roll back a failed round; return the words to append to an error of the wire."""
        told = describe_in_flight(self._step.exchanges)
        if self._step.exchanges and not self.round.rule.meets:  # peers may have used the messages of this rank
            self.round.commit.begin("the weights of its peers")
        self._step.rollback()
        self._step.ended()
        return told

    def progress(self) -> dict[Tensor, Tensor]:
        """Return the local progress since the last round, by parameter."""
        return {}

    def move_progress(self, progress: dict[Tensor, Tensor]) -> None:
        """Start local steps from the common weights plus this progress."""

    def save(self, entry: dict[str, Any], state: dict[str, Any]) -> None:
        """Add to averaging's `entry` in `optimizer.state_dict()`, or to the `state` in it."""

    def load(self, entry: dict[str, Any], state: dict[str, Any]) -> None:
        """Restore the additions of `save`; everything else is loaded already."""


class RoundStep(Step):
    """A round as a step: the vote on it is the same for all algorithms.

    Args:
        round: the surroundings.
    """

    changes = "memory and weights"

    def __init__(self, round: Round) -> None:
        super().__init__(round.runner.scheduler, round.commit, round.participation)
        self.round = round

    @property
    def votes(self) -> bool:
        """True if all ranks meet in the round, so that they can vote on it."""
        return self.round.rule.meets or self.round.joining

    def take(self) -> Job:
        """Run the round, with a vote if all ranks meet in it."""
        if self.votes:
            yield from self.run()
        else:
            yield from self.complete()

    def is_finite(self) -> bool:
        """Return True if all weights of this rank are finite."""
        return all(is_finite(param.detach()) for param in self.round.names)

    def has_progress(self) -> bool:
        """Return True if this rank has made a local step that no round has spread to all ranks."""
        return self.round.replica.steps_since_sync > 0

    @property
    def exchanges(self) -> Sequence[PendingExchange[Any]]:
        return []

    def ballot(self, final: bool) -> Ballot:
        trained = checksum(self.describe().lines)
        launched, here = len(self.exchanges), self.participation.here
        return Ballot(self.has_progress(), self.is_finite(), self.round.local_step, trained, launched, here=here)

    def describe(self) -> Description:
        remedy = (
            "Set requires_grad alike on every rank, and gradients of frozen parameters to None on all ranks or none."
        )
        return Description(self.round.replica.exchanged(), "trained parameters", remedy)

    def repeats(self, verdict: Verdict, same_ranks: bool) -> bool:
        return False  # no round is launched before the vote while ranks may run out of data

    def adapt(self, verdict: Verdict) -> Job:
        """Set the weight of this rank in means: those without progress count only if averages divide by all ranks."""
        has_progress = self.has_progress()
        counts = has_progress or not self.participation.divides
        self.round.replica.set_weight(self.participation.share if counts else 0.0, has_progress)
        yield from ()

    def rollback(self) -> None:
        self.round.replica.rollback()

    def aborted(self, why: Aborted) -> None:
        """Skip the round if NaN or Inf has arrived; raise DivergenceError if some rank's own weights hold it."""
        if why.ranks:
            raise self.round.replica.not_finite(self.round.local_step, why.ranks)
        if why.arrived:
            self.skip(why.arrived)

    def skip(self, arrived: Sequence[NotFinite]) -> None:
        """Note that all ranks skip the round, because NaN or Inf has `arrived`."""
        raise NotImplementedError


class WeightStep(RoundStep):
    """The exchange of all weights, bucket by bucket (`Averaging.exchange`), written back once all of it has arrived.

    A round that overlaps with training is written back by `apply`, before the next local step.
    """

    inspects_sums = True

    def __init__(self, round: Round) -> None:
        super().__init__(round)
        self._exchanges: list[PendingExchange[Bucket]] = []
        self._copies: dict[Bucket, Tensor] = {}
        self._buckets: dict[Bucket, Weights] = {}
        self._finite = True
        self._brings_progress = True
        self._unapplied: Sequence[FinishedExchange] = ()

    @property
    def in_turn(self) -> bool:  # type: ignore[override]
        return self.round.rule.in_turn

    @property
    def exchanges(self) -> Sequence[PendingExchange[Bucket]]:
        return self._exchanges

    def is_finite(self) -> bool:
        if not self._copies and not self._exchanges:
            self._copy_weights()
        return self._finite

    def _copy_weights(self) -> None:
        """Copy the current weights and settings, for the vote and for the exchange."""
        self._buckets = self.round.buckets()
        for bucket, ctx in self._buckets.items():
            self._copies[bucket] = bucket.read()
            ctx.keep_settings()
        self._finite = all(map(is_finite, self._copies.values()))

    def launch(self, used: Sequence[bool] | None = None, together: bool = False) -> None:
        if self._exchanges:
            return
        rule, step = self.round.rule, self.round.local_step
        if not self.is_finite() and not rule.meets:
            raise self.round.replica.not_finite(step, [self.comm.rank])
        for bucket, x in self._copies.items():
            pending = PendingExchange(bucket.label, bucket)
            self._exchanges.append(pending)
            self.scheduler.launch(pending, rule.exchange(x, self._buckets[bucket].at(step)))
        self._copies = {}

    def finished(self, used: Sequence[bool] | None) -> list[FinishedExchange]:
        return [
            FinishedExchange(pending, self._buckets[pending.of], None, partial(_write_to, pending.of), pending.of.numel)
            for pending in self._exchanges
        ]

    def agree_on_arrival(self, arrived: list[NotFinite]) -> Generator[Handle, Tensor, list[NotFinite]]:
        """See `Step`. Raises PayloadError in gossip, where the other ranks do not know of it."""
        step = self.round.local_step
        arrived = yield from super().agree_on_arrival(arrived)  # asks only ranks with shards of one replica
        if self.round.rule.arrives_alike(step):
            return arrived
        if self.votes:
            ballot = Ballot(True, not arrived, step, 0, 0)
            verdict = yield from self.scheduler.through(vote(ballot, self.comm.ranks(), "vote on arrival"))
            return arrived or ([NotFinite(f"the weights of rank(s) {verdict.void}", [])] if verdict.void else [])
        if arrived:
            raise PayloadError(
                f"rank {self.comm.rank}: NaN or Inf arrived in {_listed(arrived)} in the round after local step "
                f"{step}. This rank's weights are unchanged; its peers may have applied the round. Resume from a "
                f"checkpoint."
            )
        return []

    def skip(self, arrived: Sequence[NotFinite]) -> None:
        log.warning(
            "dgcopt: rank %s: the round after local step %d is skipped, on all ranks: NaN or Inf arrived in %s",
            *(self.comm.rank, self.round.local_step, _listed(arrived)),
        )
        self.scheduler.telemetry.count_skipped()

    def commit(self, finished: Sequence[FinishedExchange]) -> None:
        # a rank without data passes on the progress of others
        self._brings_progress = self.has_progress() or any(map(_changes_weights, finished))
        if self.round.overlaps:
            self._unapplied = finished
        else:
            super().commit(finished)

    def apply(self) -> None:
        """Commit a round that has overlapped with training, if there is one."""
        if self._exchanges:
            super().commit(self._unapplied)

    def committed(self, finished: Sequence[FinishedExchange]) -> None:
        rule, step = self.round.rule, self.round.local_step
        reached_all = rule.reaches_all(step) or not self._brings_progress
        self.round.replica.mark_synced(self.round.names if rule.identical(step) else (), reached_all)

    def ended(self) -> None:
        self._exchanges, self._copies, self._unapplied = [], {}, ()


def _write_to(bucket: Bucket, result: Tensor | SparseSum) -> Write:
    assert isinstance(result, Tensor)
    return partial(bucket.write, result)


def _changes_weights(one: FinishedExchange) -> bool:
    """Return True if a result differs from the weights that it replaces."""
    result = one.pending.result
    assert isinstance(result, Tensor)
    return any(not torch.equal(s.view(result).to(s.param.dtype), s.param) for s in one.pending.of.segments)


def _listed(arrived: Sequence[NotFinite]) -> str:
    return ", ".join(map(str, arrived))
