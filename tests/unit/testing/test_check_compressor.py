"""`check_compressor` finds each broken promise of a compressor and names the ranks."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

import dgcopt
from dgcopt.collectives import AllGather, AllReduce, Broadcast, SendRecv
from dgcopt.compressors import Compressor, Context, Encoded, Sparse
from dgcopt.testing import ConformanceError, check_compressor


class Drifts(dgcopt.Compressor):
    """Ranks that add up in their own order get other bits."""

    def exchange(self, grad: Tensor, ctx: Context):
        rows = yield AllGather(grad)
        return (rows.roll(ctx.rank, 0).sum(0)) / ctx.divisor


class Infinite(dgcopt.Compressor):
    """Divides by a norm that half precision cannot hold."""

    carrier = AllReduce

    def compress(self, grad: Tensor, ctx: Context) -> Tensor:
        return grad * (grad.half() ** 9).sum().to(grad.dtype)

    def decompress(self, payloads: Tensor, ctx: Context) -> Tensor:
        return payloads


class Divides(dgcopt.Compressor):
    """By its own mean, which is zero of zeros."""

    def exchange(self, grad: Tensor, ctx: Context):
        return (yield AllReduce(grad / grad.abs().sum() * grad.numel(), op=ctx.op))


class Averages(dgcopt.Compressor):
    """Whatever was asked."""

    def exchange(self, grad: Tensor, ctx: Context):
        return (yield AllReduce(grad, op="average"))


class Remembers(dgcopt.Compressor):
    """In a place that no roll-back reaches."""

    def exchange(self, grad: Tensor, ctx: Context):
        ctx.scratch["sum"] = ctx.scratch.get("sum", torch.zeros_like(grad)) + grad
        return (yield AllReduce(ctx.scratch["sum"].clone(), op=ctx.op))


class Loses(Sparse):
    """What it does not send, though it says that it keeps it."""

    error_feedback = False

    @property
    def conserves(self) -> bool:
        return True

    def select(self, v: Tensor, ctx: Context) -> Tensor:
        return torch.arange(0, len(v), 64)


class Understates(dgcopt.NoCompression):
    """Its bytes."""

    def payload_bytes(self, ctx: Context) -> int:
        return 2 * ctx.numel


class Counts(dgcopt.NoCompression):
    """Its copies."""

    def __repr__(self) -> str:
        return f"Counts({id(self)})"


class TooManyRounds(dgcopt.Compressor):
    """On some ranks."""

    def exchange(self, grad: Tensor, ctx: Context):
        for _ in range(1 + ctx.rank % 2):
            grad = yield AllReduce(grad, op=ctx.op)
        return grad


class Rounded(Encoded):
    """Sends neighbours a different message than the one it decodes itself."""

    error_feedback = True

    def encode(self, values: Tensor, ctx: Context) -> Tensor:
        return values.half()

    def decode(self, message: Tensor, ctx: Context, rank: int) -> Tensor:
        return message.double() * (1 if rank != ctx.rank else 1.001)


class Opposite(dgcopt.Compressor):
    """Uphill."""

    def exchange(self, grad: Tensor, ctx: Context):
        return -(yield AllReduce(grad, op=ctx.op))


class Silent(dgcopt.Compressor):
    """Sends everything, and applies nothing."""

    def exchange(self, grad: Tensor, ctx: Context):
        return 0 * (yield AllReduce(grad, op=ctx.op))


class Shifted(dgcopt.Compressor):
    """By one element."""

    def exchange(self, grad: Tensor, ctx: Context):
        return (yield AllReduce(grad, op=ctx.op)).roll(1)


class OfTheFirst(dgcopt.Compressor):
    """Rank's gradient only."""

    def exchange(self, grad: Tensor, ctx: Context):
        return (yield Broadcast(grad, root=0)) * (ctx.size / ctx.divisor)


class SumsTwice(dgcopt.Compressor):
    """N times what was asked."""

    def exchange(self, grad: Tensor, ctx: Context):
        return ctx.size * (yield AllReduce(grad, op=ctx.op))


class Floors(dgcopt.Compressor):
    """A scale, by a number that is zero in half precision."""

    def exchange(self, grad: Tensor, ctx: Context):
        scale = yield AllReduce(grad.abs().max().reshape(1).clamp(min=1e-12), op="max")
        return scale * (yield AllReduce(grad / scale, op=ctx.op))


class TrustsTheWire(dgcopt.Compressor):
    """To overwrite its message."""

    def exchange(self, grad: Tensor, ctx: Context):
        yield AllReduce(grad, op=ctx.op)
        return grad


class KeepsItsMessage(dgcopt.Compressor):
    """As the residual, though the wire overwrites it."""

    def exchange(self, grad: Tensor, ctx: Context):
        v = ctx.add_residual(grad)
        ctx.keep_residual(v)
        return (yield AllReduce(v, op=ctx.op))


class Lends(dgcopt.Compressor):
    """Its memory to the caller, who may overwrite a result."""

    def exchange(self, grad: Tensor, ctx: Context):
        momentum = ctx.memory.remember("momentum", grad)
        momentum += yield AllReduce(grad.to(momentum.dtype), op=ctx.op)
        return momentum


