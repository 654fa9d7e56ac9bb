"""How coordinates that every rank has chosen for itself become one sum: all to all ranks, or by owners."""

from __future__ import annotations

import logging
import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal, Protocol, TypeAlias, TypeVar

import torch
from torch import Tensor

from ..coding import SparseCode, decode_rice, encode_rice, one_row, rice_bytes, what_fits
from ..collectives import AllGather, AllReduce, AllToAll
from ..errors import ConfigError, PayloadError
from ..flat.gradient import SparseSum
from ..flat.shard import Sharding
from ..kernels import Groups, block_maxima, by_owner, gather, of_owners, select, subtract_at
from .base import GradientExchange
from .context import SUMS, Context, at_least_float32
from .refusal import Refusal, decode_or_refuse, heed_refusals

__all__ = [
    "AllGatherReduction",
    "Choice",
    "OwnerReduction",
    "PartitionReduction",
    "Reduce",
    "Reduction",
    "check_reduce",
    "faster",
    "reduction",
    "sum_of_messages",
]

Reduce: TypeAlias = Literal["gather", "owner", "partition", "auto"]
"""Whether every rank hears all that others have chosen, only the largest sums of it from the ranks that own them, or
ranks choose for each other.

"auto" is the faster one of the first two: see `Reduction.seconds`.
"""

log = logging.getLogger("dgcopt")

# What a processor takes, as bench_reduce.py has it: to read one coordinate of a message, to pass over one place of an
# owner's share, and to code and read a bucket's messages one time more.
_READING, _PASSING, _CODING = 20e-9, 2e-9, 1e-3

_SIGMAS = 2  # of the coordinates that fall to one owner at random, less than 1% find no room then


@dataclass(frozen=True)
class Choice:
    """What one rank has chosen of a bucket.

    Attributes:
        indices: where, int64, ascending. values: what is there.
        at: what is at any positions.
        forget: told the positions that are sent, and their values as they arrive: what the residual loses; and which
            of them travel, None if all do. The value of one that does not is 0.
    """

    indices: Tensor
    values: Tensor
    at: Callable[[Tensor], Tensor]
    forget: Callable[[Tensor, Tensor, Tensor | None], None]


class Reduction(Protocol):
    """What becomes of the coordinates that each rank has chosen.

    Attributes: `count`, how many a rank may choose.
    """

    @property
    def count(self) -> int: ...

    def exchange(self, choice: Choice, ctx: Context) -> GradientExchange:
        """The sum over ranks, divided as `ctx.op` says. Raises PayloadError for a message that cannot be right."""

    def nbytes(self, ctx: Context) -> int | None:
        """Bytes that this rank hands to collectives; None if data decide."""

    def seconds(self, ctx: Context) -> float:
        """How long an exchange of this bucket should take over `ctx.link`, but for what all ways have in common."""


def reduction(
    way: Reduce, code: SparseCode, count: int, ctx: Context, keep: float = 1.0, decay: float = 1.0
) -> Reduction:
    """What a setting means for `count` coordinates of each rank, at most; the others are `OwnerReduction`'s."""
    if way == "partition":
        return PartitionReduction(count)
    ways: dict[str, Reduction] = {
        "gather": AllGatherReduction(code, count),
        "owner": OwnerReduction(code, count, keep, decay),
    }
    return faster(ways, ctx) if way == "auto" else ways[way]


class Timed(Protocol):
    """What says how long it should take."""

    def seconds(self, ctx: Context) -> float: ...


Way = TypeVar("Way", bound=Timed)


def faster(ways: dict[str, Way], ctx: Context) -> Way:
    """The way that should take the least time, alike on all ranks; the log says when it is another one."""
    seconds = {name: one.seconds(ctx) for name, one in ways.items()}
    chosen = min(seconds, key=lambda name: seconds[name])
    if ctx.rank == 0 and ctx.scratch.get("reduce") != chosen:
        log.info(
            'dgcopt: bucket %d: reduce="auto" is "%s" (%s; %d ranks, %.2g ms, %.3g MB/s)',
            *(ctx.index, chosen, ", ".join(f"{name} {1e3 * time:.3g} ms" for name, time in seconds.items())),
            *(ctx.size, 1e3 * ctx.link.latency, ctx.link.bandwidth / 1e6),
        )
    ctx.scratch["reduce"] = chosen
    return ways[chosen]


