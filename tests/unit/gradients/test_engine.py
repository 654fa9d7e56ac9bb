"""The promises of the design, on simulated ranks."""

import copy
import functools
import itertools

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn
from torch.optim import SGD, AdamW
from torch.optim.lr_scheduler import OneCycleLR, StepLR

import dgcopt
from dgcopt.collectives import AllReduce
from dgcopt.comm import LocalComm
from dgcopt.gradients.synchronised import synchronised
from tests.support.worlds import (
    Ranks,
    bucket_of,
    context_of,
    flat_gradient,
    flat_memory,
    single,
    small_batch,
    small_model,
)


def assert_close(ours, theirs, **tolerance):
    for x, y in zip(ours, theirs, strict=True):
        torch.testing.assert_close(x, y, **tolerance)


# -- 1. conservation -------------------------------------------------------------------------------------------------


@settings(max_examples=25, deadline=None)
@given(
    size=st.sampled_from([2, 3, 5]),
    ratio=st.floats(0.001, 1.0),
    ratios=st.lists(st.floats(0.001, 1.0), max_size=3),
    values=st.sampled_from(["fp64", "fp32", "fp16", "bf16", "int8", "int4", "int2", "sign"]),
    indices=st.sampled_from(["int32", "rice"]),
    vectors=st.sampled_from(["dense", "sparse", "fp32", "int8", "int4", "sign"]),
    bucket_mb=st.sampled_from([0.0005, 25.0]),
)
def test_updates_and_residuals_add_up_to_the_gradients(size, ratio, ratios, values, indices, vectors, bucket_mb):
    warmup = dgcopt.Warmup(ratios=tuple(ratios), steps=1) if ratios else None
    compressor = dgcopt.DGC(ratio, warmup=warmup, values=values, indices=indices, vectors=vectors)
    ranks = Ranks(size, lambda p: SGD(p, lr=0.1), compression=compressor, bucket_mb=bucket_mb)
    computed, applied = 0.0, 0.0
    for seed in range(6):
        for optimizer in ranks.optimizers:
            optimizer.zero_grad()
        ranks.backward(seed)
        computed = computed + sum(flat_gradient(model) for model in ranks.models)
        for optimizer in ranks.optimizers:
            optimizer.synchronize()
        applied = applied + size * flat_gradient(ranks.models[0])
        for optimizer in ranks.optimizers:
            with optimizer.skip_synchronize():
                optimizer.step()
        ranks.assert_replicas_equal()
    held = 0.0
    for optimizer, model in zip(ranks.optimizers, ranks.models, strict=True):
        residual = optimizer.state_dict()["dgcopt"]["memory"].get("residual", {})
        held = held + flat_memory(model, residual)
    torch.testing.assert_close(applied + held, computed, rtol=1e-9, atol=1e-10)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize(
    "compressor",
    [
        dgcopt.DGC(0.2, vectors="sparse"),
        dgcopt.DGC(0.2, vectors="sparse", overlap=True),
        dgcopt.DGC(0.2, vectors="sparse", reduce="owner"),
        dgcopt.DGC(0.2, vectors="fp32"),
        dgcopt.TopK(0.2),
        dgcopt.TopK(0.2, reduce="partition"),
        dgcopt.Threshold(0.5),
        dgcopt.Hierarchical(dgcopt.TopK(0.2)),
        dgcopt.NoCompression(),  # of rows that are sparse already
    ],
    ids=lambda compressor: type(compressor).__name__,
)
def test_sums_of_half_precision_are_rounded_once(compressor, dtype):
    """Not after each rank: of many ranks that add the same, all would be lost that come once the sum is large."""
    sparse = isinstance(compressor, dgcopt.NoCompression)
    slopes = {torch.bfloat16: (256, 1, 1, 2), torch.float16: (2048, 1, 1, 2)}[dtype]  # with 1 more they stay the same
    params = [nn.Parameter(torch.zeros((5, 1) if sparse else (5,), dtype=dtype)) for _ in slopes]
    optimizers = [
        dgcopt.DistributedOptimizer(SGD([p], lr=0.0), [("p", p)], copy.deepcopy(compressor), comm=comm, op="sum")
        for p, comm in zip(params, dgcopt.simulated_world(len(slopes), 2), strict=True)
    ]
    for _ in range(2):  # laid out anew, then not
        for param, slope in zip(params, slopes, strict=True):
            param.grad = None
            row = nn.functional.embedding(torch.tensor([3]), param, sparse=True) if sparse else param[3]
            (row * slope).sum().backward()
        for optimizer in optimizers:
            optimizer.step()
        for param in params:
            assert param.grad.to_dense().view(-1).tolist() == [0, 0, 0, sum(slopes), 0]


