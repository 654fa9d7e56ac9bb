"""A step as a two-phase commit, once for all exchanges: every rank commits it, or every rank aborts it.

    prepare   exchanges are launched as far as they may be, and the ranks vote on the step
    commit    the rest is launched, exchanges finish and are inspected, memory and gradients take their new values
    abort     in-flight collectives are cancelled and memory is rolled back, so that nothing of the step has happened

A subclass of `Step` provides its exchanges; `Step.run` has the order. All that may fail or allocate is done before the
first value changes. An exception between the first and the last change leaves a mark (`dgcopt.exchange.commit`).

If each replica of a model is sharded over several ranks, the exchanges run among the ranks that hold the same shard.
Before they vote, and before they commit, each asks the other shards of its own replica (`in_whole_replica`).
"""

from __future__ import annotations

import time
from collections.abc import Generator, Sequence
from dataclasses import dataclass, replace
from typing import Any

from torch import Tensor

from ..comm import Handle
from .agreement import SAME_MODEL, compare
from .commit import (
    CommitMarker,
    FinishedExchange,
    NotFinite,
    commit_gradients,
    commit_memory,
    inspect,
    prepare_gradients,
    prepare_memory,
)
from .participation import Participation
from .runner import Job
from .scheduler import CollectiveScheduler, PendingExchange
from .vote import Ballot, Verdict, in_whole_replica, used_anywhere, vote

__all__ = ["Aborted", "Description", "Step"]

OUT_OF_ORDER = (
    "An exception has ended a step on some ranks only, while others went on with its collectives, so that messages of "
    "two steps would be mixed up. Start all ranks again from a checkpoint."
)


@dataclass(frozen=True)
class Aborted:
    """The reason why no rank takes a step; with neither, no rank has data.

    Attributes:
        ranks: the ranks whose own gradients hold NaN or Inf.
        arrived: the exchanges that have brought NaN or Inf.
    """

    ranks: Sequence[int] = ()
    arrived: Sequence[NotFinite] = ()


@dataclass(frozen=True)
class Description:
    """Lines that must be equal on all ranks, with the title and the remedy of the error if they are not."""

    lines: list[str]
    title: str
    remedy: str = SAME_MODEL


