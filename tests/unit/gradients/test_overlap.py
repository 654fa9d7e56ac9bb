"""Exchanges in backward or at the step, and sparse or dense optimizer steps: the same bits."""

from contextlib import nullcontext
from unittest.mock import Mock

import pytest
import torch
from torch import Tensor, nn
from torch._subclasses import FakeTensorMode
from torch.optim import SGD, Optimizer

import dgcopt
from dgcopt.flat.buckets import build_buckets
from dgcopt.flat.gradient import GradientBucket
from dgcopt.gradients.layout import bucket_sizes
from dgcopt.gradients.settings import Settings
from dgcopt.gradients.synchronised import synchronised
from tests.support.worlds import Ranks, bucket_of, context_of, small_batch, small_model


@pytest.fixture(autouse=True)
def in_place(monkeypatch: pytest.MonkeyPatch) -> None:
    """No gradient is so small that it is copied."""
    monkeypatch.setattr("dgcopt.flat.gradient.SMALL", 1)


def odd_gradients(optimizer: Optimizer) -> None:
    """What the user's code may make of gradients before the step: other strides, None, and zero at one rank."""
    params = [param for group in optimizer.param_groups for param in group["params"]]
    params[0].grad = params[0].grad.t().contiguous().t()
    params[1].grad = torch.stack([params[1].grad] * 2, dim=1)[:, 0]
    params[2].grad = None
    params[3].grad = params[3].grad[0].expand(params[3].shape)


SETTINGS = [
    {"momentum": 0.9},
    {"momentum": 0.9, "nesterov": True, "maximize": True},
    {"momentum": 0.9, "weight_decay": 0.01, "dampening": 0.1},
    {"momentum": 0.0},
    {"momentum": 0.0, "weight_decay": 0.01},
    {"momentum": 0.9, "fused": True},
]


@pytest.mark.parametrize("settings", SETTINGS, ids=str)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_the_sparse_step_is_the_dense_one_to_the_bit(settings: dict, dtype: torch.dtype) -> None:
    """Also where only some ranks' scripts look at gradients before the step, which makes theirs a dense one."""

    def make(params) -> SGD:
        return SGD(params, lr=0.03, **settings)

    ranks = Ranks(2, make, lambda: small_model(dtype), compression=dgcopt.DGC(0.1, values="fp32"))
    seen = []
    ranks.optimizers[0].register_step_pre_hook(
        lambda optimizer, *_: seen.append([p.grad is not None for p in ranks.models[0].parameters()])
    )
    for seed in range(5):
        ranks.step(seed)
        ranks.assert_replicas_equal()
    assert len(seen) == 5 and all(map(all, seen))


RULES = [
    lambda p: SGD(p, lr=0.05, momentum=0.9),
    lambda p: SGD(p, lr=0.05, momentum=0.9, nesterov=True, weight_decay=0.01),
    lambda p: SGD(p, lr=0.05, momentum=0.9, dampening=0.2),
    lambda p: torch.optim.Adam(p, lr=0.01),
]


@pytest.mark.parametrize("make", RULES)
@pytest.mark.parametrize("settings", [{}, {"values": "int8", "indices": "rice", "vectors": "int8"}], ids=str)
def test_without_overlap_everything_is_the_same_to_the_bit(make, settings: dict) -> None:
    """Also where a parameter is unused, a step is void, or the ratio begins at one."""
    warmup = dgcopt.Warmup((1.0, 0.3), steps=2)
    worlds = [Ranks(2, make, compression=dgcopt.DGC(0.1, warmup, overlap=it, **settings)) for it in (True, False)]
    for seed in range(8):
        for ranks in worlds:
            for optimizer in ranks.optimizers:
                optimizer.zero_grad()
            ranks.backward(seed)
            for model in ranks.models:
                if seed == 5:
                    model[2].weight.grad = None
            if seed == 6:
                ranks.models[1][0].weight.grad[0, 0] = torch.inf
            for optimizer in ranks.optimizers:
                optimizer.step()
            ranks.assert_replicas_equal()
    for one, other in zip(worlds[0].weights(), worlds[1].weights(), strict=True):
        assert torch.equal(one, other)
    for one, other in zip(worlds[0].optimizers, worlds[1].optimizers, strict=True):
        assert one.telemetry.skipped == other.telemetry.skipped == 1
        torch.testing.assert_close(
            synchronised(one).engine.store.memory(), synchronised(other).engine.store.memory(), rtol=0, atol=0
        )


@pytest.mark.parametrize("first", [True, False])
def test_a_checkpoint_continues_to_the_bit_with_the_other_overlap(first: bool) -> None:
    def make(overlap: bool) -> Ranks:
        return Ranks(2, lambda p: SGD(p, lr=0.05, momentum=0.9), compression=dgcopt.DGC(0.1, overlap=overlap))

    straight, restored = make(first), make(not first)
    for seed in range(3):
        straight.step(seed)
    for one, other in zip(straight.optimizers, restored.optimizers, strict=True):
        other.load_state_dict(one.state_dict())
    for one, other in zip(straight.models, restored.models, strict=True):
        other.load_state_dict(one.state_dict())
    for seed in range(3, 6):
        straight.step(seed)
        restored.step(seed)
    for one, other in zip(straight.weights(), restored.weights(), strict=True):
        assert torch.equal(one, other)


