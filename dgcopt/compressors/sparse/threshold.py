"""A fixed threshold (Strom, "Scalable Distributed DNN Training Using Commodity GPU Cloud Computing", 2015)."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from ...collectives import AllGather, everyone
from ...errors import PayloadError
from ...errors.checks import check_positive
from ...flat.gradient import SparseSum
from ...flat.memory import at_least_float32
from ...kernels import add_and_select_above, select_above, subtract_at
from ..base import GradientExchange, Source
from ..context import Context
from .base import Indices, Sparse, Values
from .schedule import check_ratio, count_of

__all__ = ["Threshold"]


@dataclass(eq=False)
class Threshold(Sparse):
    """Sends every coordinate with a magnitude of at least a threshold; the rest is added to the next gradient.

        v = decay * e + g;  send all |v| >= threshold, whole;  e = v, zero where sent

    The number of coordinates differs between ranks and steps, so ranks first exchange it. Strom sends plus or minus the
    threshold and keeps the remainder; here the value is sent, or its sign and a fitted scale (`values="sign"`).

    Use it if the scale of gradients is known; otherwise use TopK, with fixed bytes.

    Args:
        threshold: a positive number; larger sends less and delays more. Zeros are never sent, however small it is.
        at_most: largest fraction of the bucket's coordinates per step, so that one bad step cannot send everything; the
            smallest stay in the residual.
        values, indices: their codes on the wire; "int2" and "rice" for fewest bytes. If clustered positions exceed the
            fixed length of Rice codes, the smallest values count as unsent.
        decay: factor of the residual per step; below 1 old gradients fade instead of arriving late.
        error_feedback: False drops unsent coordinates.
        source: send gradients or updates: see `Compressor.source`. An update is smaller than a gradient by a factor of
            lr or more.

    Costs one allgather of 8 bytes, and one of 8 bytes per coordinate of the rank that sends most, 1.7 with int2 and
    rice; no second one if no rank has any. Raises ConfigError for invalid settings, PayloadError for a damaged message.
    """

    threshold: float = 0.01
    at_most: float = 0.1
    values: Values = "fp32"
    indices: Indices = "int32"
    decay: float = 1.0
    error_feedback: bool = True
    source: Source = "auto"

    def __post_init__(self) -> None:
        super().__post_init__()
        self.threshold = check_positive(self.threshold, "threshold")
        self.at_most = check_ratio(self.at_most, "at_most")

    def most(self, ctx: Context) -> int:
        """Return the largest number of coordinates of this bucket per step."""
        return count_of(self.at_most, sum(segment.numel for segment in ctx.segments))

    def choose(self, grad: Tensor, ctx: Context) -> tuple[Tensor, Tensor, Tensor]:
        if not self.error_feedback:
            return grad, *select_above(grad, self._least(grad.dtype), self.most(ctx))
        e, v = ctx.memory.residual()
        return v, *add_and_select_above(grad, e, self.decay, v, self._least(v.dtype), self.most(ctx))

    def _least(self, dtype: torch.dtype) -> float:
        """Return the threshold, raised to a number that `dtype` tells from zero: zeros and padding are never sent."""
        info = torch.finfo(dtype)
        subnormal = info.eps if dtype is torch.float16 else 1.0  # others may be flushed to zero; float16 is widened
        return max(self.threshold, info.smallest_normal * subnormal)

    def exchange(self, grad: Tensor, ctx: Context) -> GradientExchange:
        v, indices, values = self.choose(grad, ctx)
        message, sent, arriving = self.code.encode(indices, values, ctx.numel)
        ctx.count(selected=len(indices), left_out=len(indices) - len(sent))
        if self.error_feedback:
            subtract_at(v, sent, arriving)
            ctx.keep_residual(v)
        counts = (yield AllGather(torch.tensor([len(indices)], device=message.device))).view(-1).tolist()
        ranks = everyone(ctx.rank, ctx.size)
        for rank, count in zip(ranks, counts, strict=True):
            if not 0 <= count <= self.most(ctx):
                raise PayloadError(f"rank {rank} claims {count} values, and 0 to {self.most(ctx)} are possible")
        code = self.code
        lengths = [code.nbytes(count, ctx.numel) for count in counts]
        total = SparseSum()
        if not any(lengths):
            return total
        missing = max(lengths) - len(message)
        messages = yield AllGather(torch.nn.functional.pad(message, (0, missing)) if missing else message)
        for rank, count, length in zip(ranks, counts, lengths, strict=True):
            positions, values = code.decode(messages[rank, :length], count, ctx.numel, rank)
            total.add(positions, values.to(at_least_float32(ctx.dtype)) / ctx.divisor)
        return total
