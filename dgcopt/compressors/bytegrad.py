"""ByteGrad of Bagua: 8 bits per coordinate, summed where they meet."""

from __future__ import annotations

import functools
from dataclasses import dataclass

import torch
from torch import Tensor

from ..coding.minmax import MinMaxUInt8
from ..collectives import AllGather, AllToAll
from ..kernels import Put, mix, put_minmax
from .base import Compressor, GradientExchange
from .context import Context, at_least_float32

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

    @property
    def mixes(self) -> bool:
        return not self.error_feedback

    def exchange(self, grad: Tensor, ctx: Context) -> GradientExchange:
        code, ranks = MinMaxUInt8(chunk_length(ctx)), range(ctx.size)
        result = grad.to(at_least_float32(grad.dtype))  # may be overwritten
        v = ctx.add_residual(grad) if self.error_feedback else result
        momentum = ctx.mixture
        if momentum is not None and not lies_in_chunks(ctx):
            mix(result, momentum)
            momentum = None
        messages = code.encode(into_chunks(v, ctx), momentum)
        if self.error_feedback:
            put_chunks(*code.parts(messages, [ctx.rank] * ctx.size), v, "subtract", ctx)

        arrived = yield AllToAll(messages)
        ends, codes = code.parts(arrived, ranks)
        message = code.encode_mean(ends, codes, ctx.divisor)
        if self.error_feedback:
            mean = functools.reduce(torch.add, code.decode(arrived, ranks)).div_(ctx.divisor)
            error = mean.sub_(code.decode(message, [ctx.rank])[0]).mul_(ctx.divisor)
            for chunk, place, span in pieces(ctx):
                if chunk == ctx.rank:
                    v[span] += error[place : place + span.stop - span.start]
            ctx.keep_residual(v)

        means = yield AllGather(message[0])
        put_chunks(*code.parts(means, ranks), result, "set", ctx)
        return result

    def payload_bytes(self, ctx: Context) -> int:
        return (ctx.size + 1) * MinMaxUInt8(chunk_length(ctx)).nbytes


def chunk_length(ctx: Context) -> int:
    """The N-th part of all coordinates."""
    return -(-sum(segment.numel for segment in ctx.segments) // ctx.size)


def pieces(ctx: Context) -> list[tuple[int, int, slice]]:
    """What lies together both in the flat tensor and in a chunk: the chunk, where in it, and the span of the tensor."""
    if "pieces" not in ctx.scratch:
        found, length, done = [], chunk_length(ctx), 0
        for start, stop in runs(ctx):
            while start < stop:
                chunk, place = divmod(done, length)
                end = min(stop, start + length - place)
                found.append((chunk, place, slice(start, end)))
                done, start = done + end - start, end
        ctx.scratch["pieces"] = found
    return ctx.scratch["pieces"]


def runs(ctx: Context) -> list[tuple[int, int]]:
    """Spans of parameters without gaps between them."""
    found: list[tuple[int, int]] = []
    for segment in ctx.segments:
        first = found.pop()[0] if found and found[-1][1] == segment.start else segment.start
        found.append((first, segment.stop))
    return found


def lies_in_chunks(ctx: Context) -> bool:
    """Whether a flat tensor is all chunks, one after another: it has no gaps, and all chunks are full."""
    return runs(ctx) == [(0, ctx.size * chunk_length(ctx))]


def into_chunks(flat: Tensor, ctx: Context) -> Tensor:
    """The parameters' coordinates, one after another, as `[size, chunk]`; filled up with copies of the last.

    It is `flat` itself where that `lies_in_chunks`.
    """
    parts = [flat[start:stop] for start, stop in runs(ctx)]
    if not lies_in_chunks(ctx):
        missing = ctx.size * chunk_length(ctx) - sum(map(len, parts))
        parts = [torch.cat((*parts, parts[-1][-1:].expand(missing)))]
    return parts[0].view(ctx.size, -1)


def put_chunks(ends: Tensor, codes: Tensor, flat: Tensor, how: Put, ctx: Context) -> None:
    """Let what all chunks' ends and codes stand for take effect on the flat tensor; gaps stay."""
    for chunk, place, span in pieces(ctx):
        gradient = ctx.mixture and ctx.mixture.within(span.start, span.stop).inverse
        put_minmax(codes[chunk, place : place + span.stop - span.start], ends[chunk], flat[span], how, gradient)


def out_of_chunks(chunks: Tensor, ctx: Context) -> Tensor:
    """The flat tensor that `into_chunks` took apart, zero between parameters."""
    flat, start, values = chunks.new_zeros(ctx.numel), 0, chunks.view(-1)
    for segment in ctx.segments:
        flat[segment.start : segment.stop] = values[start : start + segment.numel]
        start += segment.numel
    return flat