def check_reduce(way: Reduce, keep: float) -> None:
    """Raises ConfigError for settings that do not exist."""
    if way not in ("gather", "owner", "partition", "auto"):
        raise ConfigError(f'reduce must be "gather", "owner", "partition" or "auto", not {way!r}')
    if isinstance(keep, bool) or not isinstance(keep, int | float) or not keep > 0:
        raise ConfigError(f"keep must be a positive number, 1.0 for as many as a rank selects, not {keep!r}")
    if keep != 1 and way in ("gather", "partition"):
        raise ConfigError(
            f'keep={keep!r} says how many sums owners forward, and with reduce="{way}" there are none: leave it away '
            f'or give reduce="owner" or "auto"'
        )


@dataclass(frozen=True)
class AllGatherReduction:
    """Everyone's message to everyone, by one allgather: what a rank receives and decodes grows with their number."""

    code: SparseCode
    count: int

    def exchange(self, choice: Choice, ctx: Context) -> GradientExchange:
        sent = self.code.send(choice.indices, choice.values, ctx.numel, ctx.checks)
        ctx.count_sent(sent)
        choice.forget(sent.indices, sent.values, sent.travels)
        return sum_of_messages((yield AllGather(sent.message)), self.code, self.count, ctx)

    def nbytes(self, ctx: Context) -> int:
        return self.code.nbytes(self.count, ctx.numel)

    def seconds(self, ctx: Context) -> float:
        received = (ctx.size - 1) * self.nbytes(ctx)
        return ctx.link.latency + received / ctx.link.bandwidth + _READING * ctx.size * self.count


