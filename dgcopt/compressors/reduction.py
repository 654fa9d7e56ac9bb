"""Reductions: the ranks' selected coordinates, or whole vectors, become one sum, by an allgather or by owners."""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Literal, Protocol, TypeAlias, TypeVar

import torch
from torch import Tensor

from ..coding import (
    DENSE_CODES,
    SparseCode,
    coded_bytes,
    decode_rice,
    decode_rows,
    encode_rice,
    encode_rows,
    rice_bytes,
    what_fits,
)
from ..coding.values import ValueCode, code_of
from ..collectives import AllGather, AllReduce, AllToAll, everyone
from ..errors import ConfigError, PayloadError
from ..flat.gradient import SparseSum
from ..flat.memory import at_least_float32
from ..flat.shard import Chunks, Sharding
from ..kernels import Groups, block_maxima, by_owner, gather, of_owners, select, subtract_at
from .base import GradientExchange
from .context import Context
from .refusal import Refusal, decode_or_refuse, gather_from_owners

__all__ = [
    "SUMS",
    "Choice",
    "OwnerReduction",
    "PartitionReduction",
    "Reduce",
    "Reduction",
    "check_keep",
    "reduction",
    "sum_of_messages",
    "whole_sum",
]

Reduce: TypeAlias = Literal["gather", "owner", "partition", "auto"]
"""How selected coordinates become a sum: an allgather of all, the largest sums from their owners, or coordinates that
ranks select in turn.

"auto" is the faster one of the first two, by `Reduction.seconds`.
"""

SUMS = "residual of the owner"
"""The kind of owners' memory: sums of received coordinates that are not forwarded yet."""

log = logging.getLogger("dgcopt")

# Seconds on one core, measured by bench_reduce.py: to decode one coordinate of a message, or one element of a vector
# of 50,000; to pass over one element of an owner's shard; to encode and decode a bucket's messages once more.
_READING, _READING_ELEMENT, _PASSING, _CODING = 20e-9, 3e-9, 2e-9, 1e-3

_SIGMAS = 2  # room for random numbers of coordinates per owner: less than 1% are omitted


@dataclass(frozen=True)
class Choice:
    """One rank's selected coordinates of a bucket.

    Attributes:
        indices: positions, int64, ascending.
        values: their values.
        at: returns the values at any positions.
        subtract: subtracts sent values from the residual. Called with their positions, the decoded values, and a mask
            of those that fit into the message, None if all do. The value of one that does not fit is 0.
    """

    indices: Tensor
    values: Tensor
    at: Callable[[Tensor], Tensor]
    subtract: Callable[[Tensor, Tensor, Tensor | None], None]


Given = TypeVar("Given", contravariant=True)


class Reduction(Protocol[Given]):
    """A sum over ranks of their selected coordinates, `Reduction[Choice]`, or of vectors, `Reduction[Tensor]`."""

    def exchange(self, given: Given, ctx: Context, /) -> GradientExchange:
        """Return the sum, divided by `ctx.divisor`; subtract this rank's decoded values from its residual.

        Raises PayloadError for an invalid message.
        """

    def nbytes(self, ctx: Context) -> int | None:
        """Return the payload bytes of this rank; None if they depend on data."""

    def seconds(self, ctx: Context) -> float:
        """Return the estimated time of an exchange over the link, without the parts that all reductions share."""


def reduction(
    way: Reduce, code: SparseCode, count: int, ctx: Context, keep: float = 1.0, decay: float = 1.0
) -> Reduction[Choice]:
    """Return the reduction that a setting names, for at most `count` coordinates per rank; see `OwnerReduction`."""
    if way == "partition":
        return PartitionReduction(count)
    ways: dict[str, Reduction[Choice]] = {
        "gather": AllGatherReduction(code, count),
        "owner": OwnerReduction(code, count, keep, decay),
    }
    return _faster(ways, ctx) if way == "auto" else ways[way]


