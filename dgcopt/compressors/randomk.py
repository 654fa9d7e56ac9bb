"""Random-k with a shared seed (Wangni et al., "Gradient Sparsification", NeurIPS 2018; Stich et al., NeurIPS 2018)."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from ..collectives import AllReduce
from ..errors import ConfigError
from ..flat.gradient import SparseSum
from ..kernels import draw_from_spans, gather, subtract_at
from .base import GradientExchange, Source
from .context import Context
from .schedule import ScheduledRatio, Warmup
from .selection import count_of
from .sparse import check_decay

__all__ = ["RandomK"]


@dataclass(eq=False)
class RandomK(ScheduledRatio):
    """Coordinates drawn at random, the same on all ranks: no index travels, and an allreduce adds the values up.

        v = decay * e + g;  send v at k = ceil(ratio * n) coordinates of each tensor;  e = v, zero where sent

    Each tensor is cut into k spans whose lengths differ by one at most, and one coordinate of each is drawn. So every
    span of n / k neighbours is sent from in every step, and drawing costs as little as k random numbers.

    As the baseline that any choice by magnitude has to beat: a coordinate waits n / k steps, however large it is, so
    that training with momentum bears a much smaller lr than with TopK. CLTK needs no allgather either.

    Args:
        ratio: fraction of coordinates that is sent, in (0, 1]; larger if accuracy suffers.
        seed: of the draws, which depend on nothing else but the step and the bucket.
        decay: how much of what waits is kept from step to step; below 1 old gradients fade instead of coming late.
        error_feedback: False throws away what is not sent.
        unbiased: multiply what is sent by the length of its span, nearly n / k, so that the result's expectation is
            the mean gradient. Its variance grows as much. Only without error feedback, which sends the rest itself.
        source: what travels, see `Compressor.source`.
        warmup: ratios for the first steps or epochs; None starts at `ratio`.

    Costs one allreduce of 4 bytes per selected coordinate of float32, whatever the number of ranks. Raises ConfigError
    for settings that are none of these.
    """

    ratio: float = 0.1
    seed: int = 0
    decay: float = 1.0
    error_feedback: bool = True
    unbiased: bool = False
    source: Source = "auto"
    warmup: Warmup | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        self.decay = check_decay(self.decay)
        if self.unbiased and self.error_feedback:
            raise ConfigError(
                "unbiased=True scales up what is sent for what is not, and error_feedback=True sends that later: choose"
            )

    @property
    def conserves(self) -> bool:
        return self.error_feedback and self.decay == 1

    def exchange(self, grad: Tensor, ctx: Context) -> GradientExchange:
        v = ctx.add_residual(grad, self.decay) if self.error_feedback else grad
        starts, lengths = self._spans(ctx)
        positions = draw_from_spans(starts, lengths, ctx.key(self.seed, own=False))
        sent = gather(v, positions).to(ctx.dtype)
        if self.error_feedback:
            subtract_at(v, positions, sent.to(v.dtype))
            ctx.keep_residual(v)
        if self.unbiased:
            sent *= lengths
        total = SparseSum()
        total.add(positions, (yield AllReduce(sent, op=ctx.op)))
        return total

    def _spans(self, ctx: Context) -> tuple[Tensor, Tensor]:
        """Where the spans of all tensors start, and their lengths."""

        def cut_at(ratio: float) -> tuple[Tensor, Tensor]:
            cuts = []
            for segment in ctx.segments:
                k = count_of(ratio, segment.numel)
                cuts.append(segment.start + torch.arange(k + 1) * segment.numel // k)
            starts, lengths = torch.cat([cut[:-1] for cut in cuts]), torch.cat([cut.diff() for cut in cuts])
            return starts.to(ctx.device), lengths.to(ctx.device)

        return self.chooser(ctx, cut_at)

    def payload_bytes(self, ctx: Context) -> int:
        return len(self._spans(ctx)[0]) * ctx.dtype.itemsize