@dataclass(frozen=True)
class OwnerReduction:
    """Each coordinate has an owner, which adds up what ranks send of it, and forwards only the largest sums.

        s = decay * s + what ranks have sent me, in rank order
        forward the keep * count / N largest |s|;  s = s minus what arrives

    So a rank sends and receives about twice its own choice, however many ranks there are, and what all apply is as
    sparse as that. What does not fit into a message to an owner, the smallest first, stays with its sender; what an
    owner does not forward stays with it, apart from its own residual, in which its own choice would drown. This is the
    scheme of Ok-Topk (Li & Hoefler, "Near-Optimal Sparse Allreduce", PPoPP 2022) with owners drawn by a hash, fixed
    lengths, and nothing lost.

    Args:
        code: how coordinates travel. Positions always travel as Rice-coded gaps, as their number varies.
        count: how many coordinates each rank selects.
        keep: how many sums are forwarded by all owners together, as a multiple of `count`; infinity forwards all that
            has arrived in this step, and costs one more allreduce of 8 bytes.
        decay: of what waits with owners; 0 throws it away.
    """

    code: SparseCode
    count: int
    keep: float = 1.0
    decay: float = 1.0

    def _encode(self, choice: Choice, ctx: Context) -> Tensor:
        """The messages to all owners, and their part forgotten."""
        length = _sharding(ctx).length
        order, places, counts = by_owner(choice.indices, ctx.size)
        values = gather(choice.values, order)
        messages, kept, arriving = self._code.encode_rows(places, values, counts, length, self._capacity(ctx.size))
        sent = order if kept is None else order[kept]
        ctx.count(selected=len(order), left_out=len(order) - len(sent))
        choice.forget(choice.indices[sent], arriving, None)
        return messages

    def exchange(self, choice: Choice, ctx: Context) -> GradientExchange:
        length, code = _sharding(ctx).length, self._code
        messages = self._encode(choice, ctx)
        held = self._held(ctx)
        received = yield AllToAll(messages)
        capacity = self._capacity(ctx.size)
        (arrived, values, counts), refusal = decode_or_refuse(
            received, lambda rows, ranks: code.decode_rows(rows, capacity, length, ranks), ctx
        )
        values = values.to(held.dtype)
        # in rank order: a device other than a CPU adds what one call brings in any order
        rows = [len(arrived)] if held.is_cpu else counts.tolist()

        def add_to(sums: Tensor) -> None:
            for places, part in zip(arrived.split(rows), values.split(rows), strict=True):
                sums.index_add_(0, places, part)

        with ctx.for_now(held if self.decay in (0, 1) else held * self.decay, arrived) as sums:
            add_to(sums)
            if refusal is None and not gather(sums, arrived).isfinite().all():
                refusal = Refusal(_not_finite(values, counts, ctx.rank), readable=True)
            places = self._largest(sums, arrived, ctx.size) if refusal is None else arrived[:0]
            chosen = gather(sums, places)
        if math.isinf(self.keep):
            # 1 at least, as a message of none has no room for a refusal
            count = int((yield AllReduce(torch.tensor([max(1, len(places))], device=held.device), op="max")))
            if not 1 <= count <= length:
                raise PayloadError(
                    f"rank {ctx.rank}: in bucket {ctx.index}, an owner forwards {count} sums of the {length} that it "
                    f"has: a message was damaged on the way, or some rank runs another "
                    f"model or version"
                )
            if count < len(places):
                refusal, places, chosen = Refusal(ctx.rank, readable=False), places[:0], chosen[:0]
        else:
            count = self._forwarded(ctx.size, length)
        message, sent, arriving = code.encode(places, chosen, length, count)
        if refusal is not None:
            refusal.replace(message)

        def keep() -> None:
            if self.decay != 1:
                held.mul_(self.decay)
            add_to(held)
            subtract_at(held, sent, arriving)

        if self.decay:
            ctx.on_commit(keep)
        return (yield from self._forward(message, count, ctx))

    def _held(self, ctx: Context) -> Tensor:
        """What this rank has been sent in earlier steps and has not forwarded."""
        sharding = _sharding(ctx)
        if self.decay:
            return ctx.shard(SUMS, sharding).held
        return torch.zeros(sharding.length, dtype=at_least_float32(ctx.dtype), device=ctx.device)

    def _largest(self, sums: Tensor, arrived: Tensor, size: int) -> Tensor:
        """Where the sums are that this rank forwards."""
        if math.isinf(self.keep):
            return arrived.unique()
        groups = Groups([[(0, len(sums))]], [self._forwarded(size, len(sums))], sums.device)
        places = select(sums, block_maxima(sums), groups)
        return places[gather(sums, places) != 0]

    def _forward(self, message: Tensor, count: int, ctx: Context) -> GradientExchange:
        """What all owners forward, on all ranks."""
        gathered = heed_refusals((yield AllGather(message)), ctx)
        places, sums, counts = self._code.decode_rows(gathered, count, _sharding(ctx).length, range(ctx.size))
        total = SparseSum()
        positions = of_owners(places, counts, ctx.size)
        total.add_rows(positions, sums.to(at_least_float32(ctx.dtype)) / ctx.divisor, counts)
        return total

    @property
    def _code(self) -> SparseCode:
        return SparseCode("rice", self.code.values)

    def _capacity(self, size: int) -> int:
        """For how many coordinates a message to one owner has room."""
        return _room(self.count, size)

    def _forwarded(self, size: int, length: int) -> int:
        """How many sums each owner forwards."""
        return min(length, math.ceil(self.keep * self.count / size))

    def nbytes(self, ctx: Context) -> int | None:
        if math.isinf(self.keep):
            return None
        length = _sharding(ctx).length
        sent = ctx.size * self._code.nbytes(self._capacity(ctx.size), length)
        return sent + self._code.nbytes(self._forwarded(ctx.size, length), length)

    def seconds(self, ctx: Context) -> float:
        length = _sharding(ctx).length
        forwarded = self._forwarded(ctx.size, length) if self.keep < ctx.size else min(length, self.count)
        per_rank = self._code.nbytes(self._capacity(ctx.size), length) + self._code.nbytes(forwarded, length)
        received, read = (ctx.size - 1) * per_rank, self.count + ctx.size * forwarded
        work = _READING * read + _PASSING * length + _CODING
        return 2 * ctx.link.latency + received / ctx.link.bandwidth + work