class Seeds(dgcopt.Compressor):
    """The random numbers of everybody."""

    def exchange(self, grad: Tensor, ctx: Context):
        torch.manual_seed(ctx.step)
        grad += 0.01 * torch.randn(ctx.numel, device=ctx.device, dtype=ctx.dtype)
        return (yield AllReduce(grad, op=ctx.op))


class SharesItsOwn(dgcopt.Compressor):
    """Threshold."""

    def exchange(self, grad: Tensor, ctx: Context):
        for segment in ctx.segments:
            ctx.memory.share("threshold", segment, segment.view(grad).abs().mean())
        return (yield AllReduce(grad, op=ctx.op))


class KeepsTheMean(dgcopt.Compressor):
    """In memory of which another number of ranks gets the sum."""

    def exchange(self, grad: Tensor, ctx: Context):
        mean = ctx.memory.remember("mean", grad)
        mean.mul_(0.9).add_((yield AllReduce(grad, op=ctx.op)))
        return mean.clone()


class CountsInPlace(dgcopt.Compressor):
    """The steps of its bucket, at a place that belongs to a parameter."""

    def exchange(self, grad: Tensor, ctx: Context):
        steps = ctx.memory.remember("steps", grad)
        steps[0] += 1
        if steps[0] != ctx.step + 1:
            raise ValueError("which step is this?")
        return (yield AllReduce(grad, op=ctx.op))


class Whole(dgcopt.Compressor):
    """Numbers only."""

    def exchange(self, grad: Tensor, ctx: Context):
        return (yield AllReduce(grad.sign().int(), op="sum"))


class TheFirst(Sparse):
    """Coordinates of each bucket; the residual of the others grows in every step."""

    def select(self, v: Tensor, ctx: Context) -> Tensor:
        return torch.arange(len(v) // 10)


class LargestOfHalf(Sparse):
    """By magnitude, though of the first half only."""

    def select(self, v: Tensor, ctx: Context) -> Tensor:
        return v[: len(v) // 2].abs().topk(len(v) // 10).indices.sort().values


class InTurn(Sparse):
    """Every tenth coordinate of each parameter, from another one on in each step."""

    def select(self, v: Tensor, ctx: Context) -> Tensor:
        return torch.cat([torch.arange(s.start, s.stop)[ctx.step % 10 :: 10] for s in ctx.segments])


@pytest.mark.parametrize(
    ("compressor", "failure"),
    [
        (Drifts(), "the same bits"),
        (Infinite(), "the same bits on all ranks, finite"),
        (Divides(), "zero, constant"),
        (Averages(), "a sum is size averages"),
        (Remembers(), "leaves no trace"),
        (Remembers(), "memory goes through a checkpoint"),
        (Loses(), "nothing is lost"),
        (Opposite(), "results follow"),
        (Silent(), "results follow"),
        (Shifted(), "results follow"),
        (OfTheFirst(), "results follow"),
        (Rounded(), "the same bits"),
        (Understates(), "bytes sent"),
        (Counts(), "settings can be compared"),
        (TooManyRounds(), "training with several buckets"),
        (SumsTwice(), "results of N ranks have the scale of one"),
        (Floors(), "zero, constant, tiny and huge gradients"),
        (TrustsTheWire(), "the same bits on all ranks, finite"),
        (KeepsItsMessage(), "the same bits on all ranks, finite"),
        (Lends(), "the same bits on all ranks, finite"),
        (Seeds(), "the same bits on all ranks, finite"),
        (SharesItsOwn(), "memory goes through a checkpoint"),
        (KeepsTheMean(), "memory moves to other buckets and ranks"),
        (CountsInPlace(), "memory moves to other buckets and ranks"),
        (Whole(), "the same bits on all ranks, finite"),
        (TheFirst(), "every coordinate has its turn"),
        (LargestOfHalf(), "every coordinate has its turn"),
    ],
    ids=lambda value: type(value).__name__ if isinstance(value, Compressor) else value,
)
def test_a_broken_one_is_caught_with_a_readable_report(compressor: Compressor, failure: str) -> None:
    with pytest.raises(ConformanceError) as caught:
        check_compressor(compressor, sizes=(2, 3))
    lines = [line for line in str(caught.value).splitlines() if line.strip().startswith(failure) or failure in line]
    assert lines and "rank(s): " in lines[0], str(caught.value)


def test_a_choice_by_position_is_fair_if_it_moves() -> None:
    assert not check_compressor(InTurn(), sizes=(1, 2)).failures


def test_a_swap_between_neighbours_is_no_average() -> None:
    class Swaps(dgcopt.Compressor):
        def exchange(self, grad: Tensor, ctx: Context):
            return (yield SendRecv(grad, to=ctx.rank ^ 1, source=ctx.rank ^ 1))

    with pytest.raises(ConformanceError, match="rank 1 got another result"):
        check_compressor(Swaps(), sizes=(2,))