@pytest.mark.parametrize("overlap, early", [("auto", False), (False, False), (True, True)])
def test_on_a_cpu_dgc_sends_early_only_if_it_is_told_to(overlap: bool | str, early: bool, caplog) -> None:
    compressor = dgcopt.DGC(0.1, overlap=overlap)
    with caplog.at_level("INFO", "dgcopt"):
        ranks = Ranks(2, lambda p: SGD(p, lr=0.05), compression=compressor)
    assert caplog.text.count("sends once the step is called for, as parameters are on a CPU") == 2 * (overlap == "auto")
    ranks.step(0)
    ranks.backward(1)
    engines = [synchronised(optimizer).engine for optimizer in ranks.optimizers]
    assert [bool(engine.launched) for engine in engines] == [early, early]
    assert compressor.overlaps(torch.device("cuda")) == (overlap is not False)


def test_with_overlap_memory_and_gradients_stay_as_they_are_until_the_step_has_succeeded() -> None:
    def kept(outcomes: list[bool]) -> dict[str, Tensor]:
        torch.manual_seed(0)
        param = nn.Parameter(torch.randn(40, 100))
        compressor = dgcopt.DGC(0.1, overlap=True)
        compressor.attach(SGD([param], lr=0.1, momentum=0.9))
        (bucket,) = build_buckets([("weight", param)], compressor.kind, 2**20, 2**20, None, GradientBucket)
        context = context_of(bucket, 0, 2)
        grad = torch.randn(40, 100)
        for succeeds in outcomes:
            param.grad = grad.clone()
            context.local = bucket.local(True, 1.0)
            before = {kind: (held, held.clone()) for kind, held in context.memory.items()}
            next(compressor.exchange(torch.empty(0), context))
            for kind, (held, values) in before.items():
                assert context.memory[kind] is held and torch.equal(held, values), kind
            assert torch.equal(param.grad, grad)
            context.commit() if succeeds else context.rollback()
            assert bool(param.grad.any()) != succeeds  # nobody else has to clear it
        return context.memory

    once, again = kept([True, True]), kept([True, False, False, True])
    for kind in ("momentum", "residual"):
        assert int((once[kind] != 0).sum()) == 4000 - 400
        assert torch.equal(once[kind], again[kind])


@pytest.mark.parametrize("layer", ["weight", "bias"])
@pytest.mark.parametrize("replaced", [False, True])
def test_gradients_are_sent_again_if_they_change_before_the_step(layer: str, replaced: bool) -> None:
    """Matrices are read in place, vectors are copied."""
    ranks, late = (Ranks(2, lambda p: SGD(p, lr=0.05), compression=dgcopt.DGC(0.1, overlap=o)) for o in (True, False))
    for each in (ranks, late):
        each.step(0)
        each.backward(1)
        param = getattr(each.models[1][2], layer)
        changed = 3 * param.grad if replaced else param.grad.mul_(3)
        while changed._version < param.grad._version:
            changed.mul_(1)  # torch has counted as many changes of the gradient that is replaced
        param.grad = changed
        for optimizer in each.optimizers:
            optimizer.step()
    assert [optimizer.telemetry.repeated for optimizer in ranks.optimizers] == [1, 1]
    assert all(map(torch.equal, ranks.weights(), late.weights()))


def test_a_change_of_the_compressor_sends_no_gradient_twice() -> None:
    ranks = Ranks(2, lambda p: SGD(p, lr=0.05), compression=dgcopt.DGC(0.1, overlap=True))
    ranks.step(0)
    for optimizer in ranks.optimizers:
        synchronised(optimizer).engine.gradients.change_compressor(Mock(keeps_residual=True))
    for seed in (1, 2):
        ranks.step(seed)
    assert [optimizer.telemetry.repeated for optimizer in ranks.optimizers] == [0, 0]


def test_a_launch_that_fails_in_backward_leaves_nothing_launched(monkeypatch: pytest.MonkeyPatch) -> None:
    ranks = Ranks(2, lambda p: SGD(p, lr=0.05), compression=dgcopt.DGC(0.1, overlap=True))
    ranks.step(0)
    with monkeypatch.context() as patch, pytest.raises(MemoryError):
        patch.setattr(dgcopt.DGC, "exchange", Mock(side_effect=MemoryError))
        ranks.backward(1)
    for optimizer in ranks.optimizers:
        optimizer.load_state_dict(optimizer.state_dict())  # refused while anything is in flight
    ranks.step(1)
    ranks.assert_replicas_equal()