@dataclass(frozen=True)
class PartitionReduction:
    """Each rank's choice counts only where it is the rank's turn to choose, and all ranks send what they have there.

    (a) of its choice a rank keeps what lies in its share, which is another one in every step; (b) these positions,
    k/N of them in the mean, go to all ranks; (c) an allreduce adds up what all have there.

    So all apply about `count` coordinates, of which every rank has sent its whole value: nothing waits on other ranks
    when a coordinate is applied, but a rank waits for its turn to choose one. In the manner of ExDyna (Yoon & Oh,
    "Preserving Near-Optimal Gradient Sparsification Cost for Scalable Distributed Deep Learning", CCGRID 2024), without
    its adaptive thresholds; shares are hashed as those of owners are.

    Args:
        count: how many coordinates each rank selects, of which about one in N counts.

    Costs one allgather of Rice-coded positions, and one allreduce of `count` values of the parameters' dtype.
    """

    count: int

    def exchange(self, choice: Choice, ctx: Context) -> GradientExchange:
        sharding, capacity = _sharding(ctx), _room(self.count, ctx.size)
        turn = (ctx.rank + ctx.step) % ctx.size
        mine = (sharding.owners(choice.indices) == turn).nonzero().squeeze(1)
        places, values = sharding.places(choice.indices[mine]), choice.values[mine]
        kept, counts = what_fits(places, values, one_row(len(places)), capacity, sharding.length)
        places = places if kept is None else places[kept]
        ctx.count(selected=len(mine), left_out=len(mine) - len(places))
        gathered = yield AllGather(encode_rice(places, counts, capacity, sharding.length)[0])

        places, counts = decode_rice(gathered, capacity, sharding.length, range(ctx.size))
        turns = ((torch.arange(ctx.size) + ctx.step) % ctx.size).repeat_interleave(counts)
        positions = sharding.positions(places, turns.to(places.device)).sort().values
        if len(positions) and int(positions[-1]) >= ctx.numel:
            raise PayloadError(
                f"rank {ctx.rank}: in bucket {ctx.index}, a rank has chosen position {int(positions[-1])} of "
                f"{ctx.numel}: its message was damaged on the way, or that rank runs another model or version"
            )
        summing, sent = ctx.all_reduce(choice.at(positions))
        choice.forget(positions, sent.to(choice.values.dtype, copy=True), None)  # which may be later
        total = SparseSum()
        if len(positions):
            total.add(positions, (yield summing))
        return total

    def nbytes(self, ctx: Context) -> None:
        return None

    def seconds(self, ctx: Context) -> float:
        rest = 2 * self.count * ctx.dtype.itemsize + ctx.size * rice_bytes(_room(self.count, ctx.size), ctx.numel)
        return 2 * ctx.link.latency + rest / ctx.link.bandwidth + _READING * self.count


def _not_finite(values: Tensor, counts: Tensor, owner: int) -> int:
    """Return the first rank whose values hold NaN or Inf; the owner, if only its sums do."""
    parts = [bool(part.isfinite().all()) for part in values.split(counts.tolist())]
    return next((rank for rank, finite in enumerate(parts) if not finite), owner)


def _room(count: int, size: int) -> int:
    """For how many coordinates a message has room, of `count` that fall to `size` ranks."""
    mean = count / size
    return min(count, math.ceil(mean + _SIGMAS * math.sqrt(mean * (1 - 1 / size))))


def _sharding(ctx: Context) -> Sharding:
    return Sharding(ctx.numel, ctx.size)


def sum_of_messages(messages: Tensor, code: SparseCode, count: int, ctx: Context) -> SparseSum:
    """The ranks' coordinates, in rank order, divided by N. `Context.checks` tell of a message that cannot be right."""
    total = SparseSum()
    positions, values = code.receive(messages, count, ctx.numel, range(len(messages)), ctx.checks)
    values = values.to(at_least_float32(ctx.dtype)) / ctx.divisor
    for theirs in zip(positions.unbind(), values.unbind(), strict=True):
        total.add(*theirs)
    return total
