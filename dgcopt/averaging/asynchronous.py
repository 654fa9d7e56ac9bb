"""Asynchronous averaging: a thread averages weights every so many seconds, while training goes on."""

from __future__ import annotations

import atexit
import logging
import sys
import threading
from collections.abc import Callable, Generator, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from ..checks import check_positive, check_whole
from ..collectives import AllGather, Collective, Exchange
from ..comm import Comm, Handle
from ..errors import CommError, ConfigError, DGCError
from ..exchange.agreement import compare
from ..exchange.flights import Flight, Traffic
from ..exchange.runner import Job
from ..exchange.telemetry import Telemetry
from ..flat.buckets import Bucket
from ..flat.gradient import is_finite
from .base import Averaging
from .rounds import Rounds
from .rule import Rule
from .sync import Round, Sync
from .weights import Weights, mean

__all__ = ["AsyncAverage"]

log = logging.getLogger("dgcopt")

LAST_SECONDS = 5.0
"""Seconds in which a rank that ends with an exception tells the others, before it leaves without a word."""


class AsyncAverage(Averaging):
    """Every `interval` seconds, in a thread beside training, towards the mean of all ranks' weights.

        s_i = copy of x_i;  S = sum_j s_j;  x_i <- x_i + (S / W - s_i)

    Updates made while S is on its way are kept, and the mean of all ranks' weights is what their updates make it. No
    step waits for another rank: ranks may be of different speed, take different numbers of steps (`dgcopt.join` is not
    needed), or pause, as their threads go on. What an exchange adds, it adds right before an update, so that a
    gradient's forward and backward pass see the same weights; it is up to one exchange older than they are.

    `optimizer.averaging.abort()` ends the exchanges, and `resume()` lets them go on. A script that ends without
    `abort()` ends once those of all ranks do; one that calls `torch.distributed.destroy_process_group()` or
    `hvd.shutdown()` itself has to call `abort()` or `dgcopt.shutdown()` first.

    Args:
        interval: seconds between one exchange and the next. Smaller keeps ranks closer together and sends more; an
            exchange longer than that only delays the next one.
        warmup_steps: so many steps first in which gradients are averaged, as dense data-parallel training does.

    Costs an allreduce of the weights and a byte per rank in each exchange, three copies of the weights, and in each
    step the moment in which weights are being copied. Raises ConfigError for an interval that is not positive, on the
    simulated wire, over MPI that was not initialised for threads, and on torch and Horovod over some of the ranks only.
    Not tried on CUDA, where training must be on the default stream, as the thread is. Source: "async" of Bagua (Gan et
    al., VLDB 2021), which locks forward and backward passes out instead.
    """

    by_bucket = False

    def __init__(self, interval: float = 0.5, warmup_steps: int = 0) -> None:
        self.interval = check_positive(interval, "interval")
        self.warmup_steps = check_whole(warmup_steps, "warmup_steps", 0)

    def rounds(
        self, optimizer: Optimizer, named_parameters: Iterable[tuple[str, Tensor]] | None, comm: Comm | None
    ) -> Rounds:
        return AsyncRounds(self, self.sync, optimizer, named_parameters, comm)

    def check(self, comm: Comm, names: Sequence[str]) -> None:
        if comm.no_threads:
            raise ConfigError(f"AsyncAverage averages in a thread beside training, and {comm.no_threads}")
        if comm.elastic:
            raise ConfigError(
                "AsyncAverage cannot be used under Horovod Elastic, where its thread would be left waiting for workers "
                "that are gone"
            )

    def due(self, step: int) -> bool:
        return False  # the clock says when

    def exchange(self, x: Tensor, ctx: Weights) -> Exchange:
        return (yield from mean(x, ctx))