def whole_sum(way: Reduce, kind: str, ctx: Context) -> Reduction[Tensor]:
    """Return the reduction of vectors that a setting names, in one of DENSE_CODES; "partition" is "owner" here."""
    code = code_of(kind, DENSE_CODES)
    ways: dict[str, Reduction[Tensor]] = {"gather": WholeGather(code), "owner": WholeOwner(code)}
    return _faster(ways, ctx) if way == "auto" else ways["owner" if way == "partition" else way]


def _faster(ways: dict[str, Reduction[Given]], ctx: Context) -> Reduction[Given]:
    """Return the reduction with the least estimated time, the same on all ranks; log every change."""
    seconds = {name: one.seconds(ctx) for name, one in ways.items()}
    chosen = min(seconds, key=lambda name: seconds[name])
    if ctx.rank == 0 and ctx.scratch.get("reduce") != chosen:
        log.info(
            'dgcopt: bucket %d: reduce="auto" is "%s" (%s; %d ranks, %.2g ms, %.3g MB/s)',
            *(ctx.index, chosen, ", ".join(f"{name} {1e3 * time:.3g} ms" for name, time in seconds.items())),
            *(ctx.size, 1e3 * ctx.place.link.latency, ctx.place.link.bandwidth / 1e6),
        )
    ctx.scratch["reduce"] = chosen
    return ways[chosen]


def check_keep(keep: float, way: Reduce) -> None:
    """Raise ConfigError if `keep` is not positive, or the reduction has no owners."""
    if keep <= 0:
        raise ConfigError(f"keep must be a positive number, 1.0 for as many as a rank selects, not {keep!r}")
    if keep != 1 and way in ("gather", "partition"):
        raise ConfigError(
            f'keep={keep!r} is the number of sums that owners forward, and reduce="{way}" has no owners: remove keep, '
            f'or set reduce="owner" or "auto"'
        )


@dataclass(frozen=True)
class AllGatherReduction:
    """One allgather of all messages: received bytes and decoding grow with the number of ranks."""

    code: SparseCode
    count: int

    def exchange(self, choice: Choice, ctx: Context) -> GradientExchange:
        sent = self.code.send(choice.indices, choice.values, ctx.numel, ctx.checks)
        ctx.count_sent(sent)
        choice.subtract(sent.indices, sent.values, sent.fits)
        return sum_of_messages((yield AllGather(sent.message)), self.code, self.count, ctx)

    def nbytes(self, ctx: Context) -> int:
        return self.code.nbytes(self.count, ctx.numel)

    def seconds(self, ctx: Context) -> float:
        received = (ctx.size - 1) * self.nbytes(ctx)
        return ctx.place.link.latency + received / ctx.place.link.bandwidth + _READING * ctx.size * self.count


@dataclass(frozen=True)
class WholeGather:
    """One allgather of all messages: received bytes and decoding grow with the number of ranks.

    Args:
        code: the code of elements.
    """

    code: ValueCode

    def exchange(self, values: Tensor, ctx: Context) -> GradientExchange:
        message, arriving = encode_rows(values.unsqueeze(0), self.code)
        _subtract_arriving(arriving.view(-1), ctx)
        messages = yield AllGather(message[0])
        total = torch.zeros(ctx.numel, dtype=at_least_float32(ctx.dtype), device=ctx.device)
        rows = decode_rows(messages, ctx.numel, self.code, everyone(ctx.rank, ctx.size), ctx.checks)
        for row in rows:
            total += row.to(total.dtype) / ctx.divisor
        ctx.checks.check_finite(total, rows)
        return total

    def nbytes(self, ctx: Context) -> int:
        return coded_bytes(ctx.numel, self.code)

    def seconds(self, ctx: Context) -> float:
        received = (ctx.size - 1) * self.nbytes(ctx)
        return ctx.place.link.latency + received / ctx.place.link.bandwidth + _READING_ELEMENT * ctx.size * ctx.numel


