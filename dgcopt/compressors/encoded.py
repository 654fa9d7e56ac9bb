"""The base of compressors that round every coordinate: one message per rank, decoded and averaged by all."""

from __future__ import annotations

import torch
from torch import Tensor

from ..collectives import AllGather
from .base import Compressor, GradientExchange
from .context import Context, at_least_float32

__all__ = ["Encoded"]


class Encoded(Compressor):
    """The mean of messages that each rank decodes by itself, in rank order; with error feedback if wanted.

    A subclass defines `encode` and `decode`. With `error_feedback` (Karimireddy et al., "Error Feedback Fixes SignSGD",
    ICML 2019) what rounding loses is added to the next gradient.

    Costs one allgather.
    """

    error_feedback: bool = False

    @property
    def conserves(self) -> bool:
        return self.error_feedback

    def encode(self, values: Tensor, ctx: Context) -> Tensor:
        """One rank's message, of a length that only depends on `ctx`; NaN and Inf in `values` may become anything."""
        raise NotImplementedError(f"{type(self).__name__} must define encode() and decode()")

    def decode(self, message: Tensor, ctx: Context, rank: int) -> Tensor:
        """The flat gradient that a message of `rank` stands for: the same bits on all ranks.

        Raises PayloadError if the message cannot be right.
        """
        raise NotImplementedError(f"{type(self).__name__} must define encode() and decode()")

    def exchange(self, grad: Tensor, ctx: Context) -> GradientExchange:
        values = ctx.add_residual(grad) if self.error_feedback else grad
        message = self.encode(values, ctx)
        if self.error_feedback:
            values -= self.decode(message, ctx, ctx.rank)
            ctx.keep_residual(values)
        messages = yield AllGather(message)
        total = torch.zeros(ctx.numel, dtype=at_least_float32(ctx.dtype), device=message.device)
        for rank, theirs in enumerate(messages):
            total += self.decode(theirs, ctx, rank)
        return total / ctx.divisor
