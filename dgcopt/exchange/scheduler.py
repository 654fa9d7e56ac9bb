"""Collectives of pending exchanges: started, named, counted and ordered in one place.

Exchanges advance round by round, in the order of their launch: round two of the first is in flight while the ranks wait
for round one of the second. No order depends on timing, because torch.distributed and MPI match collectives by order.
Small messages of exchanges that are launched together share one collective, because a collective costs a processor more
than their bytes. Functions that wait for other ranks are generators. They yield the handle and receive its result, so
their caller decides how to wait.
"""

from __future__ import annotations

import logging
import time
from collections import Counter
from collections.abc import Callable, Generator, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any, Generic, Literal, TypeAlias, TypeVar

import torch
from torch import Tensor

from ..collectives import Collective, Group, Link, carried, check_generator, is_joinable, joined, parted
from ..comm import Comm, Handle, lowered
from ..compressors import Compressor, Context, GradientExchange, Place
from ..errors import CommError, ConfigError
from ..flat.buckets import Bucket
from ..flat.gradient import GradientBucket, SparseSum
from ..flat.store import Store
from .agreement import announced
from .telemetry import Telemetry
from .trace import Trace

__all__ = ["CollectiveScheduler", "PendingExchange", "claim", "context_of", "exchange_of", "place_of"]

log = logging.getLogger("dgcopt")

Of = TypeVar("Of")
Result = TypeVar("Result")

ENOUGH = 2**18
"""Total bytes of small messages that are sent without waiting for others to join them."""

UNEVEN = "If ranks run out of data one before another: `with dgcopt.join(optimizer):`, or DDP's own join() with a hook."


@dataclass(eq=False)
class PendingExchange(Generic[Of]):
    """One exchange of a bucket, or of another object of its caller: its current collective, or its result.

    `rounds` counts its collectives by group, because labels must be equal on all ranks that take part, and not all
    ranks take part in those of "node" and "across". Exchanges that share one collective have the same `handle`.
    """

    label: str
    of: Of
    exchange: GradientExchange | None = field(default=None, init=False)
    rounds: Counter[Group] = field(default_factory=Counter, init=False)
    collective: Collective | None = field(default=None, init=False)
    handle: Handle | None = field(default=None, init=False)
    result: Tensor | SparseSum | None = field(default=None, init=False)

    def replace_result(self, result: Tensor | SparseSum) -> None:
        """Replace the result before the write-back."""
        self.result = result


Ready: TypeAlias = tuple[PendingExchange[Any], Collective]
"""An exchange, and its next collective, not started yet."""


