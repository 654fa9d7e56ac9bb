"""The jobs of one rank that wait for others: run to their end, or as far as possible while another rank is awaited.

A job is a generator that yields handles and is sent their results. On most wires a rank that calls for its end waits
for the others here. On the simulated one ranks take turns in one thread: a rank that waits moves the others' jobs on.
Only this file knows it: callers offer their jobs, and roll back one that has failed. Autograd is off in all jobs.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Generator, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, TypeAlias, TypeVar

import torch
from torch import Tensor

from ..collectives import Barrier, on_cpu
from ..comm import Comm, Handle
from ..errors import CommError
from .scheduler import CollectiveScheduler, PendingExchange
from .telemetry import Telemetry

__all__ = ["Job", "Runner", "describe_in_flight", "serve"]

Answer = TypeVar("Answer")

Job: TypeAlias = Generator[Handle, Tensor, None]
"""Yields the handles of collectives, is sent their results."""


class Runner:
    """The jobs of one user of a wire.

    An error ends all jobs of this rank. It is raised where this rank calls for their end, also if another rank has
    moved them on until they failed.

    Args:
        comm: the wire.
        user: its name in labels.
        offer: asked for the next job when there is none and another rank waits for this one; None if there is nothing
            to do yet. Also asked for the jobs of a rank that has run out of data, until there are none (`serve`).
        rollback: rolls back a job that failed; returns the words to append to an error of the wire.

    Attributes:
        scheduler: starts its collectives.
    """

    def __init__(self, comm: Comm, user: str, offer: Callable[[], Job | None], rollback: Callable[[], str]) -> None:
        self.comm = comm
        self.scheduler = CollectiveScheduler(comm, Telemetry(), user, self.progress)
        self._offer = offer
        self._rollback = rollback
        self._jobs: deque[Generator[Handle, Tensor, object]] = deque()
        self._awaited: Handle | None = None
        self._failure: Exception | None = None

    @property
    def busy(self) -> bool:
        """True if a job is running or queued."""
        return bool(self._jobs)

    @property
    def failed(self) -> bool:
        """True if an error is kept that `finish` will raise."""
        return self._failure is not None

    def add(self, job: Generator[Handle, Tensor, object]) -> None:
        """Queue a job after all others."""
        self._jobs.append(job)

    @torch.no_grad()
    def begin(self) -> None:
        """Run the first job until it waits for the first time."""
        if self._awaited is None:
            with self._failing():
                self._step(None)

    @property
    def can_ask(self) -> bool:
        """True if all ranks can be asked between their jobs, which ranks that take turns cannot."""
        return not self.comm.takes_turns

    def ask(self, question: Generator[Handle, Tensor, Answer]) -> Answer | None:
        """Return the answer to a question that all ranks ask now; None if they cannot be asked."""
        return self.scheduler.drive(question) if self.can_ask else None

    @torch.no_grad()
    def finish(self, job: Callable[[], Generator[Handle, Tensor, object]] | None = None) -> None:
        """Run all jobs to their end, or make one if there are none. Raises their errors, after `rollback`."""
        self._raise_failure()
        if job is not None and not self._jobs:
            self.add(job())
        with self._failing():
            while self._jobs:
                self._step(None if self._awaited is None else self.scheduler.wait(self._awaited))

    def go(self) -> None:
        """Run jobs as `finish` does; if ranks take turns, only as far as the ranks that have arrived allow."""
        if not self.comm.takes_turns:
            self.finish()
            return
        try:
            self.progress()
            self.comm.nudge(self.scheduler.number)
        finally:
            self._raise_failure()

    def progress(self) -> None:
        """Go on as far as possible without waiting, for another rank that waits.

        An error is kept for this rank; raised at once only if one was kept before, as the other cannot go on for it.
        """
        if self._failure is not None:
            raise self._failure
        try:
            with self._failing():
                self._as_far_as_possible()
        except Exception as error:
            self._failure = error

    @torch.no_grad()
    def _as_far_as_possible(self) -> None:
        while self._awaited is None or self._awaited.done():
            if not self._jobs:
                job = self._offer()
                if job is None:
                    return
                self.add(job)
            self._step(None if self._awaited is None else self.scheduler.wait(self._awaited))

    def serve(self) -> bool:
        """Run the next job that is offered; return False if there is none."""
        job = self._offer()
        if job is not None:
            self.add(job)
            self.finish()
        return job is not None

    def clear(self) -> None:
        """Delete all jobs, and an error that was kept."""
        self._jobs.clear()
        self._awaited = self._failure = None
        self.scheduler.end_step()

    def together(self, label: str) -> Job:
        """Wait until all ranks have arrived here, if none may wait for another one's turn later on."""
        if self.comm.takes_turns:
            yield self.scheduler.start(Barrier(), label)

    def _step(self, result: Tensor | None) -> None:
        """Run the first job to its next wait, or to its end."""
        job = self._jobs[0]
        try:
            with on_cpu():
                self._awaited = job.send(result)  # type: ignore[arg-type]  # None starts a generator
        except StopIteration:
            self._awaited = None
            self._jobs.remove(job)

    @contextmanager
    def _failing(self) -> Iterator[None]:
        """Context in which an error ends all jobs; an error of the wire names the collectives in flight."""
        try:
            yield
        except BaseException as error:  # KeyboardInterrupt too: a notebook continues after it
            more = self._rollback()
            self.clear()
            if more and isinstance(error, CommError):
                raise type(error)(f"{error}{more}") from error
            raise

    def _raise_failure(self) -> None:
        if self._failure is not None:
            failure, self._failure = self._failure, None
            raise failure


def serve(runners: Iterable[Runner]) -> None:
    """Take part in the jobs of the other ranks, of all `runners` in turn, until no more are offered."""
    waiting = []
    for runner in runners:
        if runner.comm.takes_turns:  # which continues while the others wait
            runner.go()
        else:
            waiting.append(runner)
    while waiting:
        waiting = [runner for runner in waiting if runner.serve()]


def describe_in_flight(exchanges: Sequence[PendingExchange[Any]], not_sent: Sequence[str] = ()) -> str:
    """Return words for an error: exchanges in flight, and those not launched yet."""
    sent = [pending.label for pending in exchanges if pending.handle is not None]
    return "".join(
        f" {title}: {', '.join(labels[:4])}{f' and {len(labels) - 4} more' if len(labels) > 4 else ''}."
        for title, labels in (("In flight", sent), ("Not sent yet", not_sent))
        if labels
    )
