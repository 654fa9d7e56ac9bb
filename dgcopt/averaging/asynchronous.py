"""Asynchronous averaging: a background thread averages weights at an interval, without stopping training."""

from __future__ import annotations

import atexit
import logging
import sys
import threading
from collections.abc import Generator, Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from ..collectives import AllGather, Collective, Exchange
from ..comm import Comm, Handle
from ..errors import CommError, ConfigError, DGCError
from ..errors.checks import check_positive, check_whole
from ..exchange.agreement import compare
from ..exchange.buffers import Buffers
from ..exchange.runner import Job
from ..exchange.scheduler import CollectiveScheduler, PendingExchange
from ..exchange.telemetry import Telemetry
from ..flat.buckets import Bucket
from ..flat.gradient import is_finite
from .base import Averaging
from .replica import Replica
from .rounds import Rounds
from .weights import Weights, mean

__all__ = ["AsyncAverage"]

log = logging.getLogger("dgcopt")

LAST_SECONDS = 5.0
"""Seconds that a failing rank takes to notify the others before it leaves."""


class AsyncAverage(Averaging):
    """Averages all ranks' weights in a background thread, every `interval` seconds.

        s_i = copy of x_i;  S = sum_j s_j;  x_i <- x_i + (S / W - s_i)

    Updates made while S is in flight are kept, so the mean of all ranks' weights contains every update. No step waits
    for another rank: ranks may have different speeds, make different numbers of steps (`dgcopt.join` is not needed), or
    pause. The result of an exchange, up to one exchange old, is added right before an update, so a gradient's forward
    and backward pass use the same weights.

    `optimizer.averaging.abort()` stops the exchanges, `resume()` restarts them. A script that ends without `abort()`
    waits until all ranks' scripts end. A script that calls `torch.distributed.destroy_process_group()` or
    `hvd.shutdown()` must call `abort()` or `dgcopt.shutdown()` first. If a rank dies, the others raise an error in
    their next step or in `abort()`. A script that ends without either logs it and exits with code 0. Save a checkpoint
    between `abort()` and `resume()`: otherwise some ranks' weights have the last exchange's result and others' lack it.

    Args:
        interval: seconds between exchanges. Smaller keeps ranks closer and sends more; a longer exchange delays the
            next one.
        warmup_steps: number of first steps in which gradients are averaged, as in dense data-parallel training.

    Costs an allreduce of the weights and a byte per rank in each exchange, three copies of the weights, and a short
    wait of a step while the thread copies weights. Raises ConfigError for an interval that is not positive, on the
    simulated wire, over MPI without thread support, and on torch and Horovod over a subset of the ranks. Untested on
    CUDA, where training must use the default stream, like the thread. Source: "async" of Bagua (Gan et
    al., VLDB 2021), which locks out forward and backward passes instead.
    """

    by_bucket = False

    def __init__(self, interval: float = 0.5, warmup_steps: int = 0) -> None:
        self.interval = check_positive(interval, "interval")
        self.warmup_steps = check_whole(warmup_steps, "warmup_steps", 0)

    def rounds(self, replica: Replica, comm: Comm | None) -> Rounds:
        return AsyncRounds(self.sync, replica, comm)

    def check(self, comm: Comm, names: Sequence[str]) -> None:
        if comm.no_threads:
            raise ConfigError(f"AsyncAverage averages in a background thread, and {comm.no_threads}")
        if comm.elastic:
            raise ConfigError(
                "AsyncAverage does not work under Horovod Elastic: its thread would wait for workers that have left. "
                "Use another algorithm."
            )

    def due(self, step: int) -> bool:
        return False  # the thread exchanges by the clock

    def exchange(self, x: Tensor, ctx: Weights) -> Exchange:
        return (yield from mean(x, ctx))


