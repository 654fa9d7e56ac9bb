"""ByteGrad of Bagua: a scatter-reduce-gather in 8 bits per coordinate."""

from __future__ import annotations

import functools
from dataclasses import dataclass

import torch
from torch import Tensor

from ...coding.minmax import MinMaxUInt8
from ...collectives import AllToAll, everyone
from ...flat.memory import at_least_float32
from ...kernels import Put, mix, put_minmax
from ..base import Compressor, GradientExchange
from ..context import Context
from ..refusal import decode_or_refuse, gather_from_owners

__all__ = ["ByteGrad"]


@dataclass(eq=False)
class ByteGrad(Compressor):
    """Scatter, reduce and gather with the quantiser MinMaxUInt8: a quarter of the bytes at any world size.

    (a) the gradient is split into N chunks, each quantised with its own range, (b) chunk j of every rank goes to rank
    j, its own included, (c) rank j decodes them, sums them in float32, divides by N and quantises the mean,
    (d) all ranks gather the means and decode them.

    Bagua pads a bucket with zeros, which widen the range of their chunk and its error. Here gaps are not sent, and the
    last chunk is padded with copies of its last value. Bagua drops the errors of both roundings; here error feedback
    can keep them. For several ranks per machine, `Hierarchical(ByteGrad())` sends between machines only, as Bagua does
    by default.

    Args:
        error_feedback: True adds rounding errors to the next gradient; the owner of a chunk keeps the error of the
            second rounding. For gradients with magnitudes hundreds of times apart.

    Costs an alltoall of 1 byte per coordinate, an allgather of the same total, and 8 bytes per chunk. Raises
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
        code, ranks = MinMaxUInt8(chunk_length(ctx)), everyone(ctx.rank, ctx.size)
        result = grad.to(at_least_float32(grad.dtype))  # may be overwritten
        v = ctx.add_residual(grad) if self.error_feedback else result
        momentum = ctx.mixture
        if momentum is not None and not lies_in_chunks(ctx):
            mix(result, momentum)
            momentum = None
        messages = code.encode(into_chunks(v, ctx), momentum)
        if self.error_feedback:
            put_chunks(*code.parts(messages, [ctx.rank] * ctx.size, ctx.checks), v, "subtract", ctx)

        arrived = yield AllToAll(messages)
        (ends, codes), refusal = decode_or_refuse(arrived, code.parts, ctx)
        message = code.encode_mean(ends, codes, ctx.divisor)
        if self.error_feedback:
            mean = functools.reduce(torch.add, code.decode_parts(ends, codes)).div_(ctx.divisor)
            error = mean.sub_(code.decode(message, [ctx.rank], ctx.checks)[0]).mul_(ctx.divisor)
            for chunk, place, span in pieces(ctx):
                if chunk == ctx.rank:
                    v[span] += error[place : place + span.stop - span.start]
            ctx.keep_residual(v)

        means = yield from gather_from_owners(message[0], refusal, ctx)
        put_chunks(*code.parts(means, ranks, ctx.checks), result, "set", ctx)
        return result

    def payload_bytes(self, ctx: Context) -> int:
        return (ctx.size + 1) * MinMaxUInt8(chunk_length(ctx)).nbytes


def chunk_length(ctx: Context) -> int:
    """Return the number of coordinates per chunk."""
    return -(-sum(segment.numel for segment in ctx.segments) // ctx.size)


def pieces(ctx: Context) -> list[tuple[int, int, slice]]:
    """Return spans contiguous in both layouts: the chunk, the position in it, and the span of the flat tensor."""
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
    """Return spans of parameters without gaps."""
    found: list[tuple[int, int]] = []
    for segment in ctx.segments:
        first = found.pop()[0] if found and found[-1][1] == segment.start else segment.start
        found.append((first, segment.stop))
    return found


def lies_in_chunks(ctx: Context) -> bool:
    """Return True if the flat tensor equals all chunks in a row: no gaps, and all chunks full."""
    return runs(ctx) == [(0, ctx.size * chunk_length(ctx))]


def into_chunks(flat: Tensor, ctx: Context) -> Tensor:
    """Return the parameters' coordinates as `[size, chunk]`, padded with copies of the last.

    Returns a view of `flat` if it `lies_in_chunks`.
    """
    parts = [flat[start:stop] for start, stop in runs(ctx)]
    if not lies_in_chunks(ctx):
        missing = ctx.size * chunk_length(ctx) - sum(map(len, parts))
        parts = [torch.cat((*parts, parts[-1][-1:].expand(missing)))]
    return parts[0].view(ctx.size, -1)


def put_chunks(ends: Tensor, codes: Tensor, flat: Tensor, how: Put, ctx: Context) -> None:
    """Apply the decoded values of all chunks to the flat tensor, except gaps."""
    for chunk, place, span in pieces(ctx):
        gradient = ctx.mixture and ctx.mixture.within(span.start, span.stop).inverse
        put_minmax(codes[chunk, place : place + span.stop - span.start], ends[chunk], flat[span], how, gradient)


def out_of_chunks(chunks: Tensor, ctx: Context) -> Tensor:
    """Return the flat tensor of `into_chunks`' chunks, with zero gaps."""
    flat, start, values = chunks.new_zeros(ctx.numel), 0, chunks.view(-1)
    for segment in ctx.segments:
        flat[segment.start : segment.stop] = values[start : start + segment.numel]
        start += segment.numel
    return flat
