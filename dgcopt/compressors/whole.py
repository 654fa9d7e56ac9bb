"""How vectors that travel whole, in few bits per element, become one sum: all to all ranks, or by owners."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from ..coding import decode_dense_rows, dense_bytes, encode_dense_rows
from ..collectives import AllGather, AllToAll
from ..flat.shard import Chunks
from .base import GradientExchange
from .context import SUMS, Context, at_least_float32
from .reduction import Reduce, faster
from .refusal import Refusal, decode_or_refuse, heed_refusals

__all__ = ["WholeGather", "WholeOwner", "whole_sum"]

# What a processor takes, as of messages of 50,000 elements: to read one element, and to code once more.
_READING, _CODING = 3e-9, 1e-3


def whole_sum(way: Reduce, kind: str, ctx: Context) -> WholeGather | WholeOwner:
    """What a setting means for vectors; where ranks take turns to choose coordinates, vectors go by owners."""
    ways: dict[str, WholeGather | WholeOwner] = {"gather": WholeGather(kind), "owner": WholeOwner(kind)}
    return faster(ways, ctx) if way == "auto" else ways["owner" if way == "partition" else way]


@dataclass(frozen=True)
class WholeGather:
    """Everyone's message to everyone, by one allgather: what a rank receives and decodes grows with their number.

    Args:
        kind: how elements travel, one of DENSE_CODES.
    """

    kind: str

    def exchange(self, values: Tensor, ctx: Context) -> GradientExchange:
        """The sum over ranks, divided as `ctx.op` says; what arrives is taken from the residual.

        Raises PayloadError for a message that cannot be right.
        """
        message, arriving = encode_dense_rows(values.unsqueeze(0), self.kind)
        _forget(arriving.view(-1), ctx)
        messages = yield AllGather(message[0])
        total = torch.zeros(ctx.numel, dtype=at_least_float32(ctx.dtype), device=ctx.device)
        rows = decode_dense_rows(messages, ctx.numel, self.kind, range(ctx.size), ctx.checks)
        for row in rows:
            total += row.to(total.dtype) / ctx.divisor
        ctx.look_at(total, rows)
        return total

    def nbytes(self, ctx: Context) -> int:
        """Bytes that this rank hands to collectives."""
        return dense_bytes(ctx.numel, self.kind)

    def seconds(self, ctx: Context) -> float:
        """How long an exchange should take over `ctx.link`, but for what both ways have in common."""
        received = (ctx.size - 1) * self.nbytes(ctx)
        return ctx.link.latency + received / ctx.link.bandwidth + _READING * ctx.size * ctx.numel


@dataclass(frozen=True)
class WholeOwner:
    """Each rank adds up one part of all vectors, and sends its sum to all: about twice a message, whatever N is.

        s = s + what ranks have sent me, in rank order
        send s;  s = s minus what arrives

    What rounding the sums loses waits with their owner, apart from its own residual.

    Args:
        kind: how elements travel, one of DENSE_CODES.
    """

    kind: str

    def exchange(self, values: Tensor, ctx: Context) -> GradientExchange:
        """See `WholeGather.exchange`."""
        chunks = Chunks(ctx.numel, ctx.size)
        rows = values.new_zeros(ctx.size, chunks.length)
        rows.view(-1)[: ctx.numel] = values
        messages, arriving = encode_dense_rows(rows, self.kind)
        _forget(arriving.view(-1)[: ctx.numel], ctx)
        shard = ctx.shard(SUMS, chunks)
        received = yield AllToAll(messages)

        sums = shard.held.clone()
        rows, refusal = decode_or_refuse(
            received, lambda rows, ranks: decode_dense_rows(rows, chunks.length, self.kind, ranks), ctx
        )
        for row in rows:
            sums += row.to(sums.dtype)
        if refusal is None and not sums.isfinite().all():
            refusal = Refusal(_not_finite(rows, ctx.rank), readable=True)
        message, arriving = encode_dense_rows(sums.unsqueeze(0), self.kind)
        if refusal is not None:
            refusal.replace(message[0])

        left = torch.where(_is_of_parameters(chunks, ctx), sums - arriving[0], 0)
        ctx.on_commit(lambda: setattr(shard, "held", left))
        gathered = heed_refusals((yield AllGather(message[0])), ctx)
        total = decode_dense_rows(gathered, chunks.length, self.kind, range(ctx.size), ctx.checks)
        ctx.look_at(total, total)
        return total.view(-1)[: ctx.numel].to(sums.dtype) / ctx.divisor

    def nbytes(self, ctx: Context) -> int:
        """See `WholeGather.nbytes`."""
        return (ctx.size + 1) * dense_bytes(Chunks(ctx.numel, ctx.size).length, self.kind)

    def seconds(self, ctx: Context) -> float:
        """See `WholeGather.seconds`."""
        length = Chunks(ctx.numel, ctx.size).length
        received = 2 * (ctx.size - 1) * dense_bytes(length, self.kind)
        work = _READING * 2 * ctx.size * length + _CODING
        return 2 * ctx.link.latency + received / ctx.link.bandwidth + work


def _forget(arriving: Tensor, ctx: Context) -> None:
    """Once the step has succeeded, what arrives waits no more, and nothing of what codes make of gaps does."""
    v = ctx.memory["residual"]
    ctx.on_commit(lambda: ctx.tensors.clear_gaps(v.sub_(arriving)))


def _not_finite(rows: Tensor, owner: int) -> int:
    """Return the first rank whose message holds NaN or Inf; the owner, if only its sums do."""
    return next((rank for rank, row in enumerate(rows) if not row.isfinite().all()), owner)


def _is_of_parameters(chunks: Chunks, ctx: Context) -> Tensor:
    """Which of the elements that this rank owns lie in no gap, and not behind the last parameter."""
    if "owned" not in ctx.scratch:
        rows = torch.zeros(ctx.size, chunks.length, dtype=torch.bool, device=ctx.device)
        ctx.tensors.clear_gaps(rows.view(-1)[: ctx.numel].fill_(True))
        ctx.scratch["owned"] = rows[ctx.rank]
    return ctx.scratch["owned"]