class AsyncRounds(Rounds):
    """Averaging of one optimizer's weights on one rank in a background thread (`Background`)."""

    _background: Background | None = None
    _paused = False

    def _join_wire(self, comm: Comm) -> None:
        if self._background is not None:
            self._background.give_up()
        super()._join_wire(comm)
        self._background = Background(self, comm)
        comm.before_close(self._background.leave)

    @property
    def background(self) -> Background:
        """The background thread."""
        assert self._background is not None
        return self._background

    # -- public calls ------------------------------------------------------------------------------------------------

    def abort(self) -> None:
        """Stop the exchanges until `resume()`, and add their results to the weights. Collective.

        Call it where `step()` may be called, since it changes weights. Exchanges continue until the last rank has
        called it; the ranks that are awaited are logged once per deadline. Raises the error that has ended the thread,
        if any.
        """
        self._paused = True
        self.background.stop()
        self.finish_round()

    def resume(self) -> None:
        """Restart the exchanges after `abort()`, or start them after the warm-up. Collective.

        Raises MismatchError if ranks train different parameters.
        """
        self.finish_round()
        self._paused = False
        self._start_thread()

    @contextmanager
    def _without_exchanges(self) -> Iterator[None]:
        """Context without exchanges; not resumed after an exception, which other ranks may not have."""
        goes_on = not self._paused
        self.abort()
        yield
        if goes_on:
            self.resume()

    @contextmanager
    def averaged(self) -> Iterator[None]:
        """See `Rounds`; the thread pauses meanwhile."""
        with self._without_exchanges(), super().averaged():
            yield

    def average(self) -> None:
        """See `Rounds`; the thread pauses meanwhile."""
        with self._without_exchanges():
            super().average()

    @property
    def telemetry(self) -> Telemetry:
        """See `Rounds`; includes the thread's bytes, but not its waiting time, which delays no step."""
        ours, theirs = super().telemetry, self.background.scheduler.telemetry
        return replace(
            ours,
            payload_bytes=ours.payload_bytes + theirs.payload_bytes,
            sent_bytes=ours.sent_bytes + theirs.sent_bytes,
        )

    def sync_buffers(self, buffers: Buffers) -> None:
        """Raise ConfigError: ranks meet in no step."""
        raise ConfigError(
            "AsyncAverage exchanges weights in a thread, so ranks meet in no step and cannot exchange buffers. Call "
            "optimizer.averaging.abort() and then dgcopt.broadcast_parameters(dict(model.named_buffers())) on all "
            "ranks."
        )

    def serving(self, throws: bool) -> Sequence[Rounds]:
        """See `Rounds`; raise ConfigError for `throws`."""
        if throws:
            raise ConfigError(
                "throw_on_early_termination does not support AsyncAverage, in which no rank waits for another"
            )
        return super().serving(throws)

    def join(self, divides: bool, throws: bool) -> None:
        """Finish no round: ranks may run out of data at any time, since their threads continue and no rank waits."""
        self.participation.begin(divides, throws)

    # -- around each step --------------------------------------------------------------------------------------------

    def before_step(self) -> None:
        super().before_step()
        self._start_thread()
        if self.background.is_running and self.buckets() is not self.background.buckets:
            raise ConfigError(
                f"rank {self.comm.rank}: the trained parameters changed while weights are being exchanged. Call "
                f"optimizer.averaging.abort() before such a change, and resume() after it, on all ranks."
            )
        self.background.before_step()

    def after_step(self) -> None:
        super().after_step()
        self.background.after_step()

    def finish_round(self) -> None:
        self.background.after_step()  # the last step may have failed midway
        self.background.check()
        super().finish_round()
        self.background.take_in()

    def _start_thread(self) -> None:
        """Start the thread on all ranks at once, if it is due."""
        if not (self.background.is_running or self._paused or self.local_step < 0 or self.comm.size == 1):
            self.replica.mark_stepped()  # the thread's parameters stay those of now
            told = [*self.replica.describe(), *(f"exchanged: {name}" for name in self.replica.exchanged())]
            self.comm.drive(compare(told, self.comm.rank, "parameters and settings"))
            self.background.start(self.buckets())

    def restore(self, state: dict[str, Any]) -> None:
        """See `Rounds`. Deletes results for the replaced weights, on all ranks."""
        self.background.stop()
        self.background.clear()
        super().restore(state)