@dataclass(frozen=True)
class OwnerReduction:
    """Each coordinate has an owner, which sums the ranks' values and forwards only the largest sums.

        s = decay * s + all ranks' messages to this rank, in rank order
        forward the keep * count / N largest |s|;  s = s - decoded(forwarded)

    So a rank sends and receives about twice its own selection at any world size, and the result is as sparse as that.
    Coordinates that do not fit into a message to an owner, the smallest first, stay in the sender's residual. Sums that
    an owner does not forward stay with it, apart from its own residual, which they would outweigh. This is the scheme
    of Ok-Topk (Li & Hoefler, "Near-Optimal Sparse Allreduce", PPoPP 2022) with owners drawn by a hash, fixed lengths,
    and nothing lost.

    Args:
        code: the code of values. Positions are always sent as Rice-coded gaps, because their number varies.
        count: number of coordinates that each rank selects.
        keep: number of sums that all owners together forward, as a multiple of `count`; infinity forwards all sums of
            this step, and costs one more allreduce of 8 bytes.
        decay: factor on the owners' memory at every step; 0 keeps none.
    """

    code: SparseCode
    count: int
    keep: float = 1.0
    decay: float = 1.0

    def _encode(self, choice: Choice, ctx: Context) -> Tensor:
        """Return the messages to all owners, and subtract them from the residual."""
        length = _sharding(ctx).length
        order, places, counts = by_owner(choice.indices, ctx.size)
        values = gather(choice.values, order)
        messages, kept, arriving = self._code.encode_rows(places, values, counts, length, self._capacity(ctx.size))
        sent = order if kept is None else order[kept]
        ctx.count(selected=len(order), left_out=len(order) - len(sent))
        choice.subtract(choice.indices[sent], arriving, None)
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
        # in rank order: devices other than a CPU add the values of one call in any order
        rows = [len(arrived)] if held.is_cpu else counts.tolist()

        def add_to(sums: Tensor) -> None:
            for places, part in zip(arrived.split(rows), values.split(rows), strict=True):
                sums.index_add_(0, places, part)

        with ctx.memory.for_now(held if self.decay in (0, 1) else held * self.decay, arrived) as sums:
            add_to(sums)
            if refusal is None and not gather(sums, arrived).isfinite().all():
                refusal = Refusal(_not_finite(values.split(counts.tolist()), ctx.rank), readable=True)
            places = self._largest(sums, arrived, ctx) if refusal is None else arrived[:0]
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

        def keep() -> None:
            if self.decay != 1:
                held.mul_(self.decay)
            add_to(held)
            subtract_at(held, sent, arriving)

        if self.decay:
            ctx.memory.on_commit(keep)
        return (yield from self._forward(message, refusal, count, ctx))

    def _held(self, ctx: Context) -> Tensor:
        """Return the sums of earlier steps that this rank has not forwarded."""
        sharding = _sharding(ctx)
        if self.decay:
            return ctx.memory.shard(SUMS, sharding, ctx.rank).held
        return torch.zeros(sharding.length, dtype=at_least_float32(ctx.dtype), device=ctx.device)

    def _largest(self, sums: Tensor, arrived: Tensor, ctx: Context) -> Tensor:
        """Return the places of the sums that this rank forwards."""
        if math.isinf(self.keep):
            return arrived.unique()
        count = self._forwarded(ctx.size, len(sums))
        groups: Groups | None = ctx.scratch.get("sums")
        if groups is None or groups.spans != [(0, len(sums), count)]:  # its tables on a GPU are as long as the shard
            groups = ctx.scratch["sums"] = Groups([[(0, len(sums))]], [count], sums.device)
        places = select(sums, block_maxima(sums), groups)
        return places[gather(sums, places) != 0]

    def _forward(self, message: Tensor, refusal: Refusal | None, count: int, ctx: Context) -> GradientExchange:
        """Return the forwarded sums of all owners, on all ranks."""
        gathered = yield from gather_from_owners(message, refusal, ctx)
        places, sums, counts = self._code.decode_rows(
            gathered, count, _sharding(ctx).length, everyone(ctx.rank, ctx.size)
        )
        total = SparseSum()
        positions = of_owners(places, counts, ctx.size)
        total.add_rows(positions, sums.to(at_least_float32(ctx.dtype)) / ctx.divisor, counts)
        return total

    @property
    def _code(self) -> SparseCode:
        return SparseCode("rice", self.code.values)

    def _capacity(self, size: int) -> int:
        """Return the number of coordinates that fit into a message to one owner."""
        return _room(self.count, size)

    def _forwarded(self, size: int, length: int) -> int:
        """Return the number of sums that each owner forwards."""
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
        return 2 * ctx.place.link.latency + received / ctx.place.link.bandwidth + work