class AsyncRounds(Rounds):
    """The averaging of one optimizer's weights on one rank, beside its training (`Background`)."""

    def __init__(
        self,
        rule: Rule,
        sync: Callable[[Round], Sync],
        optimizer: Optimizer,
        named_parameters: Iterable[tuple[str, Tensor]] | None,
        comm: Comm | None,
    ) -> None:
        self._background: Background | None = None
        self._paused = False
        super().__init__(rule, sync, optimizer, named_parameters, comm)

    def _join_wire(self, comm: Comm) -> None:
        if self._background is not None:
            self._background.give_up()
        super()._join_wire(comm)
        self._background = Background(self, comm)
        comm.before_close(self._background.leave)

    @property
    def background(self) -> Background:
        """The thread, and what it has to say."""
        assert self._background is not None
        return self._background

    # -- what the user calls -----------------------------------------------------------------------------------------

    def abort(self) -> None:
        """End the exchanges, until `resume()`; what they have to add is then in the weights. Collective.

        Call it where `step()` may be called: weights change. They may be exchanged until the last rank has called it,
        however late; what this rank waits for is logged once per deadline. Raises what has ended the thread, if
        anything.
        """
        self._paused = True
        self.background.stop()
        self.finish_round()

    def resume(self) -> None:
        """Let the exchanges go on after `abort()`, or begin, once a warm-up is over. Collective.

        Raises MismatchError if ranks differ in which parameters they train.
        """
        self.finish_round()
        self._paused = False
        self._start_thread()

    @contextmanager
    def _without_exchanges(self) -> Iterator[None]:
        """Without exchanges; they do not go on after an exception, which other ranks may not have."""
        goes_on = not self._paused
        self.abort()
        yield
        if goes_on:
            self.resume()

    @contextmanager
    def averaged(self) -> Iterator[None]:
        """As that of `Rounds`; the thread pauses meanwhile."""
        with self._without_exchanges(), super().averaged():
            yield

    def average(self) -> None:
        """As that of `Rounds`; the thread pauses meanwhile."""
        with self._without_exchanges():
            super().average()

    @property
    def telemetry(self) -> Telemetry:
        """As that of `Rounds`, with the bytes that the thread has sent; no step waits for what it waits for."""
        ours, theirs = super().telemetry, self.background.traffic.telemetry
        return replace(
            ours,
            payload_bytes=ours.payload_bytes + theirs.payload_bytes,
            sent_bytes=ours.sent_bytes + theirs.sent_bytes,
        )

    def join(self) -> None:
        """Ranks may run out of data at any time: their threads go on, and nobody waits for their steps."""

    # -- around each step --------------------------------------------------------------------------------------------

    def before_step(self) -> None:
        super().before_step()
        self._start_thread()
        if self.background.is_running and self.buckets() is not self.background.buckets:
            raise ConfigError(
                f"rank {self.comm.rank}: other parameters are trained than in the step before, while weights are being "
                f"exchanged: call optimizer.averaging.abort() before such a change, and resume() after it, on all ranks"
            )
        self.background.before_step()

    def after_step(self) -> None:
        super().after_step()
        self.background.after_step()

    def finish_round(self) -> None:
        self.background.after_step()  # which may have failed half-way
        self.background.check()
        super().finish_round()
        self.background.take_in()

    def _start_thread(self) -> None:
        """Start the thread, on all ranks at once, if it is time to."""
        if not (self.background.is_running or self._paused or self.local_step < 0 or self.comm.size == 1):
            self.comm.drive(compare(self.replica.describe(), self.comm.rank, "parameters and settings"))
            self.background.start(self.buckets())

    def restore(self, state: dict[str, Any]) -> None:
        """As that of `Rounds`. What was to be added to the weights that are replaced is dropped, on all ranks."""
        self.background.stop()
        self.background.forget()
        super().restore(state)


