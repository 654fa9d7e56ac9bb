"""The allreduce of 1-bit Adam: signs to servers, and signs back (Tang et al., ICML 2021)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from ...coding import Checks, read_checks
from ...coding.scaled import decode_scaled, encode_scaled, scaled_bytes
from ...coding.values import packed_bytes
from ...collectives import AllToAll, everyone
from ...flat.shard import Chunks
from ...kernels import BLOCK, LARGEST, put_signs, split_sum, split_sum_of_signs, tensor_sums
from ..base import Compressor, GradientExchange
from ..context import Context
from ..refusal import decode_or_refuse, gather_from_owners

__all__ = ["OneBitReduce"]


@dataclass(eq=False)
class OneBitReduce(Compressor):
    """The mean of signs, rounded to signs again, with error feedback for both roundings.

        worker:  v = g + e;  send C(v);  e = v - C(v)
        server:  u = sum of the workers' C(v) + d;  send C(u) / N;  d = u - C(u)

    C(v) is the sign of v times the mean |v| of its tensor, so the norm of the error is at most that of v. In the paper
    C(v) has the norm of v, and the error may grow if few coordinates are large.

    Rank r is the server of the r-th part of a bucket. After a new layout, its server residual of parts that it no
    longer serves is sent with its own v. For many ranks, where the allgather of `OneBit` is large, and for the outer
    gradients of `DiLoCo` (docs/frontier.md).

    Costs an alltoall and an allgather of 1 bit per coordinate each, and 4 bytes per tensor and rank. Raises
    PayloadError for a damaged message. Source: Tang et al., "1-bit Adam: Communication Efficient Large-Scale Training
    with Adam's Convergence Speed", ICML 2021, arXiv:2102.02888, algorithm 1 without Adam.
    """

    conserves, mixes = True, True

    def exchange(self, grad: Tensor, ctx: Context) -> GradientExchange:
        chunks, place = chunks_of(ctx), ctx.tensors.of_block
        own, nbytes = chunks.part(ctx.rank), packed_bytes(chunks.length, 1)
        owned, (residual, v) = Owned.of(ctx, own), ctx.memory.residual()
        held, left = ctx.memory.advance("residual of the server")  # of the sum over ranks
        result = grad.to(v.dtype)  # may be overwritten

        signs, sums = split_sum(result, residual, v, ctx.mixture)
        scales = mean_magnitudes(sums, place, ctx.tensors.numels)
        put_signs(signs, scales, scales, place, v, "subtract")
        ctx.keep_residual(v)
        signs = filled_up(signs, ctx.size * nbytes)
        head = encode_scaled(scales, signs[:0]).expand(ctx.size, -1)
        arrived = yield AllToAll(torch.cat((head, signs.view(ctx.size, -1)), 1))

        u = left[own]
        decoded, refusal = decode_or_refuse(arrived, lambda rows, ranks: decode_rows(rows, ctx, ranks), ctx)
        magnitudes, theirs = zip(*decoded, strict=True)
        signs, sums = split_sum_of_signs(held[own], theirs, torch.stack(magnitudes), owned.place, owned.lengths, u)
        scales = mean_magnitudes(sums, owned.place, owned.numels * ctx.divisor)
        put_signs(signs, scales * ctx.divisor, scales * ctx.divisor, owned.place, u, "subtract")
        u[owned.gaps] = 0
        signs = filled_up(signs, nbytes)

        means = yield from gather_from_owners(encode_scaled(scales, signs), refusal, ctx)
        for rank, message in zip(everyone(ctx.rank, ctx.size), means, strict=True):
            part = chunks.part(rank)
            scales, signs = decode(message, ctx, rank, ctx.checks)
            gradient = ctx.mixture and ctx.mixture.within(part.start, part.stop).inverse
            by_tensor = (scales, scales, place[part.start // BLOCK : part.stop // BLOCK])
            put_signs(signs, *by_tensor, result[part], "set", gradient)
        return result

    def payload_bytes(self, ctx: Context) -> int:
        return (ctx.size + 1) * scaled_bytes(len(ctx.segments), packed_bytes(chunks_of(ctx).length, 1))


def chunks_of(ctx: Context) -> Chunks:
    """Return the parts that ranks serve."""
    return Chunks(ctx.numel, ctx.size)


@dataclass(frozen=True)
class Owned:
    """The part that this rank serves: each block's tensor, elements per tensor (at least 1) and block, and its gaps."""

    place: Tensor
    numels: Tensor
    lengths: Tensor
    gaps: Tensor

    @classmethod
    def of(cls, ctx: Context, own: slice) -> Owned:
        if "owned" not in ctx.scratch:
            hand_over(ctx, own)
            ones = torch.ones(ctx.numel, dtype=torch.float32, device=ctx.tensors.numels.device)
            ctx.tensors.clear_gaps(ones)
            gaps = (ones[own] == 0).nonzero().squeeze(1)
            lengths = ones[own].view(-1, BLOCK).sum(1).long()
            ones[: own.start], ones[own.stop :] = 0, 0
            place = ctx.tensors.of_block[own.start // BLOCK : own.stop // BLOCK]
            ctx.scratch["owned"] = cls(place, ctx.tensors.sum(ones).clamp(min=1), lengths, gaps)
        return ctx.scratch["owned"]


def hand_over(ctx: Context, own: slice) -> None:
    """Add the server residual of parts that this rank does not serve to its own v; valid in a commit and an abort."""
    residual, held = ctx.memory.hold("residual"), ctx.memory.hold("residual of the server")
    for elsewhere in (slice(0, own.start), slice(own.stop, ctx.numel)):
        residual[elsewhere] += held[elsewhere]
        held[elsewhere] = 0


def filled_up(signs: Tensor, nbytes: int) -> Tensor:
    """Pad to the number of bytes that every rank sends; the last ranks' may be empty."""
    return signs if len(signs) == nbytes else torch.nn.functional.pad(signs, (0, nbytes - len(signs)))


def mean_magnitudes(sums: Tensor, place: Tensor, numels: Tensor) -> Tensor:
    """Return the mean magnitude of each tensor, as sent."""
    above, below, _ = tensor_sums(sums, place, len(numels))
    return ((above + below) / numels).float().clamp_(max=LARGEST)


def decode(message: Tensor, ctx: Context, rank: int, checks: Checks) -> tuple[Tensor, Tensor]:
    """Return the scale of each tensor and the signs of one part."""
    return decode_scaled(message, len(ctx.segments), packed_bytes(chunks_of(ctx).length, 1), rank, checks)


def decode_rows(messages: Tensor, ctx: Context, ranks: Sequence[int]) -> list[tuple[Tensor, Tensor]]:
    """Decode the messages of several ranks as `decode` does, and read their checks at once."""
    checks = Checks()
    decoded = [decode(message, ctx, rank, checks) for message, rank in zip(messages, ranks, strict=True)]
    read_checks([checks])
    return decoded
