"""Deep Gradient Compression (Lin, Han, Mao, Wang & Dally, ICLR 2018, arXiv:1712.01887)."""

from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from torch import Tensor
from torch.optim import Optimizer

from ..coding import VALUE_DTYPES, decode_coordinates, encode_coordinates
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
        values: "fp32", "fp16" or "bf16" on the wire ("fp64" for float64 models). What rounding loses stays in v.
        momentum_masking: also clear u where v was sent (section 3.2, "Momentum Factor Masking"), so that stale
            momentum does not carry an old gradient on.
        clip: local gradient clipping, or None.
        dense_vectors: send tensors of at most one dimension (biases, norms) whole, in one bucket of their own.

    Costs one allgather per bucket of 8 (6 with 16-bit values) bytes per selected coordinate and rank, and one
    allreduce for the vectors. Memory: v and u, each twice so that a step can be taken back, and the averaged update:
    5 values per parameter beside the gradient.

    Raises ConfigError for a ratio outside (0, 1] or an unknown value format, PayloadError for a damaged message.
    """

    ratio: float = 0.001
    warmup: Warmup | None = None
    values: Literal["fp64", "fp32", "fp16", "bf16"] = "fp32"
    momentum_masking: bool = True
    clip: LocalClip | None = None
    dense_vectors: bool = True

    def __post_init__(self) -> None:
        self.ratio = check_ratio(self.ratio)
        if self.values not in VALUE_DTYPES:
            raise ConfigError(f"values must be one of {', '.join(VALUE_DTYPES)}, not {self.values!r}")
        self.whole_model = self.clip is not None and self.clip.per == "model"
        self._memory: ErrorFeedback = ErrorFeedback()

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_memory": ErrorFeedback()}  # a copy is attached to an optimizer of its own

    def attach(self, optimizer: Optimizer) -> None:
        self._memory = memory_for(optimizer)

    def kind(self, name: str, param: Tensor) -> Hashable:
        return "vector" if self.dense_vectors and param.dim() <= 1 else "matrix"

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
        if ctx.kind == "vector":
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

        indices = largest(v, maxima, ctx.segments, ratio)
        message, arriving = encode_coordinates(indices, v[indices], VALUE_DTYPES[self.values])
        v[indices] -= arriving
        if u is not None and self.momentum_masking:
            u[1][indices] = 0
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
            indices, values = decode_coordinates(message, count, VALUE_DTYPES[self.values], v.numel(), rank)
            update.add(indices, values.to(v.dtype) / ctx.divisor)
        return update.total()

    def before_step(self, optimizer: Optimizer) -> None:
        self._memory.before_step()

    def after_step(self, optimizer: Optimizer) -> None:
        self._memory.after_step()
