"""Deep Gradient Compression (Lin, Han, Mao, Wang & Dally, ICLR 2018, arXiv:1712.01887)."""

import logging
from collections.abc import Hashable, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

import torch
from torch import Tensor
from torch.optim import Optimizer

from ...coding import SparseCode
from ...errors.checks import MAY_BE_INFINITE
from ...flat.gradient import LocalGradient
from ...flat.memory import at_least_float32
from ...kernels import BLOCK, clear_at, gather, subtract_at
from ..base import FirstMoment, GradientExchange, Source
from ..context import Context
from ..reduction import Choice, Reduce, Reduction, check_keep, reduction, whole_sum
from .base import Indices, Values
from .memory import LocalClip, MomentumCorrected
from .schedule import Selection, Warmup

__all__ = ["DGC"]

log = logging.getLogger("dgcopt")


@dataclass(eq=False)
class DGC(MomentumCorrected):
    """Sends the largest accumulated gradients of each tensor and keeps the rest in the residual.

    Per step and rank: clip g -> momentum correction u <- m u + g, v <- v + u (with Nesterov v <- v + g + m u) ->
    the k = ceil(ratio * n) largest |v| of each tensor, exactly -> send them -> v, and with factor masking u, become
    zero there -> the optimizer applies the sum over ranks, divided by N.

    DGC takes over the momentum of a wrapped SGD. For all other optimizers v <- v + g is plain error feedback, and g is
    the optimizer's update from the local gradient for elementwise ones (`source`). At ratio 1 all coordinates are sent
    and none is masked, which equals dense training by linearity.

    Args:
        ratio: fraction of coordinates to send, in (0, 1]. Smaller sends less and delays more.
        warmup: ratios of the first steps or epochs; None starts at `ratio`.
        values: code of values on the wire: "fp32", "fp16", "bf16" ("fp64" for float64 models), or "int8", "int4",
            "int2", "sign" with a scale per block of 256. Rounding errors stay in v.
        indices: code of positions: "int32", or "rice", gaps in 11.5 bits each at 0.1%, within 2% of the entropy. If
            clustered positions exceed the message's fixed length, the smallest values stay in v.
        momentum_masking: also clear u where v was sent (section 3.2, "Momentum Factor Masking"), so that stale
            momentum does not carry an old gradient on.
        clip: local gradient clipping, or None.
        vectors: code of tensors of at most one dimension (biases, norms), in buckets of their own: "dense", by
            allreduce, which in half precision clamps values to the dtype's range and loses the rest; a code of
            `values` for all elements, rounding errors kept in v; or "sparse" like other tensors.
        granularity: apply the ratio to each "tensor", as in the paper, or to a whole "bucket", so that tensors with
            larger gradients send more.
        residual: "full" keeps v and u in the parameters' precision, float32 at least; "bf16" halves the memory and
            loses increments below 0.4% of the accumulated value.
        reduce, keep: "gather" sends every rank's selection to all ranks, as in the paper. "owner" keeps bytes flat in
            the world size, for many ranks and slow links: see `dgcopt.compressors.OwnerReduction`. "auto" chooses the
            faster of the two per bucket from the wire's measured latency and bandwidth. "partition" lets ranks take
            turns to select for all: see `dgcopt.compressors.PartitionReduction`. Except with "gather", owners also sum
            vectors in few bits, each a part of them.
        overlap: launch buckets during backward. False waits for the step, and then makes one pass over memory instead
            of a preview pass and an update pass: less CPU time, and messages this small take little time to send. If
            the wire fails then, the step's gradient stays in v. "auto" is False for parameters on a CPU, True on other
            devices.
        source: send gradients or updates: see `Compressor.source`; at ratio 1 "auto" is always "gradient".
        first_moment: where updates are sent, "residual" makes Adam's updates without b1 while the ratio is below 1; see
            `dgcopt.compressors.FirstMoment`.

    Costs one allgather per bucket of 8 bytes per selected coordinate and rank, 2.5 with int8 values and Rice indices,
    1.7 with int2; and one allreduce or allgather for the vectors. Memory: u and v. On a CPU the gradient is read and
    overwritten in place, and overlap needs a second v; other devices need a flat copy of the gradient.

    Raises ConfigError for a ratio outside (0, 1] or an invalid setting, PayloadError for a damaged message.
    """

    ratio: float = 0.001
    warmup: Warmup | None = None
    values: Values = "fp32"
    indices: Indices = "int32"
    momentum_masking: bool = True
    clip: LocalClip | None = None
    vectors: Literal["dense", "sparse", "fp64", "fp32", "fp16", "bf16", "int8", "int4", "int2", "sign"] = "dense"
    granularity: Literal["tensor", "bucket"] = "tensor"
    residual: Literal["full", "bf16"] = "full"
    overlap: bool | Literal["auto"] = "auto"
    source: Source = "auto"
    reduce: Reduce = "gather"
    keep: float = field(default=1.0, metadata=MAY_BE_INFINITE)
    first_moment: FirstMoment = "optimizer"

    @classmethod
    def faithful(cls, ratio: float = 0.001, **settings: Any) -> "DGC":
        """Return the paper's DGC: fp32 values, int32 indices, dense biases and norms, and a warm-up of four epochs."""
        return cls(**{"ratio": ratio, "warmup": Warmup(), **settings})

    @classmethod
    def compact(cls, ratio: float = 0.001, **settings: Any) -> "DGC":
        """Fewest bytes at the loss of dense training: 2-bit values, Rice-coded indices, int8 vectors, a long warm-up.

        The warm-up is 8 epochs at 1.6% and 8 at 0.4%, without stages at or below `ratio`: 40 epochs of digits end with
        less loss by it than by the paper's four epochs from 25%, after fewer bytes (docs/benchmarks.md).
        """
        coded = {"values": "int2", "indices": "rice", "vectors": "int8"}
        stages = tuple(stage for stage in (0.015625, 0.004) if stage > ratio)
        return cls(**{"ratio": ratio, "warmup": Warmup(stages, epochs=8) if stages else None, **coded, **settings})

    def __post_init__(self) -> None:
        super().__post_init__()
        self._code = SparseCode(self.indices, self.values)
        check_keep(self.keep, self.reduce)
        self._set_whole_model()

    def _set_whole_model(self) -> None:
        """Require all gradients first if they are clipped by model, or before updates are made from them."""
        self.whole_model = self.clips_model or (self.clip is not None and self.sends == "update")

    def attach(self, optimizer: Optimizer) -> None:
        if self.ratio < 1:
            super().attach(optimizer)
        else:
            self._doubt_ratio()
            self._take_over(optimizer)
        self._set_whole_model()
        if self.overlap == "auto" and self.sends == "gradient":
            devices = {param.device for group in optimizer.param_groups for param in group["params"]}
            early = any(self.overlaps(device) for device in devices)
            when = "while backward runs" if early else "once the step is called for, as parameters are on a CPU"
            log.info('dgcopt: DGC(overlap="auto") sends %s', when)

    @property
    def conserves(self) -> bool:
        return self.clip is None and self.residual == "full"  # apart from momentum

    @property
    def clips_model(self) -> bool:
        return self.clip is not None and self.clip.per == "model"

    def kind(self, name: str, param: Tensor) -> Hashable:
        return "vector" if self.vectors != "sparse" and param.dim() <= 1 else "matrix"

    def prepare(self, grads: Sequence[Tensor], contexts: Sequence[Context]) -> None:
        if self.clip is not None and grads:
            if self.clip.per == "model":
                first = contexts[0]
                self.clip.clip_model(grads, first.size, first.op, first.norm, first.place.share)
            else:
                self.clip.clip_each(grads)

    def in_place(self, kind: Hashable) -> bool:
        return kind == "matrix" and self.clip is None

    def exchange(self, grad: Tensor, ctx: Context) -> GradientExchange:
        if self.clip is not None and not self.whole_model:
            self.clip.clip_each([grad[segment.start : segment.stop] for segment in ctx.segments], ctx.place.share)
        memory, runs, start = self._memory, self._memory.runs(ctx.segments), self._memory.start(ctx)
        if ctx.kind == "vector" and self.vectors == "dense":
            grad = grad.to(at_least_float32(grad.dtype))
            memory.correct(grad, ctx.memory.advance("momentum", start) if start else None, runs)
            ctx.memory.add_unsent(grad)  # after the momentum, which v already contains
            result = yield ctx.all_reduce(grad)[0]
            ctx.checks.check_finite(result)
            return result

        ratio = self.ratio_at(ctx.step)
        local = LocalGradient(grad) if ctx.local is None else ctx.local
        dtype = torch.bfloat16 if self.residual == "bf16" else None
        u = ctx.memory.hold("momentum", start, dtype) if start else None
        v = ctx.memory.hold("residual", dtype=dtype)
        if ctx.kind == "vector" or ratio == 1:
            everything = memory.preview_blocks(local, v, u, runs).view(-1)
            ctx.set_peak(everything.abs().amax() if self.clip is None else None)  # clipping removes Inf
            ctx.memory.on_commit(lambda: memory.accumulate(local, v, u, runs))
            if ratio == 1:
                ctx.memory.on_commit(lambda: v.sub_(ctx.all_reduce(v)[1]))
                result = yield ctx.all_reduce(everything)[0]
                ctx.checks.check_finite(result)
                return result
            return (yield from whole_sum(self.reduce, self.vectors, ctx).exchange(everything, ctx))

        selection = self.selection(ctx)
        new: Tensor | None = None  # the next v, if already written
        if ctx.certain:
            with ctx.memory.absorbing():
                new, maxima = v, memory.accumulate(local, v, u, runs)
        elif ctx.local is not None:  # no flat gradient, so memory for a second v
            new = ctx.memory.advance("residual", dtype=dtype)[1]
            maxima = memory.preview_block_maxima(local, v, u, runs, new)
            ctx.memory.on_commit(lambda: memory.update_momentum(local, u, runs))
        else:
            maxima = memory.preview_block_maxima(local, v, u, runs)
            ctx.memory.on_commit(lambda: memory.accumulate(local, v, u, runs))
        if new is not None:
            indices = selection.largest(new, maxima)
            values = gather(new, indices)
        else:
            indices, values = selection.largest_of(
                lambda blocks: memory.preview_blocks(local, v, u, runs, blocks), maxima
            )
        if not ctx.certain:
            ctx.set_peak(maxima.amax() if self.clip is None else None)

        def at(positions: Tensor) -> Tensor:
            if new is not None:
                return gather(new, positions).to(at_least_float32(v.dtype))
            blocks, row = (positions // BLOCK).unique(return_inverse=True)
            rows = memory.preview_blocks(local, v, u, runs, blocks)
            return rows.view(-1)[row * BLOCK + positions % BLOCK].to(at_least_float32(v.dtype))

        def subtract(sent: Tensor, arriving: Tensor, fits: Tensor | None) -> None:
            ctx.memory.on_commit(lambda: subtract_at(v if new is None else new, sent, arriving))
            if u is not None and self.momentum_masking:
                ctx.memory.on_commit(lambda: _mask(u, sent, fits))

        choice = Choice(indices, values.to(at_least_float32(v.dtype)), at, subtract)
        return (yield from self.reduction(selection.count, ctx).exchange(choice, ctx))

    @property
    def asks_link(self) -> bool:
        return self.reduce == "auto"

    def reduction(self, count: int, ctx: Context) -> Reduction[Choice]:
        """Return the reduction of all ranks' selections of `count` coordinates each."""
        return reduction(self.reduce, self._code, count, ctx, self.keep)

    def selection(self, ctx: Context) -> Selection:
        """Return the selection of the largest coordinates of this bucket."""
        together = self.granularity == "bucket"
        return self.chooser(ctx, lambda ratio: Selection(ctx.segments, ratio, together))

    def payload_bytes(self, ctx: Context) -> int | None:
        ratio = self.ratio_at(ctx.step)
        if ratio == 1 or (ctx.kind == "vector" and self.vectors == "dense"):
            return ctx.numel * ctx.dtype.itemsize
        if ctx.kind == "vector":
            return whole_sum(self.reduce, self.vectors, ctx).nbytes(ctx)
        return self.reduction(self.selection(ctx).count, ctx).nbytes(ctx)


def _mask(u: Tensor, sent: Tensor, fits: Tensor | None) -> None:
    """Factor masking: clear the momentum of coordinates in the message."""
    if fits is None:
        clear_at(u, sent)
    else:
        u.index_copy_(0, sent, torch.where(fits, 0, u.index_select(0, sent)))
