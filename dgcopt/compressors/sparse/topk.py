"""Top-k with error feedback (Stich, Cordonnier & Jaggi, "Sparsified SGD with Memory", NeurIPS 2018)."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

from torch import Tensor

from ...errors.checks import MAY_BE_INFINITE
from ...kernels import add_and_maxima, block_maxima, gather
from ..base import FirstMoment, Source
from ..context import Context
from ..reduction import Reduce
from .base import Indices, Sparse, Values
from .schedule import ScheduledRatio, Selection, Warmup

__all__ = ["TopK"]


@dataclass(eq=False)
class TopK(ScheduledRatio, Sparse):
    """Sends the largest coordinates of each tensor; the rest is added to the next gradient.

        v = decay * e + g;  send the k = ceil(ratio * n) largest |v| of each tensor;  e = v, zero where sent

    For Adam and its kin g is each rank's own update (`source`); use first_moment="residual", since e acts as momentum.
    For SGD with momentum use DGC, which corrects the momentum of delayed gradients.

    Args:
        ratio: fraction of coordinates to send, in (0, 1]; raise it if accuracy suffers.
        values, indices: their codes on the wire; "int2" and "rice" for fewest bytes. If clustered positions exceed the
            fixed length of Rice codes, the smallest values count as unsent.
        decay: factor of the residual per step; below 1 old gradients fade instead of arriving late.
        error_feedback: False drops unsent coordinates.
        reduce, keep: "gather" sends every rank's selection to all ranks. "owner" keeps bytes flat in the world size,
            for many ranks and slow links: see `dgcopt.compressors.OwnerReduction`. "auto" chooses the faster of the two
            per bucket from the wire's measured latency and bandwidth. "partition" lets ranks take turns to select for
            all: see `dgcopt.compressors.PartitionReduction`.
        granularity: apply the ratio to each "tensor" or to a whole "bucket".
        source: send gradients or updates: see `Compressor.source`.
        warmup: ratios of the first steps or epochs; None starts at `ratio`.
        first_moment: "residual" makes Adam's updates without b1 while the ratio is below 1, so that the betas of dense
            training can stay; "optimizer" keeps b1. See `dgcopt.compressors.FirstMoment`.

    Costs one allgather of 8 bytes per selected coordinate, 1.7 with int2 and rice. Raises ConfigError for invalid
    settings, PayloadError for a damaged message.
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
    keep: float = field(default=1.0, metadata=MAY_BE_INFINITE)
    first_moment: FirstMoment = "optimizer"

    def selection(self, ctx: Context) -> Selection:
        """Return the selection of the largest coordinates of this bucket."""
        together = self.granularity == "bucket"
        return self.chooser(ctx, lambda ratio: Selection(ctx.segments, ratio, together))

    def choose(self, grad: Tensor, ctx: Context) -> tuple[Tensor, Tensor, Tensor]:
        if self.error_feedback:
            e, v = ctx.memory.residual()
            maxima = add_and_maxima(grad, e, self.decay, v)
        else:
            v, maxima = grad, block_maxima(grad)
        indices = self.selection(ctx).largest(v, maxima)
        return v, indices, gather(v, indices)

    def payload_bytes(self, ctx: Context) -> int | None:
        return self.reduction(self.selection(ctx).count, ctx).nbytes(ctx)