class Background:
    """A thread that averages weights over a second group of the same ranks.

    It never changes them. It copies them between two steps, and leaves what the mean of all copies adds to its own for
    the training's thread to take in before the next one.

    Attributes: `buckets`, those that are exchanged; `traffic`, what is sent.
    """

    def __init__(self, rounds: AsyncRounds, comm: Comm) -> None:
        assert isinstance(rounds.rule, AsyncAverage)
        self._rounds = rounds
        self._rule = rounds.rule
        self._comm = comm
        try:
            self._wire = comm.among(range(comm.size))
        except ConfigError as error:
            raise ConfigError(
                f"AsyncAverage needs a second group of the same {comm.size} ranks for its thread: {error}"
            ) from error
        self.traffic = Traffic(self._wire, Telemetry(), "averaging")
        self.buckets: dict[Bucket, Weights] = {}
        self._thread: threading.Thread | None = None
        self._turn = threading.Condition()  # to copy the weights, or to change them
        self._stepping = False
        self._pending: dict[Bucket, Tensor] = {}
        self._asked = threading.Event()  # this rank asks to stop
        self._failing = False  # as an exception ends its script
        self._given_up = threading.Event()  # and does not wait for the others
        self._missing: list[int] = []  # ranks that have not asked
        self._failure: Exception | None = None

    # -- the training's thread ---------------------------------------------------------------------------------------

    @property
    def is_running(self) -> bool:
        """Whether it was started and not ended."""
        return self._thread is not None

    def start(self, buckets: dict[Bucket, Weights]) -> None:
        """Start it, on all ranks at once."""
        self.buckets = buckets
        self._asked.clear()
        self._given_up.clear()
        self._failing = False
        self._thread = threading.Thread(target=self._run, name="dgcopt AsyncAverage", daemon=True)
        self._thread.start()
        atexit.register(self.leave)

    def before_step(self) -> None:
        """Weights are about to change."""
        with self._turn:
            self._stepping = True

    def after_step(self) -> None:
        """Weights may be copied again."""
        with self._turn:
            self._stepping = False
            self._turn.notify()

    def check(self) -> None:
        """Raises what has ended the thread, if anything."""
        if self._failure is not None:
            kind = type(self._failure) if isinstance(self._failure, DGCError) else CommError
            raise kind(f"weights are exchanged no longer, since {self._failure}") from self._failure

    @torch.no_grad()
    def take_in(self) -> None:
        """Add to the weights what the exchanges have left."""
        with self._turn:
            for bucket, change in self._pending.items():
                params = [s.param.detach() for s in bucket.segments]
                torch._foreach_add_(params, [s.view(change) for s in bucket.segments])
            self._pending = {}

    def forget(self) -> None:
        """Drop what the exchanges have left, and what has ended them."""
        self._pending, self._failure = {}, None

    def stop(self) -> None:
        """End the thread as soon as all ranks ask for it. It waits for a sign of life no longer than the deadline."""
        self._asked.set()
        self.after_step()
        while self._thread is not None:
            self._thread.join(self._comm.deadline)
            if not self._thread.is_alive():
                self._ended()
            else:
                log.warning(
                    "dgcopt: rank %d exchanges weights until rank(s) %s, which are alive, also call abort() or end",
                    *(self._comm.rank, self._missing),
                )

    def give_up(self) -> None:
        """End the thread without the others."""
        self._given_up.set()
        self._asked.set()
        self.after_step()
        if self._thread is not None:
            self._thread.join(self._comm.deadline)
            self._ended()

    def _ended(self) -> None:
        self._thread = None
        atexit.unregister(self.leave)

    def leave(self) -> None:
        """Before the wire goes: end together; but soon if this rank fails, so that its launcher sees it."""
        if sys.exc_info()[0] is not None or hasattr(sys, "last_value"):
            self._failing = True
            self._asked.set()
            if self._thread is not None:
                self._thread.join(min(LAST_SECONDS, self._comm.deadline))
            self.give_up()
        else:
            self.stop()
            if self._failure is not None:
                log.warning("dgcopt: rank %d exchanged weights no longer, since %s", self._comm.rank, self._failure)

    # -- the thread --------------------------------------------------------------------------------------------------

    def _run(self) -> None:
        steps, result = self._exchanges(self.buckets), None
        try:
            while True:
                handle = steps.send(result)  # type: ignore[arg-type]  # None starts a generator
                result = self.traffic.wait(_Watched(handle, self._wire, self._given_up))
        except StopIteration:
            pass
        except Exception as error:
            if not self._given_up.is_set():
                self._failure = error

    @torch.no_grad()
    def _exchanges(self, buckets: dict[Bucket, Weights]) -> Job:
        """One after another, until all ranks ask to stop."""
        while True:
            self._asked.wait(self._rule.interval)
            copies = {bucket: self._copy(bucket) for bucket in buckets}
            if (yield from self.traffic.through(self._agree(copies.values()))):
                return
            flights = [Flight(bucket.label, bucket) for bucket in buckets]
            for flight in flights:
                self.traffic.launch(flight, self._rule.exchange(copies[flight.of].clone(), buckets[flight.of]))
            yield from self.traffic.finish(flights, self._rule.in_turn)
            with self._turn:
                for flight in flights:
                    assert isinstance(flight.result, Tensor)
                    change = flight.result.sub_(copies[flight.of])
                    before = self._pending.get(flight.of)
                    self._pending[flight.of] = change if before is None else change.add_(before)

    def _copy(self, bucket: Bucket) -> Tensor:
        """A bucket's weights between two steps, with what is to be added to them."""
        with self._turn:
            self._turn.wait_for(lambda: not self._stepping or self._given_up.is_set())
            x = bucket.read()
            return x.add_(self._pending[bucket]) if bucket in self._pending else x

    def _agree(self, copies: Iterable[Tensor]) -> Generator[Collective, Tensor, bool]:
        """Whether all ranks ask to stop.

        Raises, on all of them, CommError if any has failed, and DivergenceError if weights are not finite on any.
        """
        finite = all(map(is_finite, copies))
        mine = torch.tensor([self._asked.is_set() + 2 * finite + 4 * self._failing], dtype=torch.uint8)
        flags = (yield AllGather(mine, group="control", label="who asks to stop")).flatten().tolist()
        if failing := [rank for rank, flag in enumerate(flags) if flag & 4]:
            raise CommError(
                f"rank {self._comm.rank}: an exception has ended the script of rank(s) {failing}: see theirs"
            )
        if infinite := [rank for rank, flag in enumerate(flags) if not flag & 2]:
            raise self._rounds.replica.not_finite(self._rounds.local_step, infinite)
        self._missing = [rank for rank, flag in enumerate(flags) if not flag & 1]
        return not self._missing


class _Watched(Handle):
    """A collective that nobody waits for any more once `given_up` is set."""

    def __init__(self, handle: Handle, comm: Comm, given_up: threading.Event) -> None:
        self.collective = handle.collective
        self.handle = handle
        self.comm = comm
        self.given_up = given_up

    def done(self) -> bool:
        if self.given_up.is_set():
            raise CommError(f"rank {self.comm.rank} does not wait for {self.collective.describe()} any more")
        return self.handle.done()

    def result(self) -> Tensor:
        return self.comm.wait(self.handle)
