"""Cyclic local top-k (Chen et al., "ScaleCom", NeurIPS 2020, arXiv:2104.11125)."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from ...coding import decode_rice, encode_rice, rice_bytes, what_fits
from ...collectives import Broadcast
from ...errors.checks import check_fraction
from ...flat.gradient import SparseSum
from ...kernels import add_and_maxima, gather, subtract_at
from ..base import GradientExchange, Source
from ..context import Context
from .schedule import ScheduledRatio, Selection, Warmup

__all__ = ["CLTK"]


@dataclass(eq=False)
class CLTK(ScheduledRatio):
    """Ranks take turns to select indices for all: a broadcast of indices, then an allreduce of values.

        v = e + g;  rank (step mod N) finds the k = ceil(ratio * n) largest of its |v| in each tensor;
        every rank sends its v there;  e = (1 - beta) * e + beta * (v - sent)

    Bytes are flat in the world size, unlike TopK and DGC. It relies on similar residuals on all ranks; a small beta
    (the paper's low-pass filter) keeps them similar.

    For many ranks. With two ranks TopK sends little more and selects better.

    Args:
        ratio: fraction of coordinates to send, in (0, 1]; raise it if accuracy suffers.
        beta: update rate of the residual, in (0, 1]; 1 is plain error feedback. Smaller is for large batches and high
            learning rates, at which ranks' residuals drift apart; below 1 part of the gradient is lost.
        source: send gradients or updates: see `Compressor.source`.
        warmup: ratios of the first steps or epochs; None starts at `ratio`.

    Costs one broadcast of 11.5 bits (at 0.1%; 8 at 1%) and one allreduce of 4 bytes per selected coordinate of
    float32, in two rounds. If the leader's clustered indices exceed the code's capacity, the smallest
    values stay in the residual. Raises ConfigError for invalid settings, PayloadError for a damaged message.
    """

    ratio: float = 0.01
    beta: float = 1.0
    source: Source = "auto"
    warmup: Warmup | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        self.beta = check_fraction(self.beta, "beta")

    @property
    def conserves(self) -> bool:
        return self.beta == 1

    def selection(self, ctx: Context) -> Selection:
        """Return the selection of the largest coordinates of this bucket."""
        return self.chooser(ctx, lambda ratio: Selection(ctx.segments, ratio))

    def exchange(self, grad: Tensor, ctx: Context) -> GradientExchange:
        e, v = ctx.memory.residual()
        maxima = add_and_maxima(grad, e, 1.0, v)
        leader, count = ctx.step % ctx.size, self.selection(ctx).count
        choice = torch.zeros(rice_bytes(count, ctx.numel), dtype=torch.uint8, device=v.device)
        if ctx.rank == leader:
            choice = self._choose(v, maxima, ctx)
        choice = yield Broadcast(choice, root=leader)
        indices, _ = decode_rice(choice.unsqueeze(0), count, ctx.numel, [leader])

        values = v.new_zeros(count)
        values[: len(indices)] = gather(v, indices)
        summing, sent = ctx.all_reduce(values)
        subtract_at(v, indices, sent[: len(indices)])
        ctx.keep_residual(v if self.beta == 1 else e.lerp(v, self.beta))
        total = SparseSum()
        total.add(indices, (yield summing)[: len(indices)])
        return total

    def _choose(self, v: Tensor, maxima: Tensor, ctx: Context) -> Tensor:
        """Return the leader's message: the positions of its largest v."""
        indices = self.selection(ctx).largest(v, maxima)
        count = len(indices)
        kept, counts = what_fits(indices, v[indices], torch.tensor([count]), count, ctx.numel)
        return encode_rice(indices if kept is None else indices[kept], counts, count, ctx.numel)[0]

    def payload_bytes(self, ctx: Context) -> int:
        count = self.selection(ctx).count
        return rice_bytes(count, ctx.numel) + count * ctx.dtype.itemsize
