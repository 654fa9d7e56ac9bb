"""1-bit Adam (Tang et al., ICML 2021)."""

from __future__ import annotations

import torch
from torch import Tensor

from ..coding.bits import pack_small, packed_bytes, unpack_small
from ..coding.scaled import decode_scaled, encode_scaled, scaled_bytes
from ..coding.values import finite
from ..collectives import AllGather, AllToAll
from ..flat.segments import BLOCK
from .base import Compressor, GradientExchange
from .context import Context
from .frozen_adam import FrozenAdam

__all__ = ["OneBitAdam", "OneBitReduce"]


class OneBitAdam(FrozenAdam):
    """Adam for `warmup_steps` on whole gradients; then its variance is frozen, and its momentum travels in one bit.

    The rule is that of `FrozenAdam`; momentum travels as `OneBitReduce` has it, with the error of both its roundings
    fed back. For Adam on slow links, where v settles early.

    Args:
        warmup_steps: T; the paper takes 15 to 25% of all steps. More if the loss jumps when it is over.
        inner: how momentum travels; None is OneBitReduce(). `Hierarchical(OneBitReduce())` for several ranks on a
            machine.

    Costs 2 bits per parameter and few bytes per tensor, at any number of ranks, after T steps at 4 bytes. Raises what
    `FrozenAdam` does, and PayloadError for a damaged message. Source: Tang et al., "1-bit Adam: Communication Efficient
    Large-Scale Training with Adam's Convergence Speed", ICML 2021, arXiv:2102.02888, algorithm 1.
    """

    def __init__(self, warmup_steps: int = 100, inner: Compressor | None = None) -> None:
        super().__init__(warmup_steps, OneBitReduce() if inner is None else inner)


class OneBitReduce(Compressor):
    """The mean of signs, rounded to signs again: the error of both roundings is fed back.

        worker:  v = g + e;  send C(v);  e = v - C(v)
        server:  u = mean of the workers' C(v) + d;  send C(u);  d = u - C(u)

    C(v) is the sign of v times the mean |v| of its tensor, with which the error is never longer than v. In
    the paper it has the length of v instead, with which the error may grow where few coordinates are large.

    Rank r is the server of the r-th part of a bucket. If buckets are laid out anew, what it held back for a part that
    it no longer serves is sent with its own v. Costs an alltoall and an allgather of 1 bit per coordinate each and 4
    bytes for each tensor and rank. Raises PayloadError for a damaged message.
    """

    conserves = True

    def exchange(self, grad: Tensor, ctx: Context) -> GradientExchange:
        length = chunk_length(ctx)
        own = slice(min(ctx.rank * length, ctx.numel), min((ctx.rank + 1) * length, ctx.numel))
        held = ctx.hold("residual of the server")  # of the sum over ranks
        v = ctx.add_residual(grad).add_(held)
        v[own] -= held[own]

        scales, signs = tensor_scales(v, ctx), pack_small((padded(v, ctx) < 0).to(torch.uint8), 1)
        messages = torch.stack([encode_scaled(scales, part) for part in signs.view(ctx.size, -1)])
        v -= torch.cat([decoded(message, place, ctx, ctx.rank) for place, message in enumerate(messages)])[: ctx.numel]
        ctx.keep_residual(v)
        arrived = yield AllToAll(messages)

        u = torch.zeros(ctx.numel, dtype=v.dtype, device=v.device)
        for rank, message in enumerate(arrived):
            u[own] += decoded(message, ctx.rank, ctx, rank)[: own.stop - own.start]
        u[own] += held[own]
        ctx.tensors.clear_gaps(u)
        u /= ctx.divisor
        signs = pack_small((padded(u, ctx) < 0).to(torch.uint8), 1).view(ctx.size, -1)[ctx.rank]
        message = encode_scaled(tensor_scales(u, ctx, own), signs)
        left = torch.zeros_like(u)
        left[own] = (u[own] - decoded(message, ctx.rank, ctx, ctx.rank)[: own.stop - own.start]) * ctx.divisor
        ctx.tensors.clear_gaps(left)
        ctx.once_settled(lambda: held.copy_(left))

        means = yield AllGather(message)
        return torch.cat([decoded(theirs, rank, ctx, rank) for rank, theirs in enumerate(means)])[: ctx.numel]

    def payload_bytes(self, ctx: Context) -> int:
        return (ctx.size + 1) * scaled_bytes(len(ctx.segments), packed_bytes(chunk_length(ctx), 1))


def chunk_length(ctx: Context) -> int:
    """The N-th part of a bucket, in whole blocks, each of which belongs to one tensor."""
    return -(-ctx.numel // (BLOCK * ctx.size)) * BLOCK


def padded(flat: Tensor, ctx: Context) -> Tensor:
    """`flat` with zeros behind, N chunks long."""
    return torch.nn.functional.pad(flat, (0, ctx.size * chunk_length(ctx) - len(flat)))


def tensor_scales(v: Tensor, ctx: Context, within: slice = slice(None)) -> Tensor:
    """The mean magnitude of each tensor `within` a part outside of which `v` is zero."""
    ones = torch.zeros_like(v)
    ones[within] = 1
    ctx.tensors.clear_gaps(ones)
    return finite(ctx.tensors.sum(v.abs()) / ctx.tensors.sum(ones).clamp(min=1))


def decoded(message: Tensor, place: int, ctx: Context, rank: int) -> Tensor:
    """What `rank` says of the chunk at `place`."""
    length = chunk_length(ctx)
    scales, fields = decode_scaled(message, len(ctx.segments), packed_bytes(length, 1), rank)
    if "tensor of block" not in ctx.scratch:
        numbers = ctx.tensors.spread(torch.arange(len(ctx.segments), device=scales.device))
        ctx.scratch["tensor of block"] = padded(numbers, ctx)[::BLOCK]
    of_block = ctx.scratch["tensor of block"][place * length // BLOCK : (place + 1) * length // BLOCK]
    magnitudes = scales[of_block].repeat_interleave(BLOCK)
    return torch.where(unpack_small(fields, length, 1).bool(), -magnitudes, magnitudes)
