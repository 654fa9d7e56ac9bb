"""Top-k with error feedback (Stich, Cordonnier & Jaggi, "Sparsified SGD with Memory", NeurIPS 2018)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from torch import Tensor

from ..kernels import add_and_maxima, block_maxima, gather
from .base import Source
from .context import Context
from .reduction import Reduce, check_reduce
from .schedule import ScheduledRatio, Warmup
from .selection import Selection
from .sparse import Indices, Sparse, Values, check_decay

__all__ = ["TopK"]


@dataclass(eq=False)
class TopK(ScheduledRatio, Sparse):
    """The largest coordinates of each tensor; the rest is added to the next gradient.

        v = decay * e + g;  send the k = ceil(ratio * n) largest |v| of each tensor;  e = v, zero where sent

    For Adam and its kin, where g is each rank's own update (`source`), best with betas=(0.0, b2): e is momentum enough.
    For SGD with momentum DGC is better: it knows what momentum does to a gradient that waits.

    Args:
        ratio: fraction of coordinates that is sent, in (0, 1]; larger if accuracy suffers.
        values, indices: how they travel; "int2" and "rice" for fewest bytes.
        decay: how much of what waits is kept from step to step; below 1 old gradients fade instead of coming late.
        error_feedback: False throws away what is not sent.
        reduce, keep: "gather" brings everyone's choice to everyone; with "owner" what a rank receives does not grow
            with the number of ranks, see `dgcopt.compressors.Owner`: for many ranks and slow links. "auto" takes the
            faster one for each bucket, by the wire's measured latency and bandwidth.
            With "partition" ranks take turns to choose for all, see `dgcopt.compressors.Partition`.
        granularity: whether the ratio holds for each "tensor" or for a "bucket" of them together.
        source: what travels, see `Compressor.source`.
        warmup: ratios for the first steps or epochs; None starts at `ratio`.

    Costs one allgather of 8 bytes per selected coordinate, 1.7 with int2 and rice. Raises ConfigError for settings
    that are none of these, PayloadError for a damaged message.
    """

    ratio: float = 0.01
    values: Values = "fp32"
    indices: Indices = "int32"
    decay: float = 1.0
    error_feedback: bool = True
    granularity: Literal["tensor", "bucket"] = "tensor"
    source: Source = "auto"
    warmup: Warmup | None = None
    reduce: Reduce = "gather"
    keep: float = 1.0

    def __post_init__(self) -> None:
        super().__post_init__()
        self.decay = check_decay(self.decay)
        check_reduce(self.reduce, self.keep)

    def selection(self, ctx: Context) -> Selection:
        """What finds the largest coordinates of this bucket."""
        together = self.granularity == "bucket"
        return self.chooser(ctx, lambda ratio: Selection(ctx.segments, ratio, together))

    def choose(self, grad: Tensor, ctx: Context) -> tuple[Tensor, Tensor, Tensor]:
        if self.error_feedback:
            e, v = ctx.residual()
            maxima = add_and_maxima(grad, e, self.decay, v)
        else:
            v, maxima = grad, block_maxima(grad)
        indices = self.selection(ctx).largest(v, maxima)
        return v, indices, gather(v, indices)

    def payload_bytes(self, ctx: Context) -> int | None:
        return self.reduction(self.selection(ctx).count, ctx).nbytes(ctx)
