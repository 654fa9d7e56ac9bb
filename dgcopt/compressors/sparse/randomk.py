"""Random-k with a shared seed (Wangni et al., "Gradient Sparsification", NeurIPS 2018; Stich et al., NeurIPS 2018)."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from ...errors import ConfigError
from ...errors.checks import check_fraction
from ...flat.gradient import SparseSum
from ...flat.memory import at_least_float32
from ...kernels import draw_from_spans, gather, subtract_at
from ..base import GradientExchange, Source
from ..context import Context
from .schedule import ScheduledRatio, Warmup, count_of

__all__ = ["RandomK"]


@dataclass(eq=False)
class RandomK(ScheduledRatio):
    """Sends random coordinates, the same on all ranks: no index is sent, and an allreduce sums the values.

        v = decay * e + g;  send v at k = ceil(ratio * n) coordinates of each tensor;  e = v, zero where sent

    Each tensor is cut into k spans, with lengths that differ by at most one, and one coordinate of each is drawn, which
    costs k random numbers and sends from every part of the tensor in each step.

    The baseline for selection by magnitude: a coordinate is delayed n / k steps on average at any size, so
    training with momentum needs a much smaller lr than with TopK. CLTK needs no allgather either.

    Args:
        ratio: fraction of coordinates to send, in (0, 1]; raise it if accuracy suffers.
        seed: seed of the draws, which also depend on the step and the bucket.
        decay: factor of the residual per step; below 1 old gradients fade instead of arriving late.
        error_feedback: False drops unsent coordinates.
        unbiased: multiply sent values by the length of their span, about n / k, so that the expected result is the mean
            gradient. The variance grows likewise. Only without error feedback.
        source: send gradients or updates: see `Compressor.source`.
        warmup: ratios of the first steps or epochs; None starts at `ratio`.

    Costs one allreduce of 4 bytes per selected coordinate of float32, at any number of ranks. Raises ConfigError
    for invalid settings.
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
        self.decay = check_fraction(self.decay, "decay")
        if self.unbiased and self.error_feedback:
            raise ConfigError(
                "unbiased=True scales values up for unsent ones, and error_feedback=True sends those later: set one"
            )

    @property
    def conserves(self) -> bool:
        return self.error_feedback and self.decay == 1

    def exchange(self, grad: Tensor, ctx: Context) -> GradientExchange:
        v = ctx.add_residual(grad, self.decay) if self.error_feedback else grad
        starts, lengths = self._spans(ctx)
        positions = draw_from_spans(starts, lengths, ctx.key(self.seed, own=False))
        values = gather(v, positions)
        if self.unbiased:
            values = values.to(at_least_float32(ctx.dtype)) * lengths
        summing, sent = ctx.all_reduce(values)
        if self.error_feedback:
            subtract_at(v, positions, sent)
            ctx.keep_residual(v)
        total = SparseSum()
        total.add(positions, (yield summing))
        return total

    def _spans(self, ctx: Context) -> tuple[Tensor, Tensor]:
        """Return starts and lengths of all spans."""

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
