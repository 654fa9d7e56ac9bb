"""The base of compressors that round every coordinate: one message per rank, decoded and averaged by all."""

from __future__ import annotations

import torch
from torch import Tensor

from ..collectives import AllGather
from ..kernels import Put, put
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

    def encode_sum(self, grad: Tensor, residual: Tensor, values: Tensor, ctx: Context) -> Tensor:
        """`encode` of `grad` + `residual`, which it writes to `values`: in one pass where a kernel does so."""
        return self.encode(torch.add(grad, residual, out=values), ctx)

    def decode(self, message: Tensor, ctx: Context, rank: int) -> Tensor:
        """The flat gradient that a message of `rank` stands for: the same bits on all ranks.

        Raises PayloadError if the message cannot be right.
        """
        if type(self).decode_into is Encoded.decode_into:
            raise NotImplementedError(f"{type(self).__name__} must define encode() and decode()")
        values = torch.empty(ctx.numel, dtype=torch.float32, device=message.device)
        self.decode_into(values, "set", message, ctx, rank)
        return values

    def decode_into(self, out: Tensor, how: Put, message: Tensor, ctx: Context, rank: int) -> None:
        """Let what `decode` returns take effect on `out`, in one pass where a kernel does so."""
        put(self.decode(message, ctx, rank), out, how)

    def exchange(self, grad: Tensor, ctx: Context) -> GradientExchange:
        total = grad.to(at_least_float32(grad.dtype))  # may be overwritten
        if not self.error_feedback:
            message = self.encode(total, ctx)
        else:
            residual, values = ctx.residual()
            message = self.encode_sum(grad, residual, values, ctx)
            self.decode_into(values, "subtract", message, ctx, ctx.rank)
            ctx.keep_residual(values)
        messages = yield AllGather(message)
        for rank, theirs in enumerate(messages):
            self.decode_into(total, "add" if rank else "set", theirs, ctx, rank)
        return total if ctx.divisor == 1 else total.div_(ctx.divisor)
