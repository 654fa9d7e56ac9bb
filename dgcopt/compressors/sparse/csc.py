"""Coarse-grained sparse communication (Sun et al., "GradientFlow", 2019, arXiv:1902.06855)."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from ...collectives import AllReduce
from ...errors import ConfigError
from ...kernels import BLOCK, add_and_norms
from ..base import GradientExchange, Source
from ..context import Context, largest_addend
from .memory import MomentumCorrected
from .schedule import Warmup

__all__ = ["CSC"]


@dataclass(eq=False)
class CSC(MomentumCorrected):
    """Sends the chunks of the gradient with the largest L1 norm over all ranks, by allreduce; the rest stays.

        v = e + u;  L_c = sum over ranks of |v| in chunk c;  all ranks send the k = ceil(ratio * chunks) chunks of
        the largest L_c;  e = v, zero in those chunks

    Here u is the gradient, or for SGD with momentum the corrected one (u <- m u + g, as in DGC), so ratio 1 is dense
    training. All ranks see the same norms; ties go to the first chunk.

    For many ranks and fast links: bytes and work are flat in the world size, and only whole chunks are copied. For slow
    links DGC sends far less.

    Args:
        ratio: fraction of chunks to send, in (0, 1]; raise it if accuracy suffers.
        chunk: largest number of elements per chunk; chunks of a bucket have equal lengths in multiples of 64 and may
            hold several tensors. Smaller selects better, but costs more norms and smaller copies: with the paper's
            32768 a small model has a handful of chunks, and sends only one or two.
        source: send gradients or updates: see `Compressor.source`.
        warmup: ratios of the first steps or epochs; None starts at `ratio`.

    Costs one allreduce of 4 bytes per chunk and one of 4 bytes per selected float32 parameter, in two rounds. Raises
    ConfigError for invalid settings.
    """

    ratio: float = 0.15
    chunk: int = 1024
    source: Source = "auto"
    warmup: Warmup | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.chunk < BLOCK:
            raise ConfigError(f"chunk must be at least {BLOCK} elements, not {self.chunk!r}")

    @property
    def conserves(self) -> bool:
        return True  # apart from momentum, which adds each gradient several times

    def exchange(self, grad: Tensor, ctx: Context) -> GradientExchange:
        own, start = self._memory, self._memory.start(ctx)
        own.correct(grad, ctx.memory.advance("momentum", start) if start else None, own.runs(ctx.segments))
        e, v = ctx.memory.residual()
        norms_of_blocks = add_and_norms(grad, e, 1.0, v)
        chunks, length, count = self._cut(ctx)
        missing = chunks * length // BLOCK - len(norms_of_blocks)  # in the last chunk, which may be shorter
        norms = torch.nn.functional.pad(norms_of_blocks, (0, missing)).view(chunks, -1).sum(1)

        norms.clamp_(max=largest_addend(norms.dtype, ctx.size))  # finite values may have an infinite norm
        norms = yield AllReduce(norms, op="average")  # the order of the sums, without overflow in float16
        ctx.checks.check_finite(norms)
        chosen = norms.sort(descending=True, stable=True).indices[:count].sort().values
        full = ctx.numel // length  # chunks of full length; the rest is a shorter last chunk, or empty
        rows, last = v[: full * length].view(full, length), v[full * length :]
        chosen_rows = chosen[: int((chosen < full).sum())]
        k = len(chosen_rows)
        message = v.new_zeros(count, length)
        torch.index_select(rows, 0, chosen_rows, out=message[:k])
        message[k:, : len(last)] = last
        summing, sent = ctx.all_reduce(message)
        rows.index_add_(0, chosen_rows, sent[:k], alpha=-1)
        last -= sent[k:, : len(last)].sum(0)
        ctx.keep_residual(v)
        arrived = yield summing
        ctx.checks.check_finite(arrived)
        if "result" not in ctx.scratch:
            ctx.scratch["result"] = arrived.new_empty(chunks, length)
        return ctx.scratch["result"].zero_().index_copy_(0, chosen, arrived).view(-1)[: ctx.numel]

    def _cut(self, ctx: Context) -> tuple[int, int, int]:
        """Return the number of chunks in the bucket, their length, and the number to send."""
        chunks = -(-ctx.numel // (self.chunk // BLOCK * BLOCK))
        length = -(-ctx.numel // (chunks * BLOCK)) * BLOCK
        return chunks, length, math.ceil(self.ratio_at(ctx.step) * chunks)

    def payload_bytes(self, ctx: Context) -> int:
        chunks, length, count = self._cut(ctx)
        return chunks * max(ctx.dtype.itemsize, 4) + count * length * ctx.dtype.itemsize
