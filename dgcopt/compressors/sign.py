"""One bit per coordinate: its sign (Bernstein et al., ICML 2018 and ICLR 2019; Karimireddy et al., ICML 2019)."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.optim import SGD, Optimizer

from ..coding.bits import aligned, packed_bytes
from ..coding.scaled import decode_scaled, encode_scaled, scaled_bytes
from ..coding.trits import put_trits, trit_bytes
from ..collectives import AllGather, AllToAll
from ..errors import ConfigError
from ..kernels import BLOCK, Put, majority, mix_signs, pack_signs, put_signs, split_signs, split_sum, tensor_sums
from .base import Compressor, GradientExchange
from .context import Context, at_least_float32
from .encoded import Encoded

__all__ = ["EFSignSGD", "SignSGD", "Signum"]


@dataclass(eq=False)
class SignSGD(Compressor):
    """Every rank votes on the sign of every coordinate: what is applied is +1, -1, or 0 for a tie.

        result = sign(sum over ranks of sign(g))

    lr is the step of every coordinate and has to be smaller than for SGD, near what Adam takes; op "sum" makes N of
    each vote. One bit cannot say zero: zeros vote + and - by turns, from rank to rank and step to step, so they cancel
    among an even number of ranks, or over two steps. Prefer EFSignSGD where the votes lose accuracy.

    Each rank counts the votes on its N-th part, as the paper's parameter server does on the whole.

    Costs an alltoall of 1 bit and an allgather of 1.6 bits per coordinate, however many ranks there are. Raises
    PayloadError for a damaged message. Source: Bernstein, Wang, Azizzadenesheli & Anandkumar, "signSGD", ICML 2018;
    Bernstein, Zhao, Azizzadenesheli & Anandkumar, "signSGD with Majority Vote", ICLR 2019.
    """

    def exchange(self, grad: Tensor, ctx: Context) -> GradientExchange:
        return (yield from majority_vote(pack_signs(grad, zero_is_minus(ctx)), grad, ctx))

    def payload_bytes(self, ctx: Context) -> int:
        part = part_of(ctx)
        return packed_bytes(ctx.size * part, 1) + trit_bytes(part)


@dataclass(eq=False)
class Signum(SignSGD):
    """The vote of SignSGD on the sign of each rank's momentum, which is less noisy than the gradient's.

        m = beta * m + (1 - beta) * g;  result = sign(sum over ranks of sign(m))

    The wrapped optimizer must have no momentum of its own: SGD with momentum is refused.

    Args:
        beta: how much of the momentum stays, in [0, 1); more for noisier gradients, 0 is SignSGD.

    Costs what SignSGD does, and memory for m. Raises ConfigError for a beta outside [0, 1) or an SGD with momentum,
    PayloadError for a damaged message. Source: Bernstein, Wang, Azizzadenesheli & Anandkumar, "signSGD", ICML 2018.
    """

    beta: float = 0.9

    def __post_init__(self) -> None:
        super().__post_init__()
        if not 0 <= self.beta < 1:
            raise ConfigError(f"beta must be at least 0 and below 1, not {self.beta!r}")

    def attach(self, optimizer: Optimizer) -> None:
        super().attach(optimizer)
        if isinstance(optimizer, SGD) and any(group["momentum"] for group in optimizer.param_groups):
            raise ConfigError(
                f"Signum votes on momentum already: give SGD momentum=0 and Signum the beta, here beta={self.beta}"
            )

    def exchange(self, grad: Tensor, ctx: Context) -> GradientExchange:
        before, m = ctx.advance("momentum", dtype=at_least_float32(grad.dtype))
        signs = mix_signs(before, self.beta, grad, 1 - self.beta, m, zero_is_minus(ctx))
        return (yield from majority_vote(signs, grad, ctx))


def zero_is_minus(ctx: Context) -> bool:
    """How zeros vote: by turns."""
    return (ctx.rank + ctx.step) % 2 == 1


def majority_vote(ballots: Tensor, result: Tensor, ctx: Context) -> GradientExchange:
    """The sign of the sum of the ranks' signs, written to `result`."""
    part = part_of(ctx)
    missing = packed_bytes(ctx.size * part, 1) - len(ballots)
    whole = torch.nn.functional.pad(ballots, (0, missing)) if missing else ballots
    votes = yield AllToAll(whole.view(ctx.size, -1))
    counted = yield AllGather(majority(votes))
    each, place = torch.tensor([ctx.size / ctx.divisor], device=result.device), torch.zeros_like(ctx.tensors.of_block)
    for rank, theirs in enumerate(counted):
        span = result[rank * part : (rank + 1) * part]
        put_trits(theirs, part, each, place[: -(-len(span) // BLOCK)], span, "set", rank)
    return result


def part_of(ctx: Context) -> int:
    """Of how many coordinates a rank counts the votes."""
    return aligned(-(-ctx.numel // ctx.size))


@dataclass(eq=False)
class EFSignSGD(Encoded):
    """The sign of every coordinate times the mean magnitude of its tensor; the error is added to the next gradient.

        v = e + g;  send sign(v) * ||v||_1 / n for each tensor of n coordinates;  e = v - what was sent

    Unlike SignSGD it converges where SGD does, at SGD's lr. Zero travels as +, and the error makes up for it.

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
        scales, signs = decode_scaled(message, len(ctx.segments), packed_bytes(ctx.numel, 1), rank)
        put_signs(signs, scales, scales, ctx.tensors.of_block, out, how)

    def payload_bytes(self, ctx: Context) -> int:
        return scaled_bytes(len(ctx.segments), packed_bytes(ctx.numel, 1))
