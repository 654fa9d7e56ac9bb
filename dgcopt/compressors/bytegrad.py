"""ByteGrad of Bagua: 8 bits per coordinate, summed where they meet."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from ..coding.minmax import MinMaxUInt8
from ..collectives import AllGather, AllToAll, reduce_rows
from .base import Compressor, GradientExchange
from .context import Context

__all__ = ["ByteGrad"]


@dataclass(eq=False)
class ByteGrad(Compressor):
    """A quarter of the bytes at any number of ranks: scatter, reduce, gather, by the quantiser MinMaxUInt8.

    (a) the gradient is split into N chunks, each quantised with its own range, (b) chunk j of every rank goes to rank
    j, its own included, (c) which decodes them, adds them up in float32, divides by N and quantises the mean anew,
    (d) all ranks gather the means and decode them.

    Where Bagua pads a bucket with zeros, which widen the range of the chunk that they are in and so its error, here
    only parameters count: gaps between them do not travel and the last chunk ends in copies of its last value. Bagua
    drops the error of both roundings; here error feedback may keep them. For several ranks on a machine
    `Hierarchical(ByteGrad())` sends between machines only, as Bagua does by default.

    Args:
        error_feedback: True adds what rounding loses to the next gradient; of the second rounding, the owner of the
            chunk keeps the error of all. For gradients of which some are hundreds of times smaller than others.

    Costs an alltoall of 1 byte per coordinate and an allgather of as many in all; 8 bytes per chunk. Raises
    PayloadError for a damaged message. Source: `ByteGradAlgorithm` of BaguaSys/bagua; Gan et al., "BAGUA: Scaling up
    Distributed Learning with System Relaxations", VLDB 2022.
    """

    error_feedback: bool = False

    @property
    def conserves(self) -> bool:
        return self.error_feedback

    def exchange(self, grad: Tensor, ctx: Context) -> GradientExchange:
        code, ranks = MinMaxUInt8(chunk_length(ctx)), range(ctx.size)
        v = ctx.add_residual(grad) if self.error_feedback else grad
        chunks = into_chunks(v, ctx)
        messages = code.encode(chunks)
        left = chunks - code.decode(messages, [ctx.rank] * ctx.size) if self.error_feedback else None

        arrived = yield AllToAll(messages)
        mean = reduce_rows(code.decode(arrived, ranks), "sum").unsqueeze(0) / ctx.divisor
        message = code.encode(mean)
        if left is not None:
            left[ctx.rank] += (mean - code.decode(message, [ctx.rank]))[0] * ctx.divisor
            ctx.keep_residual(out_of_chunks(left, ctx))

        means = yield AllGather(message[0])
        return out_of_chunks(code.decode(means, ranks), ctx)

    def payload_bytes(self, ctx: Context) -> int:
        return (ctx.size + 1) * MinMaxUInt8(chunk_length(ctx)).nbytes


def chunk_length(ctx: Context) -> int:
    """The N-th part of all coordinates."""
    return -(-sum(segment.numel for segment in ctx.segments) // ctx.size)


def into_chunks(flat: Tensor, ctx: Context) -> Tensor:
    """The parameters' coordinates, one after another, as `[size, chunk]`; filled up with copies of the last."""
    parts = [flat[segment.start : segment.stop] for segment in ctx.segments]
    missing = ctx.size * chunk_length(ctx) - sum(map(len, parts))
    return torch.cat((*parts, parts[-1][-1:].expand(missing))).view(ctx.size, -1)


def out_of_chunks(chunks: Tensor, ctx: Context) -> Tensor:
    """The flat tensor that `into_chunks` took apart, zero between parameters."""
    flat, start, values = chunks.new_zeros(ctx.numel), 0, chunks.view(-1)
    for segment in ctx.segments:
        flat[segment.start : segment.stop] = values[start : start + segment.numel]
        start += segment.numel
    return flat
