"""Deep Gradient Compression (Lin, Han, Mao, Wang & Dally, ICLR 2018, arXiv:1712.01887)."""

from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from torch import Tensor
from torch.optim import Optimizer

from ..coding import DENSE_CODES, SparseCode, decode_dense, encode_dense
from ..collectives import AllGather, AllReduce, Exchange
from ..errors import ConfigError
from ..memory import ErrorFeedback, LocalClip, MomentumCorrection, memory_for
from ..schedule import Warmup, check_ratio
from ..selection import count_of, largest
from .base import Compressor, Context
from .sparse_sum import SparseSum

__all__ = ["DGC"]


@dataclass(eq=False)
class DGC(Compressor):
    """Send only the largest accumulated gradients of every tensor; keep the rest for later.

    Per step and rank: clip g -> momentum correction u <- m u + g, v <- v + u (with Nesterov v <- v + g + m u) ->
    the k = ceil(ratio * n) largest |v| of each tensor, exactly -> send them -> v, and with factor masking u, become
    zero there -> the sum over ranks, divided by N, is what the optimizer applies.

    For SGD with momentum the momentum is taken over from the wrapped optimizer; for every other optimizer v <- v + g
    is plain error feedback. At ratio 1 everything is sent and nothing masked: dense training, by linearity.

    Args:
        ratio: fraction of coordinates that is sent, in (0, 1]. Smaller sends less and delays more.
        warmup: ratios for the first steps or epochs; None starts at `ratio`.
        values: on the wire "fp32", "fp16", "bf16" ("fp64" for float64 models), or "int8", "int4", "int2", "sign": so
            many bits, and a scale per block of 256. What rounding loses stays in v.
        indices: "int32", or "rice": gaps in 11.5 bits each at 0.1%, within 2% of what any code needs. Where positions
            cluster so much that not all fit into the message's fixed length, the smallest values wait in v.
        momentum_masking: also clear u where v was sent (section 3.2, "Momentum Factor Masking"), so that stale
            momentum does not carry an old gradient on.
        clip: local gradient clipping, or None.
        vectors: how tensors of at most one dimension (biases, norms) travel, in buckets of their own: "dense" as they
            are, by allreduce; by a kind of `values`, whole, with what rounding loses kept in v; or "sparse" like all
            others.

    Costs one allgather per bucket of 8 bytes per selected coordinate and rank, 2.5 with int8 values and Rice indices,
    1.7 with int2; and one allreduce or allgather for the vectors. Memory: v and u, each twice so that a step can be
    taken back, and the averaged update: 5 values per parameter beside the gradient.

    Raises ConfigError for a ratio outside (0, 1] or an unknown value format, PayloadError for a damaged message.
    """

    ratio: float = 0.001
    warmup: Warmup | None = None
    values: Literal["fp64", "fp32", "fp16", "bf16", "int8", "int4", "int2", "sign"] = "fp32"
    indices: Literal["int32", "rice"] = "int32"
    momentum_masking: bool = True
    clip: LocalClip | None = None
    vectors: Literal["dense", "sparse", "fp32", "fp16", "bf16", "int8", "int4", "int2", "sign"] = "dense"

    def __post_init__(self) -> None:
        self.ratio = check_ratio(self.ratio)
        self._code = SparseCode(self.indices, self.values)
        if self.vectors not in ("dense", "sparse", *DENSE_CODES):
            known = ", ".join(("dense", "sparse", *DENSE_CODES))
            raise ConfigError(f"vectors must be one of {known}, not {self.vectors!r}")
        self.whole_model = self.clip is not None and self.clip.per == "model"
        self._memory: ErrorFeedback = ErrorFeedback()

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_memory": ErrorFeedback()}  # a copy is attached to an optimizer of its own

    def attach(self, optimizer: Optimizer) -> None:
        self._memory = memory_for(optimizer)

    def kind(self, name: str, param: Tensor) -> Hashable:
        return "vector" if self.vectors != "sparse" and param.dim() <= 1 else "matrix"

    def set_steps_per_epoch(self, steps: int) -> None:
        if self.warmup is not None:
            self.warmup.steps_per_epoch = steps

    def ratio_at(self, step: int) -> float:
        """The ratio in force at optimizer step `step`, counted from 0."""
        return self.ratio if self.warmup is None else self.warmup.ratio_at(step, self.ratio)

    def prepare(self, grads: Sequence[Tensor], contexts: Sequence[Context]) -> None:
        if self.clip is not None and grads:
            self.clip.clip_model(grads, contexts[0].size, contexts[0].op)

    def exchange(self, grad: Tensor, ctx: Context) -> Exchange:
        if self.clip is not None and self.clip.per == "tensor":
            self.clip.clip_tensors(grad, ctx.segments)

        u = None
        if isinstance(self._memory, MomentumCorrection):
            u = ctx.advance("momentum", grad, start=self._memory.inherited)
        if ctx.kind == "vector" and self.vectors == "dense":
            self._memory.correct(grad, u, ctx.segments)
            return (yield AllReduce(grad, op=ctx.op))
        residual = ctx.advance("residual", grad)
        maxima = self._memory.accumulate(grad, residual, u, ctx.segments)
        _, v = residual

        ratio = self.ratio_at(ctx.step)
        if ratio == 1:
            grad.copy_(v)
            v.zero_()
            return (yield AllReduce(grad, op=ctx.op))

        if ctx.kind == "vector":
            message = encode_dense(v, self.vectors)
            v -= decode_dense(message, v.numel(), self.vectors, ctx.rank)
            messages = yield AllGather(message)
            grad.zero_()
            for rank, row in enumerate(messages):
                grad += decode_dense(row, v.numel(), self.vectors, rank).to(v.dtype) / ctx.divisor
            return grad

        indices = largest(v, maxima, ctx.segments, ratio)
        message, sent, arriving = self._code.encode(indices, v[indices], v.numel())
        v[sent] -= arriving
        if u is not None and self.momentum_masking:
            u[1][sent] = 0
        messages = yield AllGather(message)
        return self._add_up(messages, v, ctx, ratio)

    def _add_up(self, messages: Tensor, v: Tensor, ctx: Context, ratio: float) -> Tensor:
        """The sum of the ranks' messages, in rank order, divided by N."""
        if "update" not in ctx.scratch:
            ctx.scratch["update"] = SparseSum(v)
        update: SparseSum = ctx.scratch["update"]
        update.clear(everywhere=ctx.written)
        count = sum(count_of(ratio, segment.numel) for segment in ctx.segments)
        for rank, message in enumerate(messages):
            indices, values = self._code.decode(message, count, v.numel(), rank)
            update.add(indices, values.to(v.dtype) / ctx.divisor)
        return update.total()

    def before_step(self, optimizer: Optimizer) -> None:
        self._memory.before_step()

    def after_step(self, optimizer: Optimizer) -> None:
        self._memory.after_step()