class Step:
    """One rank's part in the steps of one exchange of gradients.

    Args:
        scheduler: starts its collectives.
        marker: tells whether the last step was interrupted.
        participation: which ranks have data; None if all have, at first.

    Attributes:
        in_turn: True to take each exchange to its end before the next one, instead of round by round.
        inspects_sums: True to look for NaN and Inf in dense sums too, at the cost of one more pass.
        same_ranks_left: False if ranks were lost while the last step was confirmed: nothing may be exchanged before the
            next one.
        changes: the values that a commit changes, for the error of an interrupted step.
    """

    in_turn = False
    inspects_sums = False
    changes = "memory and gradients"

    def __init__(
        self, scheduler: CollectiveScheduler, marker: CommitMarker, participation: Participation | None = None
    ) -> None:
        self.scheduler = scheduler
        self.marker = marker
        self.comm = scheduler.comm
        self.participation = participation or Participation(self.comm.size)
        self.same_ranks_left = True

    # -- implemented by each caller ----------------------------------------------------------------------------------

    @property
    def exchanges(self) -> Sequence[PendingExchange[Any]]:
        """The exchanges of this step in the order of their launch, which is the same on all ranks."""
        raise NotImplementedError

    def ballot(self, final: bool) -> Ballot:
        """Return this rank's report on its gradients; not `final` while they are still scaled."""
        raise NotImplementedError

    def launch(self, used: Sequence[bool] | None, together: bool) -> None:
        """Launch all exchanges that are not launched yet, now that all ranks take the step.

        Args:
            used: for each parameter in the order of `used`, True if any rank has a gradient; None if all have.
            together: True if no rank has launched any exchange before.
        """
        raise NotImplementedError

    def finished(self, used: Sequence[bool] | None) -> list[FinishedExchange]:
        """Return the finished exchanges, with the memory and the gradients that they change."""
        raise NotImplementedError

    def rollback(self) -> None:
        """Return memory to the last commit."""
        raise NotImplementedError

    def committed(self, finished: Sequence[FinishedExchange]) -> None:
        """Note that memory and gradients have their new values. An exception in here interrupts the step."""
        raise NotImplementedError

    def aborted(self, why: Aborted) -> None:
        """Note that no rank takes the step. Memory is that of the last commit."""
        raise NotImplementedError

    # -- defaults for most callers -----------------------------------------------------------------------------------

    def begin(self, verdict: Verdict) -> Generator[Handle, Tensor, Verdict]:
        """Act on the vote of a step that is not skipped by loss scaling, before anything follows from it."""
        yield from ()
        return verdict

    def describe(self) -> Description:
        """Return the lines that ranks compare if the checksums in their ballots (`Ballot.trained`) differ."""
        return Description([], "parameters")

    def repeats(self, verdict: Verdict, same_ranks: bool) -> bool:
        """True if exchanges that were launched before the vote are cancelled and launched again.

        `same_ranks` is True if as many ranks have data as in the last step, so that averages divide by as many.
        """
        return verdict.stale or not same_ranks

    def catch_up(self, launched: int) -> None:
        """Launch as many exchanges as some other rank has `launched` before the vote, for all are to be cancelled."""

    def cancelled(self) -> None:
        """Note that all exchanges are cancelled, and take gradients in anew."""

    def adapt(self, verdict: Verdict) -> Job:
        """Agree with the other ranks on settings and layout, once all take the step."""
        yield from ()

    def used(self) -> list[bool]:
        """Return for each parameter of the step True if it has a gradient on this rank."""
        return []

    def agree_on_arrival(self, arrived: list[NotFinite]) -> Generator[Handle, Tensor, list[NotFinite]]:
        """Return the reason for all ranks to abort the step, if NaN or Inf has `arrived` on any; else nothing.

        Ranks that hold the same shard, or all, have received the same bytes, and know it without a vote.
        """
        is_fine = yield from self.scheduler.through(in_whole_replica(not arrived, self.comm, "results"))
        return [] if is_fine else arrived or [NotFinite("another shard of this replica", [])]

    def flush(self, used: list[bool] | None) -> Job | None:
        """Return the exchange of all residuals that the last step of a warm-up makes once memory is committed.

        It adds to the results of `exchanges`, and to the parameters that are `used`.
        """
        return None

    def ended(self) -> None:
        """Release the exchanges of a step that was committed or aborted."""

    # -- the order of a step -----------------------------------------------------------------------------------------

    def run(self) -> Generator[Handle, Tensor, Verdict | None]:
        """Take the step from the vote to its end, and return the verdict; None if loss scaling has skipped the step.

        Raises InterruptedStep if the last step was interrupted; MismatchError, on all ranks, if they differ; and the
        errors of the wire.
        """
        verdict = yield from self.prepare()
        if verdict is not None and verdict.is_taken:
            yield from self.complete(verdict)
        return verdict

    def prepare(self) -> Generator[Handle, Tensor, Verdict | None]:
        """Vote on the step, and adapt to the verdict or abort; return the verdict as `run` does."""
        self.marker.check(self.comm.rank)
        verdict = yield from self.vote()
        while not verdict.final and not verdict.void:  # asked by loss scaling, which a rank without data does not do
            verdict = yield from self.vote()
        if not verdict.final:
            self.abort(Aborted(verdict.void))
            return None
        verdict = yield from self.begin(verdict)
        if not verdict.alike:
            counted = [f"collectives before this step: {self.scheduler.before_step}"]
            yield from self.scheduler.through(compare(counted, self.comm.rank, "number of collectives", OUT_OF_ORDER))
            told = self.describe()
            yield from self.scheduler.through(compare(told.lines, self.comm.rank, told.title, told.remedy))
        same_ranks = verdict.active_ranks == self.participation.ranks
        if not same_ranks:
            self.participation.count(verdict.active_ranks)
        repeats = self.repeats(verdict, same_ranks)
        if repeats or not verdict.is_taken:
            yield from self.cancel(verdict.launched, counts=not verdict.void)
            verdict = replace(verdict, launched=0)
        if verdict.absent:
            self.participation.check(verdict.absent)
        if verdict.is_taken:
            yield from self.adapt(verdict)
        else:
            self.confirm()
            self.abort(Aborted(verdict.void))
        return verdict

    def vote(self, final: bool = True) -> Generator[Handle, Tensor, Verdict]:
        """Cast this rank's ballot, and return the verdict of all ranks."""
        self.scheduler.begin_step()
        ballot, through = self.ballot(final), self.scheduler.through
        # ranks that have started different numbers of collectives would confuse messages
        ballot = replace(ballot, trained=ballot.trained ^ (self.scheduler.before_step & 0xFFFFFFFF))
        if not (yield from through(in_whole_replica(ballot.finite, self.comm, "vote of shards", ballot))):
            ballot = replace(ballot, finite=False)
        return (yield from through(vote(ballot, self.comm.ranks(), "vote")))

    def complete(self, verdict: Verdict | None = None) -> Job:
        """Launch the rest, finish all exchanges, and commit; or abort, on all ranks, if NaN or Inf arrives on any.

        `verdict` is None for steps that ranks do not vote on.
        """
        used = None if verdict is None or verdict.complete else self.used()
        if used is not None and verdict is not None and not verdict.used_alike:
            used = yield from self.scheduler.through(used_anywhere(used, "gradients that there are"))
        self.launch(used, together=verdict is not None and not verdict.launched)
        yield from self.scheduler.finish(self.exchanges, self.in_turn)
        start = time.perf_counter()
        finished = self.finished(used)
        arrived = yield from self.agree_on_arrival(inspect(finished, self.comm, self.inspects_sums))
        if arrived:
            self.rollback()
            self.confirm()
            self.abort(Aborted(arrived=arrived))
            return
        flush = self.flush(used)
        if flush is not None:  # committed memory is half of the step; the flush is the other half
            prepare_memory(finished)
            self.marker.begin(self.changes)
            commit_memory(finished, self.scheduler.telemetry)
            yield from flush
            finished = [each.with_committed_memory() for each in self.finished(used)]
        self.commit(finished)
        self.scheduler.telemetry.count_seconds(apply=time.perf_counter() - start)

    def commit(self, finished: Sequence[FinishedExchange]) -> None:
        """Give memory and gradients their new values, as one act; do before all that may fail or allocate."""
        prepare_memory(finished)
        writes = prepare_gradients(finished)
        self.confirm()
        self.marker.begin(self.changes)
        commit_memory(finished, self.scheduler.telemetry)
        commit_gradients(writes)
        self.committed(finished)
        self.marker.end()
        self.ended()
        self.scheduler.end_step()

    def confirm(self) -> None:
        """Make sure that all ranks commit, or skip, this step, if some may be lost: see `Comm.confirm`.

        Raises CommError if the step is aborted on all survivors instead.
        """
        self.same_ranks_left = self.comm.confirm(self.scheduler.start)

    def cancel(self, launched: int, counts: bool = True) -> Job:
        """Cancel the exchanges of all ranks, of which some rank has `launched` that many; memory is rolled back.

        With `counts`, telemetry says that exchanges are repeated.
        """
        self.catch_up(launched)
        if counts and any(pending.exchange is not None for pending in self.exchanges):
            self.scheduler.telemetry.count_repeated()
        yield from self.scheduler.cancel(self.exchanges)
        self.rollback()
        self.cancelled()

    def abort(self, why: Aborted) -> None:
        """End a step that no rank takes, after its exchanges are cancelled or finished."""
        self.marker.end()
        self.aborted(why)
        self.ended()
        self.scheduler.end_step()