@dataclass(frozen=True)
class WholeOwner:
    """Each rank sums one part of all vectors and sends the sum to all ranks: about two messages at any world size.

        s = s + all ranks' messages to this rank, in rank order
        send s;  s = s - decoded(s)

    The rounding error of the sums stays with their owner, apart from its own residual.

    Args:
        code: the code of elements.
    """

    code: ValueCode

    def exchange(self, values: Tensor, ctx: Context) -> GradientExchange:
        chunks = Chunks(ctx.numel, ctx.size)
        rows = values.new_zeros(ctx.size, chunks.length)
        rows.view(-1)[: ctx.numel] = values
        messages, arriving = encode_rows(rows, self.code)
        _subtract_arriving(arriving.view(-1)[: ctx.numel], ctx)
        shard = ctx.memory.shard(SUMS, chunks, ctx.rank)
        received = yield AllToAll(messages)

        sums = shard.held.clone()
        rows, refusal = decode_or_refuse(
            received, lambda rows, ranks: decode_rows(rows, chunks.length, self.code, ranks), ctx
        )
        for row in rows:
            sums += row.to(sums.dtype)
        if refusal is None and not sums.isfinite().all():
            refusal = Refusal(_not_finite(rows, ctx.rank), readable=True)
        message, arriving = encode_rows(sums.unsqueeze(0), self.code)
        left = torch.where(_is_of_parameters(chunks, ctx), sums - arriving[0], 0)
        ctx.memory.on_commit(lambda: setattr(shard, "held", left))
        gathered = yield from gather_from_owners(message[0], refusal, ctx)
        total = decode_rows(gathered, chunks.length, self.code, everyone(ctx.rank, ctx.size), ctx.checks)
        ctx.checks.check_finite(total, total)
        return total.view(-1)[: ctx.numel].to(sums.dtype) / ctx.divisor

    def nbytes(self, ctx: Context) -> int:
        return (ctx.size + 1) * coded_bytes(Chunks(ctx.numel, ctx.size).length, self.code)

    def seconds(self, ctx: Context) -> float:
        length = Chunks(ctx.numel, ctx.size).length
        received = 2 * (ctx.size - 1) * coded_bytes(length, self.code)
        work = _READING_ELEMENT * 2 * ctx.size * length + _CODING
        return 2 * ctx.place.link.latency + received / ctx.place.link.bandwidth + work