def test_residuals_follow_their_parameters_into_new_buckets():
    """Freezing, unfreezing and adding parameters lays buckets out anew; nothing held back is lost."""
    ranks = Ranks(2, lambda p: SGD(list(p)[:4], lr=0.1), compression=dgcopt.DGC(0.02, values="fp64"))
    names = [name for name, _ in ranks.models[0].named_parameters()]
    computed = applied = 0.0
    for seed in range(8):
        for model, optimizer in zip(ranks.models, ranks.optimizers, strict=True):
            model.zero_grad()
            model[0].requires_grad_(seed not in (2, 3))
            if seed == 4:
                optimizer.add_param_group({"params": list(model[4].parameters())})
        ranks.backward(seed)
        for model in ranks.models if seed < 4 else ():
            model[4].zero_grad()
        computed = computed + sum(flat_gradient(model) for model in ranks.models)
        for optimizer in ranks.optimizers:
            optimizer.synchronize()
        applied = applied + 2 * flat_gradient(ranks.models[0])
        for optimizer in ranks.optimizers:
            with optimizer.skip_synchronize():
                optimizer.step()
        ranks.assert_replicas_equal()
    residuals = [optimizer.state_dict()["dgcopt"]["memory"]["residual"] for optimizer in ranks.optimizers]
    assert set(residuals[0]) == {name for name in names if name.endswith("weight")}
    held = sum(flat_memory(model, residual) for model, residual in zip(ranks.models, residuals, strict=True))
    torch.testing.assert_close(applied + held, computed, rtol=1e-9, atol=1e-10)


# -- 2. replicas -----------------------------------------------------------------------------------------------------


def test_replicas_are_bit_identical_after_every_step():
    clip, warmup = dgcopt.LocalClip(0.5), dgcopt.Warmup(ratios=(0.5, 0.1), steps=2)
    for compressor in (
        dgcopt.NoCompression(),
        dgcopt.FP16(),
        dgcopt.BF16(),
        dgcopt.DGC(0.01, overlap=True),
        dgcopt.DGC(0.02, warmup=warmup, values="fp16", clip=clip, overlap=True),
        dgcopt.DGC(0.02, values="bf16", momentum_masking=False, vectors="sparse"),
        dgcopt.DGC(0.05, values="int8", indices="rice", vectors="int8"),
        dgcopt.DGC(0.05, values="int2", indices="rice", vectors="int4", overlap=True),
    ):
        for make in (lambda p: SGD(p, lr=0.1, momentum=0.9, nesterov=True, weight_decay=1e-2), AdamW):
            ranks = Ranks(3, make, compression=compressor, bucket_mb=0.001, first_bucket_mb=0.0005)
            for seed in range(5):
                ranks.step(seed)
                ranks.assert_replicas_equal()


# -- 4. ratio 1 is dense, a world of one is bare ---------------------------------------------------------------------