def test_after_a_failure_no_optimizer_of_the_wire_launches_before_a_vote(monkeypatch: pytest.MonkeyPatch) -> None:
    """Other ranks may still be in the step that failed, and would take a bucket for one of theirs."""
    ranks = Ranks(2, lambda p: SGD(p, lr=0.05))
    others = [small_model() for _ in ranks.comms]
    beside = [
        dgcopt.DistributedOptimizer(SGD(model.parameters(), lr=0.05), comm=comm)
        for model, comm in zip(others, ranks.comms, strict=True)
    ]

    def launched(models: list[nn.Module], optimizers: list[Optimizer], failure: Exception | None = None) -> list[int]:
        for model, optimizer in zip(models, optimizers, strict=True):
            optimizer.zero_grad()
            model(small_batch()[0]).sum().backward()
        counts = [synchronised(optimizer).engine.launched for optimizer in optimizers]
        for optimizer in optimizers:
            with nullcontext() if failure is None else pytest.raises(type(failure)):
                optimizer.step()
        return counts

    both = [(ranks.models, ranks.optimizers), (others, beside)]
    counts = [launched(*each) for each in both * 3]
    assert counts[-2:] == [[1, 1], [1, 1]]
    with monkeypatch.context() as patch:
        patch.setattr("dgcopt.gradients.outgoing.OutgoingBuckets.launch_rest", Mock(side_effect=MemoryError))
        launched(*both[0], MemoryError())
    assert [launched(*each) for each in [both[1], *both]] == [[0, 0], [0, 0], [1, 1]]


def test_without_overlap_a_wire_that_fails_loses_no_gradient() -> None:
    torch.manual_seed(0)
    tensor, grad = torch.randn(40, 100), torch.randn(4000)
    bucket = bucket_of([tensor], "matrix")
    compressor = dgcopt.DGC(0.1, overlap=False)
    context = context_of(bucket, 0, 2)
    for _ in range(3):
        context.certain = True
        next(compressor.exchange(grad.clone().resize_(bucket.numel), context))
        context.rollback()
    torch.testing.assert_close(context.memory["residual"][:4000], 3 * grad)


def test_gradients_changed_after_the_exchange_are_stepped_as_they_are() -> None:
    def clipped(ranks: Ranks) -> Ranks:
        for seed in range(3):
            for optimizer in ranks.optimizers:
                optimizer.zero_grad()
            ranks.backward(seed)
            for optimizer in ranks.optimizers:
                optimizer.clip_grad_norm_(1e-3)
                for group in optimizer.param_groups:
                    for param in group["params"]:
                        param.grad.view(-1)[0] += 0.5  # most probably a coordinate that nobody has sent
                with optimizer.skip_synchronize():
                    optimizer.step()
        return ranks

    sparse, dense = (
        Ranks(2, lambda p: SGD(p, lr=0.1, momentum=0.9), compression=dgcopt.DGC(0.01, vectors="sparse"))
        for _ in range(2)
    )
    for optimizer in dense.optimizers:
        optimizer.register_step_pre_hook(lambda *_: None)
    for one, other in zip(clipped(sparse).weights(), clipped(dense).weights(), strict=True):
        assert torch.equal(one, other)


def test_buckets_on_cuda_are_few_where_each_is_compressed() -> None:
    """As each costs a hundred launches; a sum does not. Sizes that are asked for hold."""

    def sizes(compressor: dgcopt.Compressor, device: str, **given: float) -> tuple[float, float]:
        with FakeTensorMode():
            return bucket_sizes(Settings(**given), compressor, [("weight", torch.empty(4, 4, device=device))])

    assert sizes(dgcopt.DGC(), "cuda") == sizes(dgcopt.PowerSGD(), "cuda") == (1000.0, 250.0)
    assert sizes(dgcopt.DGC(), "cpu") == (100.0, 100.0)
    assert sizes(dgcopt.DGC(overlap=True), "cpu") == (25.0, 1.0)
    for device in ("cpu", "cuda"):
        assert sizes(dgcopt.NoCompression(), device) == sizes(dgcopt.BF16(), device) == (25.0, 1.0)
    assert sizes(dgcopt.DGC(), "cuda", bucket_mb=10.0) == (10.0, 10.0)
    assert sizes(dgcopt.DGC(), "cuda", bucket_mb=10.0, first_bucket_mb=20.0) == (10.0, 20.0)


@pytest.mark.parametrize("overlap, buckets", [(True, 2), (False, 1)])
def test_buckets_that_launch_at_the_step_are_not_cut_small(overlap: bool, buckets: int) -> None:
    """As nothing is gained by it, and every bucket costs messages. A size that is asked for holds either way."""

    def model() -> nn.Module:
        torch.manual_seed(1)
        return nn.Sequential(*(nn.Linear(2048, 2048, bias=False) for _ in range(3)))  # 17 MB each

    def count(**sizes: float) -> int:
        ranks = Ranks(2, lambda p: SGD(p, lr=0.1), model, compression=dgcopt.DGC(0.001, overlap=overlap), **sizes)
        for rank in ranks.models:
            rank(torch.zeros(1, 2048)).sum().backward()
        for optimizer in ranks.optimizers:
            optimizer.step()
        return len(synchronised(ranks.optimizers[0]).engine.layout.buckets)

    assert count() == buckets
    assert count(bucket_mb=1.0, first_bucket_mb=1.0) == 3
