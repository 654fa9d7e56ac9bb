"""Compressors of a user's own, with the mistakes of a first attempt: the error names the mistake."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import dgcopt
from dgcopt import ConfigError, MismatchError
from dgcopt.collectives import AllGather, AllReduce
from dgcopt.testing import ConformanceError, check_compressor
from tests.support.worlds import Ranks, momentum_sgd


class Several(dgcopt.Compressor):
    def compress(self, grad, ctx):
        return grad.abs().topk(3)

    def decompress(self, payloads, ctx):
        return payloads


class Tensors(dgcopt.Compressor):
    def exchange(self, grad, ctx):
        total = yield grad
        return total


class Calls(dgcopt.Compressor):
    def exchange(self, grad, ctx):
        return AllReduce(grad)


class Plain(dgcopt.Compressor):
    def exchange(self, grad, ctx):
        return grad.sign()


class Kinds(dgcopt.Compressor):
    def exchange(self, grad, ctx):
        yield AllGather
        return grad


class Lengths(dgcopt.Compressor):
    def compress(self, grad, ctx):
        return grad[grad.abs() > 0.01]

    def decompress(self, payloads, ctx):
        return payloads.sum(0)


class Rounds(dgcopt.Compressor):
    def exchange(self, grad, ctx):
        for _ in range(ctx.rank + 1):
            grad = yield AllReduce(grad)
        return grad


class State(dgcopt.Compressor):
    waits = 0.0

    def exchange(self, grad, ctx):
        grad += self.waits
        sent = grad.sign()
        self.waits = float((grad - sent).mean())
        return (yield AllReduce(sent))


class Machines(dgcopt.Compressor):
    def exchange(self, grad, ctx):
        return (yield AllReduce(grad, group="machine"))


class Sparse(dgcopt.Compressor):
    def exchange(self, grad, ctx):
        return (yield AllReduce(grad.to_sparse()))


class Parts(dgcopt.Compressor):
    def exchange(self, grad, ctx):
        ctx.keep_residual(ctx.add_residual(grad)[:7])
        return (yield AllReduce(grad))


FIRST_ATTEMPTS = {
    Several: r"AllGather takes one tensor, not topk. Yield one collective per tensor",
    Tensors: r"exchange\(\) must yield collectives, such as dgcopt.collectives.AllReduce.* has yielded Tensor",
    Calls: r"exchange\(\) must be a generator.* has returned AllReduce",
    Plain: r"exchange\(\) must be a generator.* has returned Tensor.*yield from \(\)",
    Kinds: r"has yielded type",
    Machines: r"group must be one of world, node, across, .*, not 'machine'",
    Sparse: r"AllReduce takes a dense tensor, not layout torch.sparse_coo. Send its indices and values",
    Parts: r"a residual must have the shape of the gradient, \(\d+,\), not \(7,\)",
}
UNLIKE = {
    Lengths: r"rank 0 has \[bucket 0 .*: AllGather\[\d+ .*\], rank 1 has \[.*exchange them first and pad",
    Rounds: r"rank 0 has \[.*: no more collectives\], rank 1 has \[.*: AllReduce",
    State: r"rank 0 has \[compression: State\(waits.*keeps memory in its context",
}
"""Where ranks differ."""


@pytest.mark.parametrize("kind", FIRST_ATTEMPTS)
def test_a_first_attempt_is_told_what_it_lacks(kind: Any) -> None:
    ranks = Ranks(2, momentum_sgd, compression=kind())
    with pytest.raises(ConfigError, match=FIRST_ATTEMPTS[kind]):
        ranks.step()
    with pytest.raises(ConformanceError, match=FIRST_ATTEMPTS[kind]):
        check_compressor(kind(), sizes=(2,))


@pytest.mark.parametrize("kind", UNLIKE)
def test_a_first_attempt_that_does_otherwise_on_another_rank_is_told_so_on_all(kind: Any) -> None:
    ranks = Ranks(2, momentum_sgd, compression=kind())
    if kind is State:
        ranks.step()
    ranks.backward(1)
    for optimizer in ranks.optimizers:
        with pytest.raises(MismatchError, match=UNLIKE[kind]):
            optimizer.step()
    with pytest.raises(ConformanceError):
        check_compressor(kind(), sizes=(2,))


def test_the_last_residual_kept_in_a_step_counts() -> None:
    class Twice(dgcopt.EFSignSGD):
        def exchange(self, grad, ctx):
            result = yield from super().exchange(grad, ctx)
            ctx.keep_residual(torch.ones_like(grad))
            return result

    ranks = Ranks(2, momentum_sgd, compression=Twice())
    ranks.step()
    kept = ranks.optimizers[0].state_dict()["dgcopt"]["memory"]["residual"]
    assert all(bool((held == 1).all()) for held in kept.values())
