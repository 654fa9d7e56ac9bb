"""1-bit SGD (Seide, Fu, Droppo, Li & Yu, Interspeech 2014)."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from ...coding.scaled import decode_scaled, encode_scaled, scaled_bytes
from ...coding.values import packed_bytes
from ...kernels import Put, put_signs, split_signs, split_sum, tensor_sums
from ..context import Context
from .base import Encoded

__all__ = ["OneBit"]


@dataclass(eq=False)
class OneBit(Encoded):
    """Sends one of two values per coordinate of a tensor; the error is added to the next gradient.

        v = e + g;  send mean{v : v >= 0} where v >= 0, else mean{v : v < 0};  e = v - sent

    The two means minimise the squared error of a split at zero and preserve the sum of v. The paper has a pair of means
    per matrix column; here there is one pair per tensor. Like EFSignSGD, but for one-sided gradients. For SGD: in front
    of Adam the second moment is one of rounded gradients, and `OneBitAdam` has the better loss (docs/frontier.md).

    Args:
        error_feedback: False drops the error; then training does not converge, as the paper found.

    Costs one allgather of 1 bit per coordinate and 8 bytes per tensor. Raises PayloadError for a damaged message.
    Source: Seide, Fu, Droppo, Li & Yu, "1-Bit Stochastic Gradient Descent and its Application to Data-Parallel
    Distributed Training of Speech DNNs", Interspeech 2014.
    """

    error_feedback: bool = True

    def encode(self, values: Tensor, ctx: Context) -> Tensor:
        return self._message(*split_signs(values), ctx)

    def encode_sum(self, grad: Tensor, residual: Tensor, values: Tensor, ctx: Context) -> Tensor:
        return self._message(*split_sum(grad, residual, values), ctx)

    def _message(self, signs: Tensor, sums: Tensor, ctx: Context) -> Tensor:
        above, below, minuses = tensor_sums(sums, ctx.tensors.of_block, len(ctx.segments))
        means = (above / (ctx.tensors.numels - minuses).clamp(min=1), below / minuses.clamp(min=1))
        return encode_scaled(torch.stack(means), signs)

    def decode_into(self, out: Tensor, how: Put, message: Tensor, ctx: Context, rank: int) -> None:
        scales, signs = decode_scaled(message, 2 * len(ctx.segments), packed_bytes(ctx.numel, 1), rank, ctx.checks)
        above, below = scales.view(2, -1)
        put_signs(signs, above, below, ctx.tensors.of_block, out, how)

    def payload_bytes(self, ctx: Context) -> int:
        return scaled_bytes(2 * len(ctx.segments), packed_bytes(ctx.numel, 1))
