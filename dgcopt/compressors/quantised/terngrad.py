"""TernGrad (Wen, Xu, Yan, Wu, Wang, Chen & Li, NeurIPS 2017)."""

from __future__ import annotations

import math
from dataclasses import dataclass

from torch import Tensor

from ...coding.scaled import decode_scaled, encode_scaled, scaled_bytes
from ...coding.trits import put_trits, trit_bytes
from ...errors import ConfigError
from ...kernels import Put, round_trits, tensor_norms
from ..context import Context
from .base import Encoded

__all__ = ["TernGrad"]


@dataclass(eq=False)
class TernGrad(Encoded):
    """Rounds each coordinate to -s, 0 or s at random, with an unchanged expectation.

        s = min(max|g|, clip * sigma) of each tensor;  send sign(g) * s with probability min(1, |g| / s), else 0

    Unbiased except for clipping, and without memory: noisier than error feedback, but without delay.

    Args:
        clip: clip gradients at this many standard deviations of their tensor, which keeps s and the noise small.
            Smaller means less noise and more bias; None disables it. The deviation is about zero, so that a constant
            tensor is not clipped to nothing.
        seed: seed of the random numbers.

    Costs one allgather of 1.6 bits per coordinate and 4 bytes per tensor. Raises ConfigError for a clip that is not
    positive, PayloadError for a damaged message. Source: Wen, Xu, Yan, Wu, Wang, Chen & Li, "TernGrad", NeurIPS 2017:
    layer-wise ternarizing and gradient clipping, without sharing scalers among ranks.
    """

    clip: float | None = 2.5
    seed: int = 0

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.clip is not None and not 0 < self.clip < math.inf:
            raise ConfigError(f"clip must be a positive number of standard deviations, or None, not {self.clip!r}")

    def encode(self, values: Tensor, ctx: Context) -> Tensor:
        place, numels = ctx.tensors.of_block, ctx.tensors.numels
        scale, squares = tensor_norms(values, place, len(numels))
        if self.clip is not None:
            scale = scale.minimum(self.clip * (squares / numels).sqrt().float())
        return encode_scaled(scale, round_trits(values, scale, place, ctx.key(self.seed)))

    def decode_into(self, out: Tensor, how: Put, message: Tensor, ctx: Context, rank: int) -> None:
        scale, fields = decode_scaled(message, len(ctx.segments), trit_bytes(ctx.numel), rank, ctx.checks)
        put_trits(fields, ctx.numel, scale, ctx.tensors.of_block, out, how, rank, ctx.checks)

    def payload_bytes(self, ctx: Context) -> int:
        return scaled_bytes(len(ctx.segments), trit_bytes(ctx.numel))