@settings(max_examples=40, deadline=None)
@given(
    momentum=st.sampled_from([0.0, 0.5, 0.9]),
    nesterov=st.booleans(),
    dampening=st.sampled_from([0.0, 0.3]),
    weight_decay=st.sampled_from([0.0, 0.02]),
    maximize=st.booleans(),
    size=st.sampled_from([2, 3, 4]),
    compression=st.sampled_from([None, dgcopt.DGC(1.0), dgcopt.DGC(1.0, vectors="sparse")]),
)
def test_dense_is_large_batch_sgd(momentum, nesterov, dampening, weight_decay, maximize, size, compression):
    nesterov = nesterov and momentum > 0
    dampening = 0.0 if nesterov else dampening

    def make(params):
        return SGD(
            params, lr=0.05, momentum=momentum, nesterov=nesterov, dampening=dampening, weight_decay=weight_decay,
            maximize=maximize,
        )  # fmt: skip

    ranks = Ranks(size, make, compression=compression, bucket_mb=0.001, first_bucket_mb=0.001)
    for seed in range(5):
        ranks.step(seed)
    assert_close(ranks.weights(), single(make, 5), rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize("compression", [dgcopt.DGC(1.0), dgcopt.CSC(1.0)], ids=["DGC", "CSC"])
@pytest.mark.parametrize("own", [{"momentum": 0.9, "nesterov": True}, {}], ids=["Nesterov", "none"])
def test_dense_under_schedules_that_rewrite_momentum(own, compression):
    for when in ("before", "after"):
        schedulers = []

        def make(params):
            return SGD(params, lr=0.1, weight_decay=0.01, **own)

        def schedule(optimizer, schedulers=schedulers):
            schedulers.append(OneCycleLR(optimizer, max_lr=0.2, total_steps=9))
            return optimizer

        reference_model_weights = single_with_schedule(make, 7)
        ranks = Ranks(2, (lambda p: schedule(make(p))) if when == "before" else make, compression=compression)
        if when == "after":
            for optimizer in ranks.optimizers:
                schedule(optimizer)
        for seed in range(7):
            ranks.step(seed)
            for scheduler in schedulers:
                scheduler.step()
        assert_close(ranks.weights(), reference_model_weights, rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize("compression", [dgcopt.DGC(0.1), dgcopt.CSC(0.3, 64)], ids=["DGC", "CSC"])
def test_momentum_that_a_scheduler_sets_after_wrapping_is_corrected(compression):
    def trained(momentum):
        ranks = Ranks(2, lambda params: SGD(params, lr=0.1, momentum=momentum), compression=compression)
        schedulers = [OneCycleLR(optimizer, max_lr=0.2, total_steps=9) for optimizer in ranks.optimizers]
        for seed in range(7):
            ranks.step(seed)
            for scheduler in schedulers:
                scheduler.step()
        return ranks.weights()

    assert_close(trained(0.0), trained(0.9), rtol=0, atol=0)


def single_with_schedule(make, steps):
    schedulers = []

    def scheduled(params):
        optimizer = make(params)
        schedulers.append(OneCycleLR(optimizer, max_lr=0.2, total_steps=9))
        optimizer.register_step_post_hook(lambda *_: schedulers[0].step())
        return optimizer

    return single(scheduled, steps)


@pytest.mark.parametrize("compression", [dgcopt.DGC(1.0), dgcopt.CSC(1.0)], ids=["DGC", "CSC"])
@pytest.mark.parametrize("momenta", [(0.0, 0.0, 0.9, 0.8, 0.0, 0.9), (0.9, 0.0, 0.0, 0.9, 0.9, 0.9)], ids=str)
def test_dense_while_momentum_is_set_to_zero_and_back_and_buckets_change(momenta, compression):
    def changed(optimizer, step):
        optimizer.param_groups[0]["momentum"] = momenta[step]

    def make(params):
        return SGD(params, lr=0.1, momentum=momenta[0], weight_decay=0.01)

    def scheduled(params):
        optimizer, steps = make(params), itertools.count()
        optimizer.register_step_pre_hook(lambda *_: changed(optimizer, next(steps)))
        return optimizer

    ranks = Ranks(2, make, compression=compression)
    for seed in range(6):
        for optimizer in ranks.optimizers:
            changed(optimizer, seed)
            gradients = synchronised(optimizer).engine.gradients
            gradients.replace_layout(gradients.outgoing.layout.order)
        ranks.step(seed)
    assert_close(ranks.weights(), single(scheduled, 6), rtol=1e-9, atol=1e-12)


def test_momentum_of_sparse_rows_is_taken_over_into_a_dense_bucket():
    """A gradient that comes first after a reload does not say that the embedding's are sparse."""

    class Lookup(nn.Module):
        def __init__(self):
            super().__init__()
            self.table = nn.Parameter(torch.zeros(5, 3, dtype=torch.float64))

        def backward(self, seed, sparse):
            rows = torch.tensor([seed % 5, 2])
            nn.functional.embedding(rows, self.table, sparse=sparse).sum().mul(seed + 1.0).backward()

    def trained(sparse_first):
        models = [Lookup() for _ in range(2)]
        states = []
        for sparse in (sparse_first, False):
            optimizers = [
                dgcopt.DistributedOptimizer(
                    SGD(model.parameters(), lr=0.1, momentum=0.9), model.named_parameters(), dgcopt.DGC(1.0), comm=comm
                )
                for model, comm in zip(models, dgcopt.simulated_world(2), strict=True)
            ]
            for optimizer, state in zip(optimizers, states):  # noqa: B905  # none at first
                optimizer.load_state_dict(copy.deepcopy(state))
            for seed in range(2):
                for optimizer, model in zip(optimizers, models, strict=True):
                    optimizer.zero_grad()
                    model.backward(seed, sparse)
                for optimizer in optimizers:
                    optimizer.step()
            states = [optimizer.state_dict() for optimizer in optimizers]
        return [models[0].table.detach()]

    assert_close(trained(True), trained(False), rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize("maximize", [False, True])
@pytest.mark.parametrize(
    "units", [{}, {"op": "sum"}, {"gradient_predivide_factor": 2.0}], ids=["average", "sum", "predivided"]
)
@pytest.mark.parametrize(
    "compression",
    [dgcopt.DGC(1.0), dgcopt.CSC(1.0), dgcopt.Hierarchical(dgcopt.DGC(1.0))],
    ids=["DGC", "CSC", "Hierarchical"],
)
@pytest.mark.parametrize(
    "more", [{"nesterov": True}, {"dampening": 0.3, "weight_decay": 0.1}], ids=["Nesterov", "dampening"]
)
def test_momentum_gathered_before_wrapping_is_kept(compression, units, maximize, more):
    def trained(params, ranks=1):  # gradients are that many times as large
        decay = {"weight_decay": more["weight_decay"] * ranks} if "weight_decay" in more else {}
        optimizer = SGD(params, lr=0.05 / ranks, momentum=0.9, maximize=maximize, **more | decay)
        for param in optimizer.param_groups[0]["params"]:
            optimizer.state[param]["momentum_buffer"] = torch.full_like(param, 0.01 * ranks)
        return optimizer

    make = functools.partial(trained, ranks=4 if "op" in units else 1)
    ranks = Ranks(4, make, nodes=2, compression=compression, **units)
    for seed in range(3):
        ranks.step(seed)
    assert_close(ranks.weights(), single(trained, 3), rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize("nesterov", [False, True])
def test_momentum_of_sparse_gradients_gathered_before_wrapping_is_kept(nesterov):
    def make(params):
        return SGD(params, lr=0.05, momentum=0.9, nesterov=nesterov, maximize=True)

    def step(models, optimizers, rows):
        for model, optimizer, row in zip(models, optimizers, rows, strict=True):
            optimizer.zero_grad()
            model(torch.tensor(row)).square().mean().backward()
        for optimizer in optimizers:
            optimizer.step()

    bare, *tables = (nn.Embedding.from_pretrained(torch.ones(6, 2), freeze=False, sparse=True) for _ in range(3))
    alone, optimizers = make(bare.parameters()), []
    step([bare], [alone], [[1, 2]])
    for table, comm in zip(tables, dgcopt.simulated_world(2), strict=True):
        table.load_state_dict(bare.state_dict())
        optimizer = make(table.parameters())
        optimizer.load_state_dict(copy.deepcopy(alone.state_dict()))
        optimizers.append(dgcopt.DistributedOptimizer(optimizer, table.named_parameters(), dgcopt.DGC(0.1), comm=comm))
    for _ in range(2):
        step([bare], [alone], [[1, 3]])
        step(tables, optimizers, [[1], [3]])
    assert_close([tables[0].weight], [bare.weight], rtol=1e-6, atol=1e-6)


def test_a_world_of_one_is_the_bare_optimizer():
    def make(params):
        return SGD(params, lr=0.1, momentum=0.9)

    rank = Ranks(1, make, compression=dgcopt.DGC(0.001))
    StepLR(rank.optimizers[0], 1)
    for seed in range(4):
        rank.step(seed)
    for ours, bare in zip(rank.weights(), single(make, 4), strict=True):
        assert torch.equal(ours, bare)
    assert rank.optimizers[0].telemetry == dgcopt.Telemetry()
    assert not next(rank.models[0].parameters())._post_accumulate_grad_hooks


# -- accumulation ----------------------------------------------------------------------------------------------------


def test_accumulation_sends_once_per_step():
    def make(params):
        return SGD(params, lr=0.1, momentum=0.9)

    counted = Ranks(2, make, backward_passes_per_step=2)
    by_hand = Ranks(2, make)
    whole = Ranks(2, make)
    for seed in range(3):
        for ranks in (counted, by_hand):
            for optimizer in ranks.optimizers:
                optimizer.zero_grad()
        for half in range(2):
            backward_half(counted, seed, half)
            for optimizer in by_hand.optimizers if half == 0 else ():
                optimizer._accumulating = True
            backward_half(by_hand, seed, half)
            for optimizer in by_hand.optimizers:
                optimizer._accumulating = False
        for optimizer in [*counted.optimizers, *by_hand.optimizers]:
            optimizer.step()
        whole.step(seed)
    for ranks in (counted, by_hand):
        assert_close(ranks.weights(), whole.weights(), rtol=1e-9, atol=1e-12)
        assert ranks.optimizers[0].telemetry.sent_bytes == whole.optimizers[0].telemetry.sent_bytes
        assert ranks.optimizers[0].telemetry.steps == 3


def backward_half(ranks: Ranks, seed: int, half: int) -> None:
    inputs, targets = small_batch(seed=seed)
    for rank, model in enumerate(ranks.models):
        mine, want = inputs[rank::2][half::2], targets[rank::2][half::2]
        (nn.functional.cross_entropy(model(mine), want) / 2).backward()


def test_no_sync_is_the_same_as_counting():
    def make(params):
        return SGD(params, lr=0.1)

    ranks, whole = Ranks(2, make), Ranks(2, make)
    for optimizer in ranks.optimizers:
        optimizer.zero_grad()
    for half in range(2):
        for rank, (model, optimizer) in enumerate(zip(ranks.models, ranks.optimizers, strict=True)):
            inputs, targets = small_batch(seed=0)
            loss = nn.functional.cross_entropy(model(inputs[rank::2][half::2]), targets[rank::2][half::2]) / 2
            if half == 0:
                with optimizer.no_sync():
                    loss.backward()
            else:
                loss.backward()
    for optimizer in ranks.optimizers:
        optimizer.step()
    whole.step(0)
    assert_close(ranks.weights(), whole.weights(), rtol=1e-9, atol=1e-12)


# -- the update buffer -----------------------------------------------------------------------------------------------


def test_writing_to_averaged_gradients_does_not_leak_into_the_next_step():
    """The update buffer is cleared only where messages were added, unless somebody else wrote to it."""
    a = Ranks(2, lambda p: SGD(p, lr=0.1), compression=dgcopt.DGC(0.01))
    b = Ranks(2, lambda p: SGD(p, lr=0.1), compression=dgcopt.DGC(0.01))
    for seed in range(4):
        for ranks in (a, b):
            for optimizer in ranks.optimizers:
                optimizer.zero_grad(set_to_none=ranks is a)
            ranks.backward(seed)
            for optimizer in ranks.optimizers:
                optimizer.step()
        for model in b.models:
            for param in model.parameters():
                param.grad.add_(1e6)
    for ours, other in zip(a.weights(), b.weights(), strict=True):
        assert torch.equal(ours, other)


class FillsGaps(dgcopt.compressors.Compressor):
    """Leaves ones between parameters, in what it was given and in what it returns, and never meets them again."""

    def __init__(self, whole_model: bool = False) -> None:
        self.whole_model = whole_model

    def prepare(self, grads, contexts):
        for grad, ctx in zip(grads, contexts, strict=True):
            self.look_between_parameters(grad, ctx)

    def exchange(self, grad, ctx):
        self.look_between_parameters(grad, ctx)
        mean = yield AllReduce(grad.clone(), op=ctx.op)
        for flat in (grad, mean):
            between = torch.ones_like(flat)
            for segment in ctx.segments:
                between[segment.start : segment.stop] = 0
            flat += between
        return mean.to(torch.promote_types(mean.dtype, torch.float32))

    def look_between_parameters(self, grad, ctx):
        inside = sum(grad[segment.start : segment.stop].count_nonzero() for segment in ctx.segments)
        assert grad.count_nonzero() == inside, "a gradient has something between its parameters"


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("whole_model", [False, True])
@pytest.mark.parametrize("inside", [None, dgcopt.Hierarchical, dgcopt.FP16, dgcopt.DiLoCo])
def test_between_parameters_every_gradient_is_zero(inside, whole_model: bool, dtype: torch.dtype):
    """Whatever the last exchange has left there, from the first step to one after a step that nobody took."""
    compressor = FillsGaps(whole_model)
    settings = {"compression": compressor if inside in (None, dgcopt.DiLoCo) else inside(compressor)}
    ranks = Ranks(2, lambda p: SGD(p, lr=0.1), lambda: small_model(dtype), **settings)
    if inside is dgcopt.DiLoCo:
        outers = [SGD(model.parameters(), lr=0.1) for model in ranks.models]
        ranks.optimizers = [
            dgcopt.DiLoCo(1, compression=compressor).attach(outer, model.named_parameters(), comm)
            for outer, model, comm in zip(outers, ranks.models, dgcopt.simulated_world(2), strict=True)
        ]
    for seed in range(4):
        for optimizer in ranks.optimizers:
            optimizer.zero_grad()
        ranks.backward(seed)
        if seed == 2 and inside is not dgcopt.DiLoCo:
            next(ranks.models[0].parameters()).grad[0, 0] = torch.nan
        for optimizer in ranks.optimizers:
            optimizer.step()


def test_rounding_error_goes_back_into_the_residual():
    tensor = torch.randn(4000)
    for values in ("fp32", "fp16", "bf16"):
        bucket = bucket_of([tensor.view(40, 100)], "matrix")
        bucket.grad[: tensor.numel()] = tensor * 1e5  # beyond float16's range
        grad = bucket.grad.clone()
        compressor = dgcopt.DGC(0.1, values=values)
        context = context_of(bucket, 0, 1)
        (update,) = dgcopt.simulate([compressor.exchange(bucket.grad, context)])
        context.commit()
        update = update.add_to(torch.zeros_like(bucket.grad))
        torch.testing.assert_close(update + context.memory["residual"], grad, rtol=0, atol=0)
        assert torch.isfinite(update).all()


def test_channels_last_parameters():
    """Their gradients keep their memory order, and averages are those of the contiguous model."""

    def model(order):
        torch.manual_seed(3)
        return nn.Sequential(nn.Unflatten(1, (3, 2, 2)), nn.Conv2d(3, 4, 2), nn.Flatten(), nn.Linear(4, 5)).to(
            torch.float64, memory_format=order
        )

    trained = []
    for order in (torch.contiguous_format, torch.channels_last):
        ranks = Ranks(2, lambda p: SGD(p, lr=0.1, momentum=0.9), lambda order=order: model(order), compression=DGC_ALL)
        for seed in range(3):
            ranks.step(seed)
            ranks.assert_replicas_equal()
        for param in ranks.models[0].parameters():
            assert param.grad.stride() == param.stride()
        trained.append(ranks.weights())
    assert_close(*trained, rtol=1e-9, atol=1e-12)


DGC_ALL = dgcopt.DGC(1.0, vectors="sparse")


def test_ranks_ask_which_gradients_there_are_only_where_these_differ():
    """A parameter that is used nowhere, as in many models, costs no second round in every step."""
    ranks = Ranks(3, lambda p: SGD(p, lr=0.1), compression=dgcopt.DGC(0.1))
    asked = []
    for comm in ranks.comms:
        comm.start = lambda collective, start=comm.start: (asked.append(collective.label), start(collective))[1]
    for unused, count in (([], 0), ([0, 1, 2], 0), ([1], 3), ([0, 1], 3), ([0, 1, 2], 0)):
        for optimizer in ranks.optimizers:
            optimizer.zero_grad()
        ranks.backward()
        for rank in unused:
            ranks.models[rank][2].weight.grad = None
        before = ranks.weights()
        for optimizer in ranks.optimizers:
            optimizer.step()
        ranks.assert_replicas_equal()
        assert torch.equal(before[2], ranks.weights()[2]) == (len(unused) == 3)
        assert sum(label.endswith("gradients that there are") for label in asked) == count, unused
        asked.clear()


@pytest.mark.parametrize("fails", [False, True])
def test_a_step_without_gradients_is_expected_once(fails: bool):
    """A rank that waits moves the other one on, if that expects a step, but not once it was taken or has failed."""
    ranks = Ranks(2, lambda params: SGD(params, lr=0.1))
    ranks.step(0)
    engines = [synchronised(optimizer).engine for optimizer in ranks.optimizers]
    for optimizer, engine in zip(ranks.optimizers, engines, strict=True):
        optimizer.zero_grad()
        engine.expect_step()
    if fails:
        engines[1].abort()
    else:
        for optimizer in ranks.optimizers:
            optimizer.step()
        assert [engine.step for engine in engines] == [2, 2]
    with pytest.raises(dgcopt.CommError):
        ranks.optimizers[0].step()


class Surviving(LocalComm):
    """One rank that exchanges, as others may come back."""

    survives = True


def test_a_step_that_is_skipped_for_an_overflow_begins_anew():
    model = nn.Linear(3, 2)
    optimizer = dgcopt.DistributedOptimizer(SGD(model.parameters(), lr=0.1), model.named_parameters(), comm=Surviving())
    engine = synchronised(optimizer).engine
    model(torch.ones(1, 3)).sum().backward()
    assert not engine.skips_on_overflow() and engine.in_flight
    model.weight.grad[0, 0] = torch.inf
    assert engine.skips_on_overflow() and not engine.in_flight
