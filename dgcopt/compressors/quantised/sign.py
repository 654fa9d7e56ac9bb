"""Sign compressors, 1 bit per coordinate (Bernstein et al., ICML 2018 and ICLR 2019; Karimireddy et al., 2019)."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.optim import SGD, Optimizer

from ...coding.scaled import decode_scaled, encode_scaled, scaled_bytes
from ...coding.trits import put_trits, trit_bytes
from ...coding.values import aligned, packed_bytes
from ...collectives import AllGather, AllToAll, everyone
from ...errors import ConfigError
from ...flat.memory import at_least_float32
from ...kernels import BLOCK, Put, majority, mix_signs, pack_signs, put_signs, split_signs, split_sum, tensor_sums
from ..base import Compressor, GradientExchange
from ..context import Context
from .base import Encoded

__all__ = ["EFSignSGD", "SignSGD", "Signum"]


@dataclass(eq=False)
class SignSGD(Compressor):
    """Majority vote of all ranks on the sign of each coordinate: +1, -1, or 0 for a tie.

        result = sign(sum over ranks of sign(g))

    lr is the step of every coordinate and must be smaller than for SGD, near Adam's; op "sum" multiplies each result by
    N. One bit cannot code zero: zeros vote + and - alternately over ranks and steps, so they cancel for an even number
    of ranks, or over two steps. Use EFSignSGD if accuracy suffers.

    Each rank counts the votes of its N-th part, like the paper's parameter server for all.

    Costs an alltoall of 1 bit and an allgather of 1.6 bits per coordinate at any world size. Raises PayloadError for a
    damaged message. Source: Bernstein, Wang, Azizzadenesheli & Anandkumar, "signSGD", ICML 2018;
    Bernstein, Zhao, Azizzadenesheli & Anandkumar, "signSGD with Majority Vote", ICLR 2019.
    """

    def exchange(self, grad: Tensor, ctx: Context) -> GradientExchange:
        return (yield from majority_vote(pack_signs(grad, zero_is_minus(ctx)), grad, ctx))

    def payload_bytes(self, ctx: Context) -> int:
        part = part_of(ctx)
        return packed_bytes(ctx.size * part, 1) + trit_bytes(part)


@dataclass(eq=False)
class Signum(SignSGD):
    """SignSGD on the sign of each rank's momentum, which is less noisy than that of the gradient.

        m = beta * m + (1 - beta) * g;  result = sign(sum over ranks of sign(m))

    The wrapped optimizer must have no momentum of its own: SGD with momentum is refused.

    Args:
        beta: decay of the momentum, in [0, 1); larger for noisier gradients, 0 is SignSGD.

    Costs as much as SignSGD, plus memory for m. Raises ConfigError for a beta outside [0, 1) or an SGD with momentum,
    PayloadError for a damaged message. Source: Bernstein, Wang, Azizzadenesheli & Anandkumar, "signSGD", ICML 2018.
    """

    beta: float = 0.9

    def __post_init__(self) -> None:
        super().__post_init__()
        if not 0 <= self.beta < 1:
            raise ConfigError(f"beta must be at least 0 and below 1, not {self.beta!r}")

    def attach(self, optimizer: Optimizer) -> None:
        super().attach(optimizer)
        self.before_step(optimizer)

    def before_step(self, optimizer: Optimizer) -> None:
        # a scheduler may have set it since
        if isinstance(optimizer, SGD) and any(group["momentum"] for group in optimizer.param_groups):
            raise ConfigError(
                f"Signum votes on momentum already: give SGD momentum=0, a scheduler such as OneCycleLR "
                f"cycle_momentum=False, and Signum the beta, here beta={self.beta}"
            )

    def exchange(self, grad: Tensor, ctx: Context) -> GradientExchange:
        before, m = ctx.memory.advance("momentum", dtype=at_least_float32(grad.dtype))
        signs = mix_signs(before, self.beta, grad, 1 - self.beta, m, zero_is_minus(ctx))
        return (yield from majority_vote(signs, grad, ctx))


def zero_is_minus(ctx: Context) -> bool:
    """Return the vote of zeros, which alternates."""
    return (ctx.rank + ctx.step) % 2 == 1


def majority_vote(ballots: Tensor, result: Tensor, ctx: Context) -> GradientExchange:
    """Write the sign of the sum of all ranks' signs to `result`."""
    part = part_of(ctx)
    missing = packed_bytes(ctx.size * part, 1) - len(ballots)
    whole = torch.nn.functional.pad(ballots, (0, missing)) if missing else ballots
    votes = yield AllToAll(whole.view(ctx.size, -1))
    counted = yield AllGather(majority(votes))
    # one scale for all blocks, made on the device so that the host does not wait
    scale = result.new_full((1,), ctx.size / ctx.divisor, dtype=torch.float32)
    scale_of_block = torch.zeros_like(ctx.tensors.of_block)
    for rank, theirs in zip(everyone(ctx.rank, ctx.size), counted, strict=True):
        span = result[rank * part : (rank + 1) * part]
        blocks = scale_of_block[: -(-len(span) // BLOCK)]
        put_trits(theirs, part, scale, blocks, span, "set", rank, ctx.checks)
    return result


def part_of(ctx: Context) -> int:
    """Return the number of coordinates with votes that a rank counts."""
    return aligned(-(-ctx.numel // ctx.size))


@dataclass(eq=False)
class EFSignSGD(Encoded):
    """Sends the sign of each coordinate times its tensor's mean magnitude; the error is added to the next gradient.

        v = e + g;  send sign(v) * ||v||_1 / n for each tensor of n coordinates;  e = v - sent

    Unlike SignSGD it converges like SGD, at SGD's lr. Zero is sent as +, and the error corrects it.

    Costs one allgather of 1 bit per coordinate and 4 bytes per tensor. Raises PayloadError for a damaged message.
    Source: Karimireddy, Rebjock, Stich & Jaggi, "Error Feedback Fixes SignSGD and other Gradient Compression Schemes",
    ICML 2019, algorithm 1, with lr applied after the exchange.
    """

    error_feedback = True

    def encode(self, values: Tensor, ctx: Context) -> Tensor:
        return self._message(*split_signs(values), ctx)

    def encode_sum(self, grad: Tensor, residual: Tensor, values: Tensor, ctx: Context) -> Tensor:
        return self._message(*split_sum(grad, residual, values), ctx)

    def _message(self, signs: Tensor, sums: Tensor, ctx: Context) -> Tensor:
        above, below, _ = tensor_sums(sums, ctx.tensors.of_block, len(ctx.segments))
        return encode_scaled((above + below) / ctx.tensors.numels, signs)

    def decode_into(self, out: Tensor, how: Put, message: Tensor, ctx: Context, rank: int) -> None:
        scales, signs = decode_scaled(message, len(ctx.segments), packed_bytes(ctx.numel, 1), rank, ctx.checks)
        put_signs(signs, scales, scales, ctx.tensors.of_block, out, how)

    def payload_bytes(self, ctx: Context) -> int:
        return scaled_bytes(len(ctx.segments), packed_bytes(ctx.numel, 1))
