"""What is changed after an optimizer was wrapped: it takes effect, or is told with its name, on all ranks."""

from __future__ import annotations

import copy
import logging
from typing import Any

import pytest
import torch
from torch import nn
from worlds import Ranks, small_batch, small_model

import dgcopt
from dgcopt import ConfigError, MismatchError
from dgcopt.collectives import AllGather, AllReduce
from dgcopt.testing import ConformanceError, check_compressor


def sgd(params: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(params, lr=0.1, momentum=0.9)


def floats() -> nn.Module:
    return small_model(torch.float32)


# -- parameters ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("compression", [None, dgcopt.DGC(1.0), dgcopt.TopK(1.0, values="fp64")])
def test_parameters_that_are_cast_are_exchanged_as_they_are(compression: Any) -> None:
    """Gradients in float64 are not rounded to what they were before."""
    ranks = Ranks(2, lambda params: torch.optim.SGD(params, lr=0.1), floats, compression=compression)
    ranks.step()
    for model in ranks.models:
        model.double()
    whole = copy.deepcopy(ranks.models[0])
    for seed in range(1, 4):
        ranks.step(seed)
        ranks.assert_replicas_equal()
        inputs, targets = small_batch(seed=seed)
        loss = nn.functional.cross_entropy(whole(inputs), targets)
        grads = torch.autograd.grad(loss, list(whole.parameters()))
        for ours, theirs, grad in zip(ranks.models[0].parameters(), whole.parameters(), grads, strict=True):
            assert ours.grad is not None and ours.grad.dtype == torch.float64
            torch.testing.assert_close(ours.grad, grad, rtol=1e-9, atol=1e-12)
            theirs.data.sub_(grad, alpha=0.1)


def test_parameters_that_one_rank_has_cast() -> None:
    ranks = Ranks(2, sgd, floats)
    ranks.step()
    ranks.models[1].double()
    for model in ranks.models:
        model(torch.ones(1, 12, dtype=next(model.parameters()).dtype)).sum().backward()
    with pytest.raises(MismatchError, match=r"rank 0 has \[parameter 0\.weight: float32 .*rank 1 has .*float64"):
        ranks.optimizers[0].step()


def test_a_parameter_of_another_size_is_told_by_name() -> None:
    """What is kept of it, and its neighbours in flat memory, are where they were."""
    for numel in (3, 400):
        ranks = Ranks(2, sgd, compression=dgcopt.DGC(0.5))
        ranks.step()
        for model in ranks.models:
            model[4].bias.data = torch.zeros(numel, dtype=torch.float64)
            model[4].bias.grad = torch.zeros(numel, dtype=torch.float64)
        with pytest.raises(ConfigError, match=rf"'4\.bias' had 5 elements .* and has {numel}: make the optimizer anew"):
            ranks.optimizers[0].step()


@pytest.mark.parametrize("numel", [3, 400])
def test_an_averaged_parameter_of_another_size_is_told_by_name(numel: int) -> None:
    comms, models = dgcopt.simulated_world(2), [small_model() for _ in range(2)]
    optimizers = [
        dgcopt.LocalSGD(sgd(model.parameters()), every=1, named_parameters=model.named_parameters(), comm=comm)
        for model, comm in zip(models, comms, strict=True)
    ]
    for resized in (False, True):
        for model, optimizer in zip(models, optimizers, strict=True):
            if resized:
                model[4].bias.data = torch.zeros(numel, dtype=torch.float64)
                optimizer.zero_grad()
                with pytest.raises(ConfigError, match=rf"'4\.bias' had 5 elements .* and has {numel}"):
                    optimizer.step()
            else:
                model(torch.ones(1, 12, dtype=torch.float64)).sum().backward()
                optimizer.step()


def test_layers_that_were_replaced(caplog: pytest.LogCaptureFixture) -> None:
    ranks = Ranks(2, sgd)
    ranks.step()
    with caplog.at_level(logging.WARNING, "dgcopt"):
        for _ in range(2):
            ranks.backward()
            for model in ranks.models:  # as if that had been other parameters
                model.zero_grad()
            for optimizer in ranks.optimizers:
                optimizer.step()
    said = [record.getMessage() for record in caplog.records if "no parameter of this SGD" in record.getMessage()]
    assert len(said) == 2, "once on each rank"
    assert "zero_grad() came between it and step()" in said[0] and "are not the optimizer's any more" in said[0]


def test_buffers_that_one_rank_exchanges() -> None:
    ranks = Ranks(2, sgd, lambda: nn.Sequential(nn.Linear(12, 5), nn.BatchNorm1d(5)).double())
    ranks.models[1].load_state_dict(ranks.models[0].state_dict())
    dgcopt.sync_buffers(ranks.models[1], ranks.optimizers[1])
    ranks.backward()
    with pytest.raises(MismatchError, match=r"rank 0 has \[.*rank 1 has \[sync_buffers: broadcast, every 1 steps"):
        ranks.optimizers[0].step()


# -- settings --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", [dgcopt.TopK, dgcopt.DGC], ids=["sent during backward", "sent after the vote"])
def test_settings_that_one_rank_has_changed(kind: Any) -> None:
    ranks = Ranks(2, sgd, compression=kind(0.5))
    for seed in range(3):
        ranks.step(seed)
    ranks.optimizers[1].compressor.ratio = 0.1
    ranks.backward()
    with pytest.raises(MismatchError, match=r"rank 0 has \[compression: .*ratio=0\.5.*rank 1 has .*ratio=0\.1"):
        ranks.optimizers[0].step()


@pytest.mark.parametrize("kind", [dgcopt.TopK, dgcopt.DGC])
def test_settings_that_all_ranks_have_changed(kind: Any) -> None:
    ranks = Ranks(2, sgd, compression=kind(0.5, warmup=dgcopt.Warmup((0.7, 0.6))))
    for optimizer in ranks.optimizers:
        optimizer.compressor.set_steps_per_epoch(2)
    for seed in range(3):
        ranks.step(seed)
    for optimizer in ranks.optimizers:
        optimizer.compressor.set_steps_per_epoch(3)
    for seed in range(3, 8):
        ranks.step(seed)
        ranks.assert_replicas_equal()


@pytest.mark.parametrize("ratio", [0.5, 1.0])
def test_inf_makes_a_step_void_though_a_clip_by_value_would_make_it_finite(ratio: float) -> None:
    """Whenever its bucket leaves."""
    ranks = Ranks(2, sgd, compression=dgcopt.DGC(ratio, clip=dgcopt.LocalClip(value=0.5), overlap=True))
    for seed in range(2):
        ranks.step(seed)
    before = ranks.weights()
    hook = ranks.models[0][2].weight.register_hook(lambda grad: grad.fill_(torch.inf))
    ranks.step()
    hook.remove()
    assert [optimizer.telemetry.skipped for optimizer in ranks.optimizers] == [1, 1]
    assert all(map(torch.equal, ranks.weights(), before))


@pytest.mark.parametrize("comes", ["a new group", "an unfrozen layer"])
def test_what_is_trained_from_a_checkpoint_on_lies_where_it_does_without_one(comes: str) -> None:
    """As the order of parameters in buckets decides over last bits."""
    straight, resumed = Ranks(2, sgd), Ranks(2, sgd)
    for ranks in (straight, resumed):
        for model in ranks.models:
            model[2].requires_grad_(False)
    for seed in range(2):
        straight.step(seed)
    for ours, theirs in zip(straight.optimizers, resumed.optimizers, strict=True):
        theirs.load_state_dict(ours.state_dict())
    for ranks in (straight, resumed):
        for model, optimizer in zip(ranks.models, ranks.optimizers, strict=True):
            if comes == "a new group":
                torch.manual_seed(3)
                model.append(torch.nn.Linear(5, 5).double())
                optimizer.add_param_group({"params": list(model[-1].parameters())}, names=["5.weight", "5.bias"])
            else:
                model[2].requires_grad_(True)
        ranks.step()
    orders = [ranks.optimizers[0].state_dict()["dgcopt"]["order"] for ranks in (straight, resumed)]
    assert orders[0] == orders[1] and len(orders[0]) == 6


# -- compressors of one's own, as they come out at the first attempt -------------------------------------------------


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
    Several: r"AllGather takes one tensor, not topk: yield a collective for each",
    Tensors: r"exchange\(\) must yield collectives, such as AllReduce\(tensor\).* has yielded Tensor",
    Calls: r"exchange\(\) must be a generator.* has returned AllReduce",
    Plain: r"exchange\(\) must be a generator.* has returned Tensor.*yield from \(\)",
    Kinds: r"has yielded type",
    Machines: r"group must be one of world, node, across, .*, not 'machine'",
    Sparse: r"AllReduce takes a dense tensor, not one of layout torch.sparse_coo: send its indices and values",
    Parts: r"what is kept must have the shape of the gradient, \(\d+,\), not \(7,\)",
}
UNLIKE = {
    Lengths: r"rank 0 has \[bucket 0 .*: AllGather\[\d+ .*\], rank 1 has \[.*exchange them first and pad",
    Rounds: r"rank 0 has \[.*: no more collectives\], rank 1 has \[.*: AllReduce",
    State: r"rank 0 has \[compression: State\(waits.*belongs into its context",
}
"""Where ranks differ."""