@dataclass(frozen=True)
class PartitionReduction:
    """Each rank selects in its share of the coordinates, which changes every step; all ranks send their values there.

    (a) a rank keeps the selected positions in its share; (b) an allgather sends these positions, k/N in the mean, to
    all ranks; (c) an allreduce sums all ranks' values there.

    So about `count` coordinates are applied, with the whole values of all ranks: no residual of an applied coordinate
    stays on other ranks, but a rank waits for its turn to select it. In the manner of ExDyna (Yoon & Oh, "Preserving
    Near-Optimal Gradient Sparsification Cost for Scalable Distributed Deep Learning", CCGRID 2024), without its
    adaptive thresholds; shares are hashed as owners are.

    Args:
        count: number of coordinates that each rank selects; about one in N is in its share.

    Costs one allgather of Rice-coded positions, and one allreduce of `count` values of the parameters' dtype.
    """

    count: int

    def exchange(self, choice: Choice, ctx: Context) -> GradientExchange:
        sharding, capacity = _sharding(ctx), _room(self.count, ctx.size)
        turn = (ctx.rank + ctx.step) % ctx.size
        mine = (sharding.owners(choice.indices) == turn).nonzero().squeeze(1)
        places, values = sharding.places(choice.indices[mine]), choice.values[mine]
        kept, counts = what_fits(places, values, torch.tensor([len(places)]), capacity, sharding.length)
        places = places if kept is None else places[kept]
        ctx.count(selected=len(mine), left_out=len(mine) - len(places))
        gathered = yield AllGather(encode_rice(places, counts, capacity, sharding.length)[0])

        places, counts = decode_rice(gathered, capacity, sharding.length, everyone(ctx.rank, ctx.size))
        turns = ((torch.arange(ctx.size) + ctx.step) % ctx.size).repeat_interleave(counts)
        positions = sharding.positions(places, turns.to(places.device)).sort().values
        if len(positions) and int(positions[-1]) >= ctx.numel:
            raise PayloadError(
                f"rank {ctx.rank}: in bucket {ctx.index}, a rank has selected position {int(positions[-1])} of "
                f"{ctx.numel}: its message was damaged on the way, or that rank runs another model or version"
            )
        summing, sent = ctx.all_reduce(choice.at(positions))
        choice.subtract(positions, sent.to(choice.values.dtype, copy=True), None)  # a copy, as it may be called later
        total = SparseSum()
        if len(positions):
            total.add(positions, (yield summing))
        return total

    def nbytes(self, ctx: Context) -> None:
        return None

    def seconds(self, ctx: Context) -> float:
        rest = 2 * self.count * ctx.dtype.itemsize + ctx.size * rice_bytes(_room(self.count, ctx.size), ctx.numel)
        return 2 * ctx.place.link.latency + rest / ctx.place.link.bandwidth + _READING * self.count


def _not_finite(parts: Iterable[Tensor], owner: int) -> int:
    """Return the first rank with NaN or Inf in its part; the owner, if only its sums do."""
    return next((rank for rank, part in enumerate(parts) if not part.isfinite().all()), owner)


def _room(count: int, size: int) -> int:
    """Return the room in a message for one rank's share, if `count` coordinates fall to `size` ranks at random."""
    mean = count / size
    return min(count, math.ceil(mean + _SIGMAS * math.sqrt(mean * (1 - 1 / size))))


def _sharding(ctx: Context) -> Sharding:
    return Sharding(ctx.numel, ctx.size)


def _is_of_parameters(chunks: Chunks, ctx: Context) -> Tensor:
    """Return a mask of the elements that this rank owns and that belong to a parameter, not to a gap."""
    if "owned" not in ctx.scratch:
        rows = torch.zeros(ctx.size, chunks.length, dtype=torch.bool, device=ctx.device)
        ctx.tensors.clear_gaps(rows.view(-1)[: ctx.numel].fill_(True))
        ctx.scratch["owned"] = rows[ctx.rank]
    return ctx.scratch["owned"]


def _subtract_arriving(arriving: Tensor, ctx: Context) -> None:
    """Subtract decoded values from the residual at commit, and clear the gaps, in which codes leave values."""
    v = ctx.memory["residual"]
    ctx.memory.on_commit(lambda: ctx.tensors.clear_gaps(v.sub_(arriving)))


def sum_of_messages(messages: Tensor, code: SparseCode, count: int, ctx: Context) -> SparseSum:
    """Return the sum of the ranks' coordinates, in rank order, over N. `Context.checks` detect invalid messages."""
    total = SparseSum()
    positions, values = code.receive(messages, count, ctx.numel, range(len(messages)), ctx.checks)
    values = values.to(at_least_float32(ctx.dtype)) / ctx.divisor
    total.add_rows(positions.flatten(), values.flatten(), torch.full((len(messages),), count))
    return total
