"""How coordinates that every rank has chosen for itself become one sum: all to all ranks, or by owners."""

from __future__ import annotations

import logging
import math
from dataclasses import dataclass
from typing import Literal, Protocol, TypeAlias

import torch
from torch import Tensor

from ..coding import SparseCode
from ..collectives import AllGather, AllReduce, AllToAll
from ..errors import ConfigError
from ..flat.gradient import SparseSum
from ..flat.shard import Sharding
from ..kernels import Groups, block_maxima, gather, select, subtract_at
from .base import GradientExchange
from .context import Context, at_least_float32

__all__ = ["Gather", "Owner", "Reduce", "Reduction", "check_reduce", "reduction", "sum_of_messages"]

Reduce: TypeAlias = Literal["gather", "owner", "auto"]
"""Whether every rank hears all that others have chosen, or only the largest sums of it from the ranks that own them.

"auto" is the one that should be faster: see `Reduction.seconds`.
"""

log = logging.getLogger("dgcopt")

SUMS = "residual of the owner"
"""The memory of owners: what they have been sent and have not forwarded."""

# What a processor takes, as bench_reduce.py has it: to read one coordinate of a message, to pass over one place of an
# owner's share, and to code and read a bucket's messages one time more.
_READING, _PASSING, _CODING = 20e-9, 2e-9, 1e-3

_SIGMAS = 2  # of the coordinates that fall to one owner at random, less than 1% find no room then


class Reduction(Protocol):
    """What becomes of the coordinates that each rank has chosen.

    Attributes: `count`, how many a rank may choose.
    """

    @property
    def count(self) -> int: ...

    def encode(self, indices: Tensor, values: Tensor, ctx: Context) -> tuple[Tensor, Tensor, Tensor]:
        """What this rank sends of its choice (int64, ascending): the message, the indices that are in it, and their
        values as they arrive, which its residual loses."""

    def exchange(self, message: Tensor, ctx: Context) -> GradientExchange:
        """The sum over ranks, divided as `ctx.op` says. Raises PayloadError for a message that cannot be right."""

    def nbytes(self, ctx: Context) -> int | None:
        """Bytes that this rank hands to collectives; None if data decide."""

    def seconds(self, ctx: Context) -> float:
        """How long an exchange of this bucket should take over `ctx.link`, but for what all ways have in common."""


def reduction(
    way: Reduce, code: SparseCode, count: int, ctx: Context, keep: float = 1.0, decay: float = 1.0
) -> Reduction:
    """What a setting means for `count` coordinates of each rank, at most; the others are `Owner`'s."""
    ways: dict[str, Reduction] = {"gather": Gather(code, count), "owner": Owner(code, count, keep, decay)}
    if way != "auto":
        return ways[way]
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
    if way not in ("gather", "owner", "auto"):
        raise ConfigError(f'reduce must be "gather", "owner" or "auto", not {way!r}')
    if isinstance(keep, bool) or not isinstance(keep, int | float) or not keep > 0:
        raise ConfigError(f"keep must be a positive number, 1.0 for as many as a rank selects, not {keep!r}")


@dataclass(frozen=True)
class Gather:
    """Everyone's message to everyone, by one allgather: what a rank receives and decodes grows with their number."""

    code: SparseCode
    count: int

    def encode(self, indices: Tensor, values: Tensor, ctx: Context) -> tuple[Tensor, Tensor, Tensor]:
        message, sent, arriving = self.code.encode(indices, values, ctx.numel)
        ctx.count(selected=len(indices), left_out=len(indices) - len(sent))
        return message, sent, arriving

    def exchange(self, message: Tensor, ctx: Context) -> GradientExchange:
        if "residual" in ctx.memory and (SUMS in ctx.memory or SUMS in ctx.shards):
            ctx.hand_back(SUMS)  # the ranks had owners until now
        return sum_of_messages((yield AllGather(message)), self.code, self.count, ctx)

    def nbytes(self, ctx: Context) -> int:
        return self.code.nbytes(self.count, ctx.numel)

    def seconds(self, ctx: Context) -> float:
        received = (ctx.size - 1) * self.nbytes(ctx)
        return ctx.link.latency + received / ctx.link.bandwidth + _READING * ctx.size * self.count


