"""Natural compression (Horvath, Ho, Horvath, Sahu, Canini & Richtarik, 2019, arXiv:1905.10988)."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from ...coding.values import packed_bytes
from ...errors import PayloadError
from ...kernels import Put, put_powers, round_powers
from ..context import Context
from .base import Encoded

__all__ = ["Natural"]

_INFINITE = 255


@dataclass(eq=False)
class Natural(Encoded):
    """Rounds each coordinate at random to a neighbouring power of two, with an unchanged expectation.

        2^a <= |x| <= 2^(a+1):  send sign(x) * 2^a with probability (2^(a+1) - |x|) / 2^a, else sign(x) * 2^(a+1)

    A power of two is a float32 without mantissa, so sign and exponent are sent. Adding a random number below 2^23 to
    the bits of |x| carries into the exponent with exactly the probability of the formula. Numbers below 2^-126 become
    that or zero, with the same expectation; zero stays zero; magnitudes above 2^100 are sent as 2^100.

    Unbiased, without memory or scales: the noise is at most an eighth of the square of each coordinate. For tensors
    with values of very different magnitudes.

    Args:
        seed: seed of the random numbers.

    Costs one allgather of 9 bits per coordinate. Raises PayloadError for a damaged message. Source: Horvath, Ho,
    Horvath, Sahu, Canini & Richtarik, "Natural Compression for Distributed Deep Learning", arXiv:1905.10988.
    """

    seed: int = 0

    def encode(self, values: Tensor, ctx: Context) -> Tensor:
        return round_powers(values, ctx.key(self.seed))

    def decode_into(self, out: Tensor, how: Put, message: Tensor, ctx: Context, rank: int) -> None:
        if message.dtype != torch.uint8 or message.shape != (self.payload_bytes(ctx),):
            raise PayloadError(
                f"the message from rank {rank} has {message.numel()} bytes, but {ctx.numel} values take "
                f"{self.payload_bytes(ctx)}"
            )
        ctx.checks.expect(
            put_powers(message, out, how) < _INFINITE,
            lambda: f"the message from rank {rank} holds an infinite value: it was damaged on the way",
        )

    def payload_bytes(self, ctx: Context) -> int:
        return ctx.numel + packed_bytes(ctx.numel, 1)
