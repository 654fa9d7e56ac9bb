"""Sums of quantised vectors over ranks: by one allgather, or by owners of their parts."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from ..coding import decode_dense_rows, dense_bytes, encode_dense_rows
from ..collectives import AllGather, AllToAll, everyone
from ..flat.memory import at_least_float32
from ..flat.shard import Chunks
from .base import GradientExchange
from .context import Context
from .reduction import SUMS, Reduce, faster
from .refusal import Refusal, decode_or_refuse, heed_refusals

__all__ = ["WholeGather", "WholeOwner", "whole_sum"]

# Seconds on one core, measured on messages of 50,000 elements: to read one element, and to code one more time.
_READING, _CODING = 3e-9, 1e-3


def whole_sum(way: Reduce, kind: str, ctx: Context) -> WholeGather | WholeOwner:
    """Return the reduction that a setting names. For vectors, "partition" is "owner"."""
    ways: dict[str, WholeGather | WholeOwner] = {"gather": WholeGather(kind), "owner": WholeOwner(kind)}
    return faster(ways, ctx) if way == "auto" else ways["owner" if way == "partition" else way]


@dataclass(frozen=True)
class WholeGather:
    """One allgather of all messages: received bytes and decoding grow with the number of ranks.

    Args:
        kind: the code of elements, one of DENSE_CODES.
    """

    kind: str

    def exchange(self, values: Tensor, ctx: Context) -> GradientExchange:
        """Return the sum over ranks, divided by `ctx.divisor`; subtract the decoded values from the residual.

        Raises PayloadError for an invalid message.
        """
        message, arriving = encode_dense_rows(values.unsqueeze(0), self.kind)
        _forget(arriving.view(-1), ctx)
        messages = yield AllGather(message[0])
        total = torch.zeros(ctx.numel, dtype=at_least_float32(ctx.dtype), device=ctx.device)
        rows = decode_dense_rows(messages, ctx.numel, self.kind, everyone(ctx.rank, ctx.size), ctx.checks)
        for row in rows:
            total += row.to(total.dtype) / ctx.divisor
        ctx.checks.look_at(total, rows)
        return total

    def nbytes(self, ctx: Context) -> int:
        """Return the payload bytes of this rank."""
        return dense_bytes(ctx.numel, self.kind)

    def seconds(self, ctx: Context) -> float:
        """Return the estimated time of an exchange over the link, without the parts that both reductions share."""
        received = (ctx.size - 1) * self.nbytes(ctx)
        return ctx.place.link.latency + received / ctx.place.link.bandwidth + _READING * ctx.size * ctx.numel


@dataclass(frozen=True)
class WholeOwner:
    """Each rank sums one part of all vectors and sends the sum to all ranks: about two messages at any world size.

        s = s + all ranks' messages to this rank, in rank order
        send s;  s = s - decoded(s)

    The rounding error of the sums stays with their owner, apart from its own residual.

    Args:
        kind: the code of elements, one of DENSE_CODES.
    """

    kind: str

    def exchange(self, values: Tensor, ctx: Context) -> GradientExchange:
        """See `WholeGather.exchange`."""
        chunks = Chunks(ctx.numel, ctx.size)
        rows = values.new_zeros(ctx.size, chunks.length)
        rows.view(-1)[: ctx.numel] = values
        messages, arriving = encode_dense_rows(rows, self.kind)
        _forget(arriving.view(-1)[: ctx.numel], ctx)
        shard = ctx.memory.shard(SUMS, chunks, ctx.rank)
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
        ctx.memory.on_commit(lambda: setattr(shard, "held", left))
        gathered = heed_refusals((yield AllGather(message[0])), ctx)
        total = decode_dense_rows(gathered, chunks.length, self.kind, everyone(ctx.rank, ctx.size), ctx.checks)
        ctx.checks.look_at(total, total)
        return total.view(-1)[: ctx.numel].to(sums.dtype) / ctx.divisor

    def nbytes(self, ctx: Context) -> int:
        """See `WholeGather.nbytes`."""
        return (ctx.size + 1) * dense_bytes(Chunks(ctx.numel, ctx.size).length, self.kind)

    def seconds(self, ctx: Context) -> float:
        """See `WholeGather.seconds`."""
        length = Chunks(ctx.numel, ctx.size).length
        received = 2 * (ctx.size - 1) * dense_bytes(length, self.kind)
        work = _READING * 2 * ctx.size * length + _CODING
        return 2 * ctx.place.link.latency + received / ctx.place.link.bandwidth + work


def _forget(arriving: Tensor, ctx: Context) -> None:
    """Subtract decoded values from the residual at commit, and clear the gaps, in which codes leave values."""
    v = ctx.memory["residual"]
    ctx.memory.on_commit(lambda: ctx.tensors.clear_gaps(v.sub_(arriving)))


def _not_finite(rows: Tensor, owner: int) -> int:
    """Return the first rank with NaN or Inf in its message; the owner, if only its sums do."""
    return next((rank for rank, row in enumerate(rows) if not row.isfinite().all()), owner)


def _is_of_parameters(chunks: Chunks, ctx: Context) -> Tensor:
    """Return a mask of the elements that this rank owns and that belong to a parameter, not to a gap."""
    if "owned" not in ctx.scratch:
        rows = torch.zeros(ctx.size, chunks.length, dtype=torch.bool, device=ctx.device)
        ctx.tensors.clear_gaps(rows.view(-1)[: ctx.numel].fill_(True))
        ctx.scratch["owned"] = rows[ctx.rank]
    return ctx.scratch["owned"]