@dataclass(frozen=True)
class Owner:
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

    def encode(self, indices: Tensor, values: Tensor, ctx: Context) -> tuple[Tensor, Tensor, Tensor]:
        sharding = _sharding(ctx)
        owners = sharding.owners(indices)
        order = owners.argsort(stable=True)
        indices, counts = indices[order], torch.bincount(owners, minlength=ctx.size).cpu()
        messages, kept, arriving = self._code.encode_rows(
            sharding.places(indices), values[order], counts, sharding.length, self._capacity(ctx.size)
        )
        sent, order = (indices if kept is None else indices[kept]).sort()
        ctx.count(selected=len(indices), left_out=len(indices) - len(sent))
        return messages, sent, arriving[order]

    def exchange(self, message: Tensor, ctx: Context) -> GradientExchange:
        sharding, code = _sharding(ctx), self._code
        sums = self._waiting(sharding, ctx)
        received = yield AllToAll(message)
        arrived, values, counts = code.decode_rows(received, self._capacity(ctx.size), sharding.length, range(ctx.size))
        values = values.to(sums.dtype)
        # in rank order: a device other than a CPU adds what one call brings in any order
        rows = [len(arrived)] if sums.is_cpu else counts.tolist()
        for places, part in zip(arrived.split(rows), values.split(rows), strict=True):
            sums.index_add_(0, places, part)
        if math.isinf(self.keep):
            places = arrived.unique()
            chosen = gather(sums, places)
            count = int((yield AllReduce(torch.tensor([len(places)], device=sums.device), op="max")))
        else:
            count = self._forwarded(ctx.size, sharding.length)
            places = select(sums, block_maxima(sums), Groups([[(0, len(sums))]], [count], sums.device))
            chosen = gather(sums, places)
            places, chosen = places[chosen != 0], chosen[chosen != 0]
        message, sent, arriving = code.encode(places, chosen, sharding.length, count)
        subtract_at(sums, sent, arriving)
        return (yield from self._forward(message, count, sharding, ctx))

    def _waiting(self, sharding: Sharding, ctx: Context) -> Tensor:
        """What this rank has been sent in earlier steps, to be changed; it is kept once the step has succeeded."""
        if not self.decay:
            return torch.zeros(sharding.length, dtype=at_least_float32(ctx.dtype), device=ctx.device)
        shard = ctx.shard(SUMS, sharding)
        sums = torch.mul(shard.held, self.decay, out=ctx.scratch.pop(SUMS, None))

        def keep() -> None:
            ctx.scratch[SUMS], shard.held = shard.held, sums

        ctx.once_settled(keep)
        return sums

    def _forward(self, message: Tensor, count: int, sharding: Sharding, ctx: Context) -> GradientExchange:
        """What all owners forward, on all ranks."""
        gathered = yield AllGather(message)
        places, sums, counts = self._code.decode_rows(gathered, count, sharding.length, range(ctx.size))
        owners = torch.arange(ctx.size).repeat_interleave(counts).to(places.device)
        ascending, order = sharding.positions(places, owners).sort()
        total = SparseSum()
        total.add(ascending, sums[order].to(at_least_float32(ctx.dtype)) / ctx.divisor)
        return total

    @property
    def _code(self) -> SparseCode:
        return SparseCode("rice", self.code.values)

    def _capacity(self, size: int) -> int:
        """For how many coordinates a message to one owner has room."""
        mean = self.count / size
        return min(self.count, math.ceil(mean + _SIGMAS * math.sqrt(mean * (1 - 1 / size))))

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


def _sharding(ctx: Context) -> Sharding:
    return Sharding(ctx.numel, ctx.size)


def sum_of_messages(messages: Tensor, code: SparseCode, count: int, ctx: Context) -> SparseSum:
    """The ranks' coordinates, in rank order, divided by N. Raises PayloadError for a message that cannot be right."""
    total = SparseSum()
    positions, values, counts = code.decode_rows(messages, count, ctx.numel, range(len(messages)))
    values = values.to(at_least_float32(ctx.dtype)) / ctx.divisor
    for part in zip(positions.split(counts.tolist()), values.split(counts.tolist()), strict=True):
        total.add(*part)
    return total