class Background:
    """A thread that averages weights over a second group of the same ranks.

    The thread never writes weights. It copies them between two steps and leaves the difference between the mean of all
    copies and its own copy, which the training thread adds before the next step.

    Attributes:
        buckets: the exchanged buckets.
        scheduler: starts the thread's collectives.
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
        self.scheduler = CollectiveScheduler(self._wire, Telemetry(), "averaging")
        self.buckets: dict[Bucket, Weights] = {}
        self._thread: threading.Thread | None = None
        self._turn = threading.Condition()  # guards copying and changing the weights
        self._stepping = False
        self._pending: dict[Bucket, Tensor] = {}
        self._asked = threading.Event()  # set if this rank asks to stop
        self._failing = False  # True if an exception ends the script
        self._given_up = threading.Event()  # set to stop without waiting for the others
        self._missing: list[int] = []  # ranks that have not asked to stop
        self._failure: Exception | None = None

    # -- the training's thread ---------------------------------------------------------------------------------------

    @property
    def is_running(self) -> bool:
        """True from start to end."""
        return self._thread is not None

    def start(self, buckets: dict[Bucket, Weights]) -> None:
        """Start the thread, on all ranks at once."""
        self.buckets = buckets
        self._asked.clear()
        self._given_up.clear()
        self._failing = False
        self._thread = threading.Thread(target=self._run, name="dgcopt AsyncAverage", daemon=True)
        self._thread.start()
        atexit.register(self.leave)

    def before_step(self) -> None:
        """Block copies: weights are about to change."""
        with self._turn:
            self._stepping = True

    def after_step(self) -> None:
        """Allow copies again."""
        with self._turn:
            self._stepping = False
            self._turn.notify()

    def check(self) -> None:
        """Raise the error that has ended the thread, if any."""
        if self._failure is not None:
            kind = type(self._failure) if isinstance(self._failure, DGCError) else CommError
            raise kind(f"AsyncAverage has stopped: {self._failure}") from self._failure

    @torch.no_grad()
    def take_in(self) -> None:
        """Add the results of finished exchanges to the weights."""
        with self._turn:
            for bucket, change in self._pending.items():
                params = [s.param.detach() for s in bucket.segments]
                torch._foreach_add_(params, [s.view(change) for s in bucket.segments])
            self._pending = {}

    def clear(self) -> None:
        """Delete results of exchanges, and the error that has ended them."""
        self._pending, self._failure = {}, None

    def stop(self) -> None:
        """Stop the thread as soon as all ranks ask for it. Each wait for a sign of life ends at the deadline."""
        self._asked.set()
        self.after_step()
        while self._thread is not None:
            self._thread.join(self._comm.deadline)
            if not self._thread.is_alive():
                self._ended()
            else:
                log.warning(
                    "dgcopt: rank %s exchanges weights until rank(s) %s, which are alive, also call abort() or end",
                    *(self._comm.rank, self._missing),
                )

    def give_up(self) -> None:
        """Stop the thread without the other ranks."""
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
        """Stop before the wire closes: together, or soon if this rank fails, so that its launcher notices."""
        if sys.exc_info()[0] is not None or hasattr(sys, "last_value"):
            self._failing = True
            self._asked.set()
            self.after_step()  # the exception may have ended a step, for whose end the thread waits
            if self._thread is not None:
                self._thread.join(min(LAST_SECONDS, self._comm.deadline))
            self.give_up()
        else:
            self.stop()
            if self._failure is not None:
                log.warning("dgcopt: rank %s: AsyncAverage had stopped: %s", self._comm.rank, self._failure)

    # -- the thread --------------------------------------------------------------------------------------------------

    def _run(self) -> None:
        weights = next((bucket.segments[0].param for bucket in self.buckets), torch.empty(0))
        try:
            with torch.cuda.device_of(weights):  # a thread begins on device 0
                self._exchange_until_asked()
        except Exception as error:
            if not self._given_up.is_set():
                self._failure = error

    def _exchange_until_asked(self) -> None:
        steps, result = self._exchanges(self.buckets), None
        with suppress(StopIteration):
            while True:
                handle = steps.send(result)  # type: ignore[arg-type]  # None starts a generator
                result = self.scheduler.wait(_Watched(handle, self._wire, self._given_up))

    @torch.no_grad()
    def _exchanges(self, buckets: dict[Bucket, Weights]) -> Job:
        """Make one exchange after another until all ranks ask to stop."""
        while True:
            self._asked.wait(self._rule.interval)
            copies = {bucket: self._copy(bucket) for bucket in buckets}
            if (yield from self.scheduler.through(self._agree(copies.values()))):
                return
            exchanges = [PendingExchange(bucket.label, bucket) for bucket in buckets]
            for pending in exchanges:
                self.scheduler.launch(pending, self._rule.exchange(copies[pending.of].clone(), buckets[pending.of]))
            yield from self.scheduler.finish(exchanges, self._rule.in_turn)
            with self._turn:
                for pending in exchanges:
                    assert isinstance(pending.result, Tensor)
                    change = pending.result.sub_(copies[pending.of])
                    before = self._pending.get(pending.of)
                    self._pending[pending.of] = change if before is None else change.add_(before)

    def _copy(self, bucket: Bucket) -> Tensor:
        """Return a copy of a bucket's weights between two steps, pending results included."""
        with self._turn:
            self._turn.wait_for(lambda: not self._stepping or self._given_up.is_set())
            x = bucket.read()
            return x.add_(self._pending[bucket]) if bucket in self._pending else x

    def _agree(self, copies: Iterable[Tensor]) -> Generator[Collective, Tensor, bool]:
        """Return True if all ranks ask to stop.

        Raises on all ranks: CommError if some rank has failed, DivergenceError if some rank's weights are not finite.
        """
        finite = all(map(is_finite, copies))
        mine = torch.tensor([self._asked.is_set() + 2 * finite + 4 * self._failing], dtype=torch.uint8)
        flags = (yield AllGather(mine, group="control", label="stop requests")).flatten().tolist()
        if failing := [rank for rank, flag in enumerate(flags) if flag & 4]:
            raise CommError(
                f"rank {self._comm.rank}: an exception has ended the script of rank(s) {failing}: read their output"
            )
        if infinite := [rank for rank, flag in enumerate(flags) if not flag & 2]:
            raise self._rounds.replica.not_finite(self._rounds.local_step, infinite)
        self._missing = [rank for rank, flag in enumerate(flags) if not flag & 1]
        return not self._missing


class _Watched(Handle):
    """A collective whose wait ends once `given_up` is set."""

    def __init__(self, handle: Handle, comm: Comm, given_up: threading.Event) -> None:
        self.collective = handle.collective
        self.handle = handle
        self.comm = comm
        self.given_up = given_up

    def done(self) -> bool:
        if self.given_up.is_set():
            raise CommError(f"rank {self.comm.rank} has stopped waiting for {self.collective.describe()}")
        return self.handle.done()

    def result(self) -> Tensor:
        return self.comm.wait(self.handle)
