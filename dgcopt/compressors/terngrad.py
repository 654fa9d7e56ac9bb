"""TernGrad (Wen, Xu, Yan, Wu, Wang, Chen & Li, NeurIPS 2017)."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from ..coding.scaled import decode_scaled, encode_scaled, scaled_bytes
from ..coding.trits import pack_trits, trit_bytes, unpack_trits
from ..errors import ConfigError
from ..kernels import finite
from .context import Context
from .encoded import Encoded

__all__ = ["TernGrad"]


@dataclass(eq=False)
class TernGrad(Encoded):
    """Every coordinate becomes -s, 0 or s at random, so that its mean stays what it was.

        s = min(max|g|, clip * sigma) of each tensor;  send sign(g) * s with probability min(1, |g| / s), else 0

    Unbiased, but for what is clipped, and without memory: noisier than error feedback, and nothing arrives late.

    Args:
        clip: gradients beyond so many standard deviations of their tensor count as that, which keeps s and with it the
            noise small. Less for less noise and more bias; None for neither clipping nor bias. The deviation is taken
            about zero, or a tensor of one value would always be clipped to nothing.
        seed: of the random numbers.

    Costs one allgather of 1.6 bits per coordinate and 4 bytes per tensor. Raises ConfigError for a clip that is not
    positive, PayloadError for a damaged message. Source: Wen, Xu, Yan, Wu, Wang, Chen & Li, "TernGrad", NeurIPS 2017:
    layer-wise ternarizing and gradient clipping, without sharing scalers among ranks.
    """

    clip: float | None = 2.5
    seed: int = 0

    def __post_init__(self) -> None:
        if self.clip is not None and not 0 < self.clip < math.inf:
            raise ConfigError(f"clip must be a positive number of standard deviations, or None, not {self.clip!r}")

    def encode(self, values: Tensor, ctx: Context) -> Tensor:
        g, tensors = finite(values), ctx.tensors
        scale = tensors.amax(g)
        if self.clip is not None:
            relative = (g / tensors.spread(scale)).nan_to_num_(0)
            sigma = scale * (tensors.sum(relative.square_()) / tensors.numels).sqrt()
            scale = scale.minimum(self.clip * sigma)
        chance = torch.rand(len(g), generator=ctx.generator(self.seed, own=True)).to(g.device)
        kept = chance * tensors.spread(scale) < g.abs()
        return encode_scaled(scale, pack_trits(g.sign() * kept))

    def decode(self, message: Tensor, ctx: Context, rank: int) -> Tensor:
        scale, fields = decode_scaled(message, len(ctx.segments), trit_bytes(ctx.numel), rank)
        return unpack_trits(fields, ctx.numel, rank) * ctx.tensors.spread(scale)

    def payload_bytes(self, ctx: Context) -> int:
        return scaled_bytes(len(ctx.segments), trit_bytes(ctx.numel))
