"""The base class of quantisers: one message per rank, which all ranks decode and average."""

from __future__ import annotations

import torch
from torch import Tensor

from ...collectives import AllGather, everyone
from ...flat.memory import at_least_float32
from ...kernels import Put, put
from ..base import Compressor, GradientExchange
from ..context import Context

__all__ = ["Encoded"]


class Encoded(Compressor):
    """Averages the messages of all ranks, decoded on each rank in rank order, with optional error feedback.

    A subclass defines `encode` and `decode`. With `error_feedback` (Karimireddy et al., "Error Feedback Fixes SignSGD",
    ICML 2019) rounding errors are added to the next gradient.

    Costs one allgather.
    """

    error_feedback: bool = False

    @property
    def conserves(self) -> bool:
        return self.error_feedback

    def encode(self, values: Tensor, ctx: Context) -> Tensor:
        """Return this rank's message; its length depends on `ctx` only. NaN and Inf in `values` may become anything."""
        raise NotImplementedError(f"{type(self).__name__} must define encode() and decode()")

    def encode_sum(self, grad: Tensor, residual: Tensor, values: Tensor, ctx: Context) -> Tensor:
        """Encode `grad` + `residual`, and write the sum to `values`; one pass if a kernel supports it."""
        return self.encode(torch.add(grad, residual, out=values), ctx)

    def decode(self, message: Tensor, ctx: Context, rank: int) -> Tensor:
        """Return the flat gradient of a message from `rank`, bit-identical on all ranks.

        Raises PayloadError for an invalid message.
        """
        if type(self).decode_into is Encoded.decode_into:
            raise NotImplementedError(f"{type(self).__name__} must define encode() and decode()")
        values = torch.empty(ctx.numel, dtype=torch.float32, device=message.device)
        self.decode_into(values, "set", message, ctx, rank)
        return values

    def decode_into(self, out: Tensor, how: Put, message: Tensor, ctx: Context, rank: int) -> None:
        """Apply the decoded message to `out`; one pass if a kernel supports it."""
        put(self.decode(message, ctx, rank), out, how)

    def exchange(self, grad: Tensor, ctx: Context) -> GradientExchange:
        total = grad.to(at_least_float32(grad.dtype))  # may be overwritten
        if not self.error_feedback:
            message = self.encode(total, ctx)
        else:
            residual, values = ctx.memory.residual()
            message = self.encode_sum(grad, residual, values, ctx)
            self.decode_into(values, "subtract", message, ctx, ctx.rank)
            ctx.keep_residual(values)
        messages = yield AllGather(message)
        for rank, theirs in zip(everyone(ctx.rank, ctx.size), messages, strict=True):
            self.decode_into(total, "add" if rank else "set", theirs, ctx, rank)
        return total if ctx.divisor == 1 else total.div_(ctx.divisor)