@pytest.mark.parametrize("kind", FIRST_ATTEMPTS)
def test_a_first_attempt_is_told_what_it_lacks(kind: Any) -> None:
    ranks = Ranks(2, sgd, compression=kind())
    with pytest.raises(ConfigError, match=FIRST_ATTEMPTS[kind]):
        ranks.step()
    with pytest.raises(ConformanceError, match=FIRST_ATTEMPTS[kind]):
        check_compressor(kind(), sizes=(2,))


@pytest.mark.parametrize("kind", UNLIKE)
def test_a_first_attempt_that_does_otherwise_on_another_rank_is_told_so_on_all(kind: Any) -> None:
    ranks = Ranks(2, sgd, compression=kind())
    if kind is State:
        ranks.step()
    ranks.backward(1)
    for optimizer in ranks.optimizers:
        with pytest.raises(MismatchError, match=UNLIKE[kind]):
            optimizer.step()
    with pytest.raises(ConformanceError):
        check_compressor(kind(), sizes=(2,))


def test_what_is_kept_twice_is_what_is_kept_last() -> None:
    class Twice(dgcopt.EFSignSGD):
        def exchange(self, grad, ctx):
            result = yield from super().exchange(grad, ctx)
            ctx.keep_residual(torch.ones_like(grad))
            return result

    ranks = Ranks(2, sgd, compression=Twice())
    ranks.step()
    kept = ranks.optimizers[0].state_dict()["dgcopt"]["memory"]["residual"]
    assert all(bool((held == 1).all()) for held in kept.values())
