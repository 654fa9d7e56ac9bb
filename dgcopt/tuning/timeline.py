"""The timeline of one training step: backward, compression and collectives, from their parts. Pure functions."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

from ..errors import ConfigError
from .wire import Wire, wire_bytes

__all__ = ["Bucket", "Method", "Parameter", "Round", "Span", "Timeline", "break_even", "fill_buckets", "timeline"]

JOINED = 2**18
"""Bytes of messages that are ready together up to which one collective carries them; see `exchange/scheduler.py`."""
VOTE = 44
"""Bytes of a rank's vote before a step."""
MEGABYTE = 2**20


@dataclass(frozen=True)
class Parameter:
    """A parameter of float32: its elements, and seconds from the start of the step until its gradient is ready."""

    numel: int
    ready: float


@dataclass(frozen=True)
class Bucket:
    """Gradients exchanged together: their elements, and seconds until the last one is ready."""

    numel: int
    ready: float


@dataclass(frozen=True)
class Round:
    """One collective per bucket: `nbytes`, a rank's messages of all buckets together."""

    kind: str
    nbytes: float
    group: str = "world"


@dataclass(frozen=True)
class Method:
    """One way to exchange the gradients of a model among a given number of ranks.

    Attributes:
        name: as a user would write it.
        rounds: collectives of each bucket, one after the other; those of one place start together.
        encode: seconds of this rank's work on the whole model before the first round.
        decode: the same after each round. The last one includes the optimizer step.
        overlap: launch buckets during backward.
        votes: rounds of small control messages before results are used; 0 for DistributedDataParallel.
        joins: messages that are ready together travel together while they are small.
        in_turn: one bucket's exchange ends before the second round of the next one starts.
    """

    name: str
    rounds: tuple[tuple[Round, ...], ...]
    encode: float = 0.0
    decode: tuple[float, ...] = ()
    overlap: bool = False
    votes: int = 1
    joins: bool = True
    in_turn: bool = False

    def __post_init__(self) -> None:
        if len(self.decode) != len(self.rounds):
            raise ConfigError(
                f"{self.name}: {len(self.rounds)} round(s) need as many decode times, not {len(self.decode)}"
            )


@dataclass(frozen=True)
class Span:
    """An interval of the timeline on one of its rows: "compute" or "wire"."""

    row: str
    name: str
    start: float
    end: float


@dataclass(frozen=True)
class Timeline:
    """One step: `seconds` in all, `compute` of them forward and backward, `sent` bytes of a rank, and its spans."""

    seconds: float
    compute: float
    sent: float
    spans: tuple[Span, ...]

    @property
    def exposed(self) -> float:
        """Seconds of the step beyond forward and backward."""
        return self.seconds - self.compute

    def busy(self, row: str) -> float:
        """Return the seconds that a row is in use."""
        return sum(span.end - span.start for span in self.spans if span.row == row)

    def waited(self) -> float:
        """Return the seconds in which this rank neither computes nor has ended its step."""
        return self.seconds - self.busy("compute")


def fill_buckets(
    parameters: Sequence[Parameter], bucket_mb: float, first_bucket_mb: float | None = None
) -> list[Bucket]:
    """Fill buckets in gradient-ready order, as DistributedDataParallel and `DistributedOptimizer` do.

    A bucket is closed once it holds `bucket_mb` megabytes, the first one `first_bucket_mb`.
    """
    buckets: list[Bucket] = []
    numel, nbytes, ready = 0, 0, 0.0
    for parameter in sorted(parameters, key=lambda each: each.ready):
        numel, nbytes = numel + parameter.numel, nbytes + 4 * parameter.numel
        ready = parameter.ready
        limit = bucket_mb if buckets or first_bucket_mb is None else first_bucket_mb
        if nbytes >= limit * MEGABYTE:
            buckets.append(Bucket(numel, ready))
            numel, nbytes = 0, 0
    if numel:
        buckets.append(Bucket(numel, ready))
    return buckets


@dataclass
class _Pending:
    """Buckets whose messages travel in one collective: `round` of their exchanges, until the time `done`."""

    buckets: list[int]
    round: int
    done: float