class CollectiveScheduler:
    """The collectives of one user of a wire.

    Args:
        comm: the wire.
        telemetry: counts bytes and seconds.
        user: its name in labels. Its `number` distinguishes the users of one wire.
        progress: see `Comm.attend`.

    Attributes:
        before_step: number of its collectives among all ranks that have started before the step. Wires match
            collectives by order, so ranks with different numbers would confuse messages.
    """

    def __init__(
        self, comm: Comm, telemetry: Telemetry, user: str, progress: Callable[[], None] = lambda: None
    ) -> None:
        self.comm = comm
        self.telemetry = telemetry
        self.user = user
        self.number = comm.attend(progress)
        self.before_step = self._started = 0
        self._in_step = False
        self._trace: Trace | None = None
        self._asked: dict[int, float] = {}  # time at which an exchange has requested a collective

    def count_in(self, telemetry: Telemetry) -> None:
        """Count bytes and seconds in `telemetry` from now on."""
        self.telemetry = telemetry

    def write_trace(self, trace: Trace | None) -> None:
        """Write the phases of collectives to a trace from now on; None ends it."""
        self._trace = trace

    def start(self, collective: Collective, label: str) -> Handle:
        """Start a collective and count its bytes: the one place where collectives start."""
        collective.call(f"{self.user} {self.number} {label}", self.number)
        self.telemetry.count_message(collective.nbytes, self.comm.sent(collective))
        if self._trace is not None:
            self._trace.started(collective)
        handle = self.comm.start(collective)
        self._started += collective.group == "world"
        return handle

    def begin_step(self) -> None:
        """Note that a step begins, unless it has begun: by its first launch, or its vote."""
        if not self._in_step:
            self._in_step, self.before_step = True, self._started

    def end_step(self) -> None:
        """Note that a step has ended, or failed on this rank."""
        self._in_step = False

    def wait(self, handle: Handle) -> Tensor:
        """Return the result of a started collective."""
        start = time.perf_counter()
        try:
            result = self.comm.wait(handle)
        except CommError as error:
            if handle.collective.label.endswith(" vote"):  # a rank that takes no more steps is missed here first
                error.args = (f"{error} {UNEVEN}",)
            raise
        end = time.perf_counter()
        self.telemetry.count_seconds(wait=end - start)
        if self._trace is not None:
            self._trace.waited(handle.collective, start, end)
        return result

    def drive(self, steps: Generator[Handle, Tensor, Result]) -> Result:
        """Run a generator of handles, waiting for each; return its result."""
        result: Tensor | None = None
        while True:
            try:
                handle = steps.send(result)  # type: ignore[arg-type]  # None starts a generator
            except StopIteration as stop:
                return stop.value
            result = self.wait(handle)

    def through(self, exchange: Generator[Collective, Tensor, Result]) -> Generator[Handle, Tensor, Result]:
        """Run an exchange without a bucket, such as a vote, at its place in the order of the step."""

        def carry(collective: Collective) -> Generator[Handle, Tensor, Tensor]:
            return (yield self.start(collective, collective.label))

        return carried(lowered(exchange, self.comm), carry)

    def launch(self, pending: PendingExchange[Any], exchange: GradientExchange) -> None:
        """Run an exchange to its first collective, and start it."""
        self.launch_together([(pending, exchange)])

    def launch_together(self, launches: Iterable[tuple[PendingExchange[Any], GradientExchange]]) -> None:
        """Launch several exchanges, the same ones on all ranks; their small messages travel together."""
        self.begin_step()
        ready: list[Ready] = []
        for pending, exchange in launches:
            pending.exchange = lowered(exchange, self.comm)
            ready += self._run(pending, None)
            if sum(collective.nbytes for _, collective in ready) >= ENOUGH:
                self._start_all(ready)
                ready = []
        self._start_all(ready)

    def _run(self, pending: PendingExchange[Any], result: Tensor | None) -> list[Ready]:
        """Run an exchange to its end, or to its next collective; return that one, not started."""
        assert pending.exchange is not None
        ready: list[Ready] = []
        start = time.perf_counter()
        try:
            ready.append((pending, pending.exchange.send(result)))  # type: ignore[arg-type]  # None starts a generator
        except StopIteration as stop:
            pending.result = stop.value
        pending.handle = None
        end = time.perf_counter()
        is_first = bool(ready) and not pending.rounds
        if is_first:
            self.telemetry.count_seconds(compress=end - start)
        else:
            self.telemetry.count_seconds(apply=end - start)
        if self._trace is not None:
            self._trace.phase("compress" if is_first else "apply", pending.label, start, end)
            self._asked |= {id(pending): end for pending, _ in ready}
        return ready

    def _start_all(self, ready: list[Ready]) -> None:
        """Start the collectives of several exchanges, one collective for those that can be joined."""
        while ready:
            like = ready[0][1]
            together = [each for each in ready if each[1] is like or is_joinable(like, each[1])]
            ready = [each for each in ready if each not in together]
            one = like if len(together) == 1 else joined([collective for _, collective in together])
            rounds = [f"{pending.label} round {pending.rounds[one.group]}" for pending, _ in together]
            if self._trace is not None:
                for pending, collective in together:
                    now = time.perf_counter()
                    asked = self._asked.pop(id(pending), now)
                    self._trace.phase("queued", pending.label, asked, now, bytes=collective.nbytes)
            handle = self.start(one, " and ".join(rounds))
            for pending, collective in together:
                collective.call(one.label, one.user)
                pending.collective, pending.handle = collective, handle
                pending.rounds[one.group] += 1

    def finish(self, exchanges: Sequence[PendingExchange[Any]], in_turn: bool) -> Generator[Handle, Tensor, None]:
        """Take launched exchanges to their end: round by round, or each as a whole, `in_turn`."""
        while handles := _awaited(exchanges):
            for handle in handles[:1] if in_turn else handles:
                result = yield handle
                arrived = [pending for pending in exchanges if pending.handle is handle]
                collectives = [pending.collective for pending in arrived if pending.collective is not None]
                results = [result] if len(arrived) == 1 else parted(result, collectives)
                runs = [self._run(pending, part) for pending, part in zip(arrived, results, strict=True)]
                self._start_all([ready for run in runs for ready in run])

    def cancel(self, exchanges: Sequence[PendingExchange[Any]]) -> Generator[Handle, Tensor, None]:
        """Wait for started collectives, the same ones on all ranks, and ignore their results.

        Afterwards exchanges are as they were before their launch.
        """
        for handle in _awaited(exchanges):  # noqa: UP028  # a list cannot be sent results
            yield handle
        for pending in exchanges:
            pending.exchange = pending.collective = pending.handle = pending.result = None
            pending.rounds.clear()

    def count_step(self, numel: int) -> None:
        """Count a step of that many gradient elements."""
        if self._trace is not None:
            self._trace.stepped()
        self.telemetry.count_step(2 * 4 * numel * (self.comm.size - 1) // self.comm.size)


LOST = {
    "residual": "dgcopt: rank %s: the residual of parameter(s) %s (%s) cannot be sent as %s and is dropped. To lose "
    "nothing, resume with the compressor that saved it. DGC(ratio=1) with the same source sends all of it in two "
    "steps: save then",
    "momentum": "dgcopt: rank %s: SGD's momentum of parameter(s) %s, which the compressor that saved it kept (%s), is "
    "dropped and starts at zero: this compressor sends %s. To lose nothing, resume with the one that saved it",
}
"""Warnings of dropped memory by its kind."""


def claim(store: Store, buckets: Iterable[Bucket], compressor: Compressor, rank: int) -> None:
    """Drop waiting memory of new buckets that another kind of compressor has held back, and warn of it.

    Called before their contexts are made.
    """
    lost: dict[tuple[str, str, str], list[str]] = {}
    for bucket in buckets:
        before, now = dict(store.made_of), compressor.residual_content(bucket.kind)
        for name, kind in store.claim([segment.name for segment in bucket.segments], now):
            lost.setdefault((kind, before[name], now), []).append(repr(name))
    for (kind, made_of, now), names in lost.items():
        some = ", ".join(names[:3]) + (f" and {len(names) - 3} more" if len(names) > 3 else "")
        log.warning(LOST[kind], rank, some, made_of, now)


def _awaited(exchanges: Sequence[PendingExchange[Any]]) -> list[Handle]:
    """Return the handles that exchanges wait for, in order, each once."""
    return [*dict.fromkeys(pending.handle for pending in exchanges if pending.handle is not None)]


def context_of(
    bucket: Bucket, comm: Comm, op: Literal["average", "sum"], store: Store, prescale: float = 1.0
) -> Context:
    """Return the context of a new bucket's exchanges, which adopts its memory; see `Context.begin`."""
    return Context(place_of(bucket, comm, op, prescale), store.adopt(bucket))


def place_of(bucket: Bucket, comm: Comm, op: Literal["average", "sum"], prescale: float = 1.0) -> Place:
    """Return the place of a new bucket's exchanges."""
    return Place(
        rank=comm.rank,
        size=comm.size,
        op=op,
        step=0,
        kind=bucket.kind,
        segments=bucket.segments,
        index=bucket.index,
        node=comm.node,
        nodes=comm.nodes,
        local_rank=comm.local_rank,
        local_size=comm.local_size,
        link=comm.link or Link(),
        prescale=prescale,
    )


def _is_of_the_library(compressor: Compressor) -> bool:
    """True if all parts are dgcopt's own, whose collectives do not depend on data."""
    return all(type(part).__module__.split(".")[0] == "dgcopt" for part in compressor.parts())


def exchange_of(
    bucket: GradientBucket, compressor: Compressor, context: Context, together: bool = False
) -> GradientExchange:
    """Exchange one bucket, whose gradient is in it, or in `context.local` if gradients stay in place.

    Where all ranks launch it `together`, and the compressor is the user's own and does not say how much it sends, they
    compare that first.

    Raises ConfigError if the compressor returns anything but an averaged gradient, and the errors of `announced`.
    """
    if context.memory.idle and not bucket.in_place:
        context.memory.add_unsent(bucket.grad, context.memory.idle, context.place.prescale)
    exchange = compressor.exchange(torch.empty(0) if bucket.in_place else bucket.grad, context)
    check_generator(exchange)
    if together and not _is_of_the_library(compressor) and compressor.payload_bytes(context) is None:
        exchange = announced(exchange, bucket.label, context.rank)
    result = yield from exchange
    if isinstance(result, SparseSum) or (isinstance(result, Tensor) and result.shape == (bucket.numel,)):
        return result
    returned = f"shape {tuple(result.shape)}" if isinstance(result, Tensor) else type(result).__name__
    raise ConfigError(
        f"{type(compressor).__name__}.exchange must return the averaged gradient of {bucket.label}, a tensor of shape "
        f"{(bucket.numel,)} or a SparseSum, not {returned}"
    )