class _Step:
    """The two rows of a step while they are filled: `clock` of the compute row, and the wire's own."""

    def __init__(
        self, method: Method, buckets: Sequence[Bucket], wire: Wire, size: int, local_size: int, lanes: int
    ) -> None:
        self.method, self.buckets, self.wire, self.size, self.lanes = method, buckets, wire, size, lanes
        self._sizes = {"node": local_size, "across": max(1, size // local_size)}
        self.clock = 0.0
        self.sent = 0.0
        self.spans: list[Span] = []
        self.pending: deque[_Pending] = deque()
        self._numel = sum(bucket.numel for bucket in buckets) or 1
        self._link_free = 0.0
        self._ends: list[float] = []

    def share(self, index: int) -> float:
        """Return a bucket's share of the model."""
        return self.buckets[index].numel / self._numel

    def compute(self, name: str, seconds: float) -> None:
        """Occupy the compute row from now on."""
        if seconds > 0:
            self.spans.append(Span("compute", name, self.clock, self.clock + seconds))
            self.clock += seconds

    def start(self, indices: list[int], number: int) -> None:
        """Start one collective of each kind for the messages of some buckets.

        One begins when a lane is free. Its latency runs beside other collectives, its transfer after theirs.
        """
        done = self.clock
        for wanted in self.method.rounds[number]:
            nbytes = wanted.nbytes * sum(map(self.share, indices))
            size = self._sizes.get(wanted.group, self.size)
            if size == 1:
                continue
            cost = self.wire.cost(wanted.kind, nbytes, size, wanted.group)
            lane_free = self._ends[-self.lanes] if len(self._ends) >= self.lanes else 0.0
            begin = max(self.clock, lane_free)
            done = max(begin + cost.latency, self._link_free) + cost.transfer
            self._link_free = done
            self._ends.append(done)
            self.sent += wire_bytes(wanted.kind, nbytes, size)
            name = f"{wanted.kind} {number} of bucket {', '.join(map(str, indices))}"
            self.spans.append(Span("wire", name, begin, done))
        arriving = _Pending(indices, number, done)
        self.pending.appendleft(arriving) if self.method.in_turn and number else self.pending.append(arriving)

    def joinable(self, number: int) -> bool:
        """Return True if small messages of a round travel together."""
        return self.method.joins and all(one.kind in ("AllGather", "AllToAll") for one in self.method.rounds[number])

    def nbytes(self, indices: Iterable[int], number: int) -> float:
        """Return the bytes of a rank's messages in one round."""
        return sum(one.nbytes for one in self.method.rounds[number]) * sum(map(self.share, indices))

    def launch(self, indices: Iterable[int]) -> None:
        """Encode buckets, and start their first collectives, small ones joined."""
        ready: list[int] = []
        for index in indices:
            self.compute(f"encode bucket {index}", self.method.encode * self.share(index))
            ready.append(index)
            if not self.joinable(0) or self.nbytes(ready, 0) >= JOINED:
                self.start(ready, 0)
                ready = []
        if ready:
            self.start(ready, 0)

    def finish(self) -> None:
        """Take all exchanges to their end, round by round."""
        while self.pending:
            arrived = self.pending.popleft()
            self.clock = max(self.clock, arrived.done)
            for index in arrived.buckets:
                self.compute(f"decode bucket {index}", self.method.decode[arrived.round] * self.share(index))
            following = arrived.round + 1
            if following < len(self.method.rounds):
                together = self.joinable(following)
                for indices in [arrived.buckets] if together else [[index] for index in arrived.buckets]:
                    self.start(indices, following)


def timeline(
    buckets: Sequence[Bucket],
    method: Method,
    wire: Wire,
    size: int,
    compute: float,
    *,
    after: float = 0.0,
    local_size: int = 1,
    lanes: int = 1,
) -> Timeline:
    """Return the timeline of one step on one of `size` equal ranks.

    Args:
        buckets: in the order of their launch.
        method: the exchange. Its work and messages are shared among buckets by their elements.
        wire: the cost of collectives.
        size: number of ranks.
        compute: seconds of forward and backward.
        after: seconds of the optimizer step, where `method.decode` does not include it.
        local_size: ranks per machine.
        lanes: collectives that the library runs at once.

    Raises ConfigError for a bucket that is ready after the end of backward.
    """
    if buckets and buckets[-1].ready > compute * (1 + 1e-9):
        raise ConfigError(f"a gradient is ready after {buckets[-1].ready} s, but backward ends after {compute} s")
    step = _Step(method, buckets, wire, size, local_size, lanes)
    if method.overlap and method.rounds:
        ready = 0.0
        for index, bucket in enumerate(buckets):
            step.compute("backward", bucket.ready - ready)
            ready = bucket.ready
            step.launch([index])
        step.compute("backward", compute - ready)
    else:
        step.compute("backward", compute)
    for _ in range(method.votes if size > 1 else 0):
        vote = wire.cost("AllGather", VOTE, size).seconds
        step.spans.append(Span("wire", "vote", step.clock, step.clock + vote))
        step.clock += vote
    if not method.rounds:
        step.compute("encode", method.encode)
    elif not method.overlap:
        step.launch(range(len(buckets)))
    step.finish()
    step.compute("optimizer", after)
    return Timeline(step.clock, compute, step.sent, tuple(step.spans))


def break_even(
    seconds_of: Callable[[float], float],
    dense_seconds_of: Callable[[float], float],
    slowest: float = 1e5,
    fastest: float = 1e12,
) -> float | None:
    """Return the bandwidth up to which a method is faster than the dense one; None if it never is.

    Both functions take bytes per second. Infinite if the method is faster at `fastest` too. Searches downwards from
    `fastest` on a grid of a tenth of a decade, then bisects.
    """
    rates = [slowest]
    while rates[-1] < fastest:
        rates.append(rates[-1] * 10**0.1)
    wins = [seconds_of(rate) < dense_seconds_of(rate) for rate in rates]
    if wins[-1]:
        return float("inf")
    last = max((i for i, won in enumerate(wins) if won), default=None)
    if last is None:
        return None
    low, high = rates[last], rates[last + 1]
    for _ in range(40):
        middle = (low * high) ** 0.5
        low, high = (middle, high) if seconds_of(middle) < dense_seconds_of(middle) else (low, middle)
    return low
