"""What scripts written for Horovod or for a bare optimizer count on, on simulated ranks."""

import contextlib
import copy
import pickle
import sys
import warnings
from abc import ABC
from contextlib import nullcontext
from functools import partial
from typing import Any, ClassVar

import numpy as np
import pytest
import torch
from torch import nn
from torch.optim import SGD, Adam
from torch.optim.lr_scheduler import OneCycleLR, StepLR

import dgcopt
import dgcopt.hvd as hvd
from dgcopt.gradients.optimizer import ADDED, synchronised
from dgcopt.gradients.subclass import bare_class
from tests.support.worlds import Ranks, same, small_batch, small_model

SLOWDOWN = (
    "optimizer.step() called without optimizer.skip_synchronize() context after optimizer.synchronize(). This can "
    "cause training slowdown. You may want to consider using optimizer.skip_synchronize() context if you use "
    "optimizer.synchronize() in your code."
)


def momentum_sgd(params) -> SGD:
    return SGD(params, lr=0.1, momentum=0.9)


def weights_after(steps: int = 3, make=momentum_sgd, size: int = 2, **settings) -> list[torch.Tensor]:
    ranks = Ranks(size, make, **settings)
    for seed in range(steps):
        ranks.step(seed)
        ranks.assert_replicas_equal()
    return ranks.weights()


def assert_close(ours, theirs, tolerance: float = 1e-12) -> None:
    for x, y in zip(ours, theirs, strict=True):
        torch.testing.assert_close(x, y, rtol=tolerance, atol=tolerance)


# -- one object, as torch made it ------------------------------------------------------------------------------------


def test_names_of_parameters_and_class():
    ranks = Ranks(2, momentum_sgd)
    optimizer, model = ranks.optimizers[0], ranks.models[0]
    assert isinstance(optimizer, SGD) and type(optimizer).__name__ == "SGD" and type(optimizer).__doc__ == SGD.__doc__
    assert synchronised(optimizer).names == {param: name for name, param in model.named_parameters()}


@pytest.mark.parametrize("compression", [None, dgcopt.DGC(0.1)])
def test_pickled_it_is_the_bare_optimizer(compression):
    ranks = Ranks(2, momentum_sgd, compression=compression)
    schedules = [StepLR(optimizer, 1, gamma=0.5) for optimizer in ranks.optimizers]
    for seed in range(2):
        ranks.step(seed)
    schedules[0].step()
    optimizer = ranks.optimizers[0]
    twin = pickle.loads(pickle.dumps(optimizer))
    assert type(twin) is SGD and twin.param_groups[0]["lr"] == 0.05
    assert_close(twin.param_groups[0]["params"], ranks.weights(), 0)
    held = [state["momentum_buffer"] for state in optimizer.state.values() if "momentum_buffer" in state]
    assert_close([state["momentum_buffer"] for state in twin.state.values() if "momentum_buffer" in state], held, 0)


@pytest.mark.parametrize("compression", [None, dgcopt.DGC(0.1)])
def test_its_pickled_state_goes_on_alike(compression):
    first, second = (Ranks(2, momentum_sgd, compression=compression) for _ in range(2))
    for seed in range(2):
        first.step(seed)
    for here, there, ours, theirs in zip(second.optimizers, first.optimizers, second.models, first.models, strict=True):
        here.load_state_dict(pickle.loads(pickle.dumps(there.state_dict())))
        ours.load_state_dict(theirs.state_dict())
    for ranks in (first, second):
        ranks.step(2)
    assert_close(second.weights(), first.weights(), 0)


def test_a_deep_copy_trains_apart():
    ranks = Ranks(2, momentum_sgd, compression=dgcopt.DGC(0.1))
    ranks.step(0)
    before = ranks.weights()
    twins = copy.copy(ranks)
    pairs = [copy.deepcopy((m, o)) for m, o in zip(ranks.models, ranks.optimizers, strict=True)]
    twins.models, twins.optimizers = ([pair[place] for pair in pairs] for place in (0, 1))
    twins.step(1)
    twins.assert_replicas_equal()
    assert_close(ranks.weights(), before, 0)
    ranks.step(1)
    assert_close(ranks.weights(), twins.weights(), 0)
    assert not torch.equal(ranks.weights()[0], before[0])


# -- stepping --------------------------------------------------------------------------------------------------------


def test_a_step_after_synchronize_warns_once_and_sends_nothing():
    ranks = Ranks(2, momentum_sgd)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for seed in range(5):
            for optimizer in ranks.optimizers:
                optimizer.zero_grad()
            ranks.backward(seed)
            for optimizer in ranks.optimizers:
                optimizer.synchronize()
            sent = [optimizer.telemetry.sent_bytes for optimizer in ranks.optimizers]
            for optimizer in ranks.optimizers:
                optimizer.step()
            assert [optimizer.telemetry.sent_bytes for optimizer in ranks.optimizers] == sent
    assert [str(warning.message) for warning in caught] == [SLOWDOWN] * len(ranks.optimizers)
    assert {warning.filename for warning in caught} == {__file__}
    assert_close(ranks.weights(), weights_after(5), 0)


@pytest.mark.parametrize(
    ("make", "compression", "warm_up"),
    [
        (momentum_sgd, dgcopt.DGC(0.1), True),
        (momentum_sgd, dgcopt.DGC(0.1), False),
        (momentum_sgd, dgcopt.PerParameter({"*[02]*": dgcopt.DGC(0.1), "*": dgcopt.BF16()}), False),
        (partial(Adam, lr=0.01), dgcopt.TopK(0.1), False),
        (partial(Adam, lr=0.01), dgcopt.OneBitAdam(2), True),
        (partial(Adam, lr=0.01), dgcopt.OneBitAdam(2), False),
    ],
)
def test_a_step_without_an_exchange_is_the_optimizers_own(make, compression, warm_up: bool):
    """By hand, or after the warm-up of averaged weights: of gradients, no updates, and with its own momentum."""
    ranks = Ranks(2, make, compression=compression)
    if warm_up:
        for optimizer, model, comm in zip(ranks.optimizers, ranks.models, ranks.comms, strict=True):
            dgcopt.LocalSGD(optimizer, 100, None, 3, named_parameters=model.named_parameters(), comm=comm)
    for seed in range(3):
        ranks.step(seed)
    model, bare = pickle.loads(pickle.dumps((ranks.models[0], ranks.optimizers[0])))
    for seed in range(3, 6):
        for optimizer in (bare, *ranks.optimizers):
            optimizer.zero_grad()
        ranks.backward(seed)
        inputs, targets = small_batch(seed=seed)
        torch.nn.functional.cross_entropy(model(inputs[::2]), targets[::2]).backward()
        bare.step()
        for optimizer in ranks.optimizers:
            with nullcontext() if warm_up else optimizer.skip_synchronize():
                optimizer.step()
    assert_close(ranks.weights(), list(model.parameters()), 0)
    assert not torch.equal(ranks.weights()[0], ranks.weights(1)[0])


@pytest.mark.parametrize("block", ["no_sync", "skip_synchronize"])
def test_gradients_travel_no_more_after_a_warm_up_whatever_block_its_last_step_is_in(block):
    """Nor those of the steps that follow in such a block."""

    def train(within_block: bool) -> Ranks:
        ranks = Ranks(2, momentum_sgd)
        for optimizer, model, comm in zip(ranks.optimizers, ranks.models, ranks.comms, strict=True):
            dgcopt.LocalSGD(optimizer, 4, None, 3, named_parameters=model.named_parameters(), comm=comm)
        for seed in range(9):
            for optimizer in ranks.optimizers:
                optimizer.zero_grad()
            ranks.backward(seed)
            for optimizer in ranks.optimizers:
                if within_block and block == "skip_synchronize" and seed < 3:
                    optimizer.synchronize()
                with getattr(optimizer, block)() if within_block else nullcontext():
                    optimizer.step()
        return ranks

    plain, within = train(within_block=False), train(within_block=True)
    for rank in range(2):
        assert_close(within.weights(rank), plain.weights(rank), 0)
        assert within.optimizers[rank].telemetry.payload_bytes == plain.optimizers[rank].telemetry.payload_bytes
    assert not torch.equal(plain.weights(0)[0], plain.weights(1)[0])


def test_passes_are_not_counted_once_gradients_have_stopped_to_travel():
    ranks = Ranks(2, momentum_sgd, backward_passes_per_step=2)
    for optimizer, model, comm in zip(ranks.optimizers, ranks.models, ranks.comms, strict=True):
        dgcopt.LocalSGD(optimizer, 4, None, 1, named_parameters=model.named_parameters(), comm=comm)
    for passes in (2, 3, 1):
        for seed in range(passes):
            ranks.backward(seed)
        for optimizer in ranks.optimizers:
            optimizer.step()
    assert not torch.equal(ranks.weights(0)[0], ranks.weights(1)[0])


@pytest.mark.parametrize(
    "compression", [dgcopt.DGC(0.1), dgcopt.PerParameter({"*[02]*": dgcopt.DGC(0.1), "*": dgcopt.BF16()})]
)
def test_settings_and_gradients_are_as_they_were_after_a_step_that_raised(compression, monkeypatch):
    """Memory has moved and weights have not, or not all: training goes on from a checkpoint only."""

    def settings(optimizer):
        return [{key: value for key, value in group.items() if key != "params"} for group in optimizer.param_groups]

    ranks = Ranks(2, momentum_sgd, compression=compression)
    ranks.step(0)
    before = copy.deepcopy([settings(optimizer) for optimizer in ranks.optimizers])
    saved = copy.deepcopy([optimizer.state_dict() for optimizer in ranks.optimizers])
    for optimizer in ranks.optimizers:
        optimizer.zero_grad()
    ranks.backward(1)
    with monkeypatch.context() as patched:
        patched.setattr(sys.modules["torch.optim.sgd"], "sgd", lambda *_, **__: 1 / 0)
        for optimizer, model in zip(ranks.optimizers, ranks.models, strict=True):
            with pytest.raises(ZeroDivisionError):
                optimizer.step()
            assert all(param.grad is not None for param in model.parameters())
    assert [settings(optimizer) for optimizer in ranks.optimizers] == before
    with pytest.raises(dgcopt.InterruptedStep, match="Restore all ranks from a checkpoint"):
        ranks.step(2)
    for optimizer, state in zip(ranks.optimizers, saved, strict=True):
        optimizer.load_state_dict(state)
    ranks.step(2)
    ranks.assert_replicas_equal()


# -- compression as Horovod knows it ---------------------------------------------------------------------------------


class Halves:
    """Another library's compression: static methods, and a context of its own."""

    @staticmethod
    def compress(tensor):
        return (tensor / 2).half(), (tensor.dtype, 2)

    @staticmethod
    def decompress(tensor, ctx):
        dtype, factor = ctx
        return tensor.to(dtype) * factor


def test_a_class_with_static_methods():
    assert_close(weights_after(compression=Halves), weights_after(), 1e-3)
    assert not torch.equal(weights_after(compression=Halves)[0], weights_after()[0])


@pytest.mark.parametrize("source", ["dgcopt.hvd", "horovod.torch"])
def test_none_and_fp16(source: str):
    library = pytest.importorskip(source)
    assert_close(weights_after(compression=library.Compression.none), weights_after(), 0)
    assert_close(weights_after(compression=library.Compression.fp16), weights_after(compression=dgcopt.FP16()), 0)
    assert not torch.equal(weights_after(compression=library.Compression.fp16)[0], weights_after()[0])


# -- reduction -------------------------------------------------------------------------------------------------------


class Seen:
    """Keeps what would travel."""

    tensors: ClassVar[list[torch.Tensor]] = []

    @classmethod
    def compress(cls, tensor):
        cls.tensors.append(tensor.clone())
        return tensor, None

    @staticmethod
    def decompress(tensor, ctx):
        return tensor


def test_a_divisor_before_the_sum_changes_what_travels_but_not_what_comes_of_it():
    travelled = {}
    for factor in (1.0, 0.5, 4.0):
        Seen.tensors.clear()
        weights = weights_after(1, gradient_predivide_factor=factor, compression=Seen)
        travelled[factor] = torch.cat(Seen.tensors) * factor
        assert_close(weights, weights_after(1))
        assert_close([travelled[factor]], [travelled[1.0]])
        assert factor == 1 or not torch.equal(torch.cat(Seen.tensors), travelled[1.0])
    with pytest.raises(ValueError, match=r"gradient_predivide_factor not supported with op != Average"):
        weights_after(gradient_predivide_factor=2.0, op=hvd.Sum)


def test_a_sum_is_size_averages():
    def scaled(params):
        return SGD(params, lr=0.1 / 3, momentum=0.9)

    assert_close(weights_after(make=scaled, size=3, op=hvd.Sum), weights_after(size=3, op=hvd.Average))


def adasum(vectors: list[np.ndarray]) -> np.ndarray:
    """Adasum of 2^n vectors, from the paper's formula alone: of the first half's and the second half's Adasum."""
    if len(vectors) == 1:
        return vectors[0]
    half = len(vectors) // 2
    a, b = adasum(vectors[:half]), adasum(vectors[half:])
    dot, aa, bb = float(a @ b), float(a @ a), float(b @ b)
    return (1 - dot / (2 * aa) if aa else 1) * a + (1 - dot / (2 * bb) if bb else 1) * b


@pytest.mark.parametrize("size", [2, 4])
@pytest.mark.parametrize("make", [momentum_sgd, lambda params: Adam(params, lr=0.01)], ids=["sgd", "adam"])
def test_adasum_is_the_papers_formula_of_each_ranks_own_updates(size: int, make):
    ranks = Ranks(size, make, op=hvd.Adasum, bucket_mb=0.001)
    alone = [small_model() for _ in range(size)]
    optimizers = [make(model.parameters()) for model in alone]
    for seed in range(3):
        ranks.step(seed)
        ranks.assert_replicas_equal()
        start = [[param.detach().clone() for param in model.parameters()] for model in alone]
        inputs, targets = small_batch(seed=seed)
        for rank, (model, optimizer) in enumerate(zip(alone, optimizers, strict=True)):
            optimizer.zero_grad()
            nn.functional.cross_entropy(model(inputs[rank::size]), targets[rank::size]).backward()
            optimizer.step()
        for place, before in enumerate(start[0]):
            params = [list(model.parameters())[place] for model in alone]
            updates = [(param.detach() - before).numpy().ravel() for param in params]
            combined = before + torch.from_numpy(adasum(updates)).view_as(before)
            for param in params:
                param.data.copy_(combined)
        assert_close(ranks.weights(), list(alone[0].parameters()))


# -- what travels together -------------------------------------------------------------------------------------------


def with_unused() -> nn.Module:
    """A parameter that never gets a gradient, which in Horovod holds up the whole group that it is in."""
    model = small_model()
    model[2].unused = nn.Parameter(torch.ones(3, dtype=torch.float64))
    return model


@pytest.mark.parametrize("compression", [None, dgcopt.DGC(0.1)])
def test_groups_change_the_buckets_and_nothing_else(compression):
    settings = {
        "by size": lambda model: {},
        "by number": lambda model: {"groups": 3},
        "by list": lambda model: {"groups": [[model[0].weight, model[4].bias], [model[2].unused, model[4].weight]]},
    }
    buckets, weights = {}, {}
    for way, chosen in settings.items():
        ranks = Ranks(2, momentum_sgd, model=with_unused)
        ranks.models = [with_unused() for _ in ranks.models]
        ranks.optimizers = [
            dgcopt.DistributedOptimizer(
                momentum_sgd(model.parameters()), model.named_parameters(), compression, comm=comm, **chosen(model)
            )
            for model, comm in zip(ranks.models, dgcopt.simulated_world(2), strict=True)
        ]
        for seed in range(3):
            ranks.step(seed)
            ranks.assert_replicas_equal()
        layout = synchronised(ranks.optimizers[0]).engine.layout
        buckets[way] = {frozenset(segment.name for segment in bucket.segments) for bucket in layout.buckets}
        weights[way] = ranks.weights()
    assert buckets["by size"] != buckets["by number"] != buckets["by list"] != buckets["by size"]
    for way in ("by number", "by list"):
        assert_close(weights[way], weights["by size"], 0)


def test_the_old_name_of_a_number_of_groups():
    with pytest.warns(DeprecationWarning, match="groups=3"):
        old = Ranks(2, momentum_sgd, num_groups=3)
    new = Ranks(2, momentum_sgd, groups=3)
    ours, theirs = (synchronised(ranks.optimizers[0]).settings for ranks in (old, new))
    assert ours == theirs and theirs.groups


class Chosen(nn.Module):
    """Trains those elements of its parameter that an integer one names."""

    def __init__(self, which: tuple[int, ...] = (1, 3)) -> None:
        super().__init__()
        self.values = nn.Parameter(torch.ones(4, 5, dtype=torch.float64))
        self.which = nn.Parameter(torch.tensor(which, dtype=torch.int32), requires_grad=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x[:, :2] @ self.values[self.which.long()]


@pytest.mark.parametrize("compression", [None, dgcopt.DGC(0.1), dgcopt.TopK(0.5, source="update")])
def test_frozen_parameters_of_other_dtypes_are_left_alone(compression):
    """As Horovod's own tests hand them over."""
    ranks = Ranks(2, momentum_sgd, model=Chosen, compression=compression, check_replicas_every=1)
    for seed in range(3):
        ranks.step(seed)
    ranks.assert_replicas_equal()
    values, which = ranks.weights()
    assert which.tolist() == [1, 3] and values[0].eq(1).all() and not values[1].eq(1).any()
    twin = pickle.loads(pickle.dumps(ranks.optimizers[0].state_dict()))
    ranks.optimizers[0].load_state_dict(twin)


def test_state_is_loaded_between_passes_as_nothing_was_sent():
    """What was added up so far stays in `param.grad`, and passes are counted anew, as Horovod does."""
    first, second = (Ranks(2, momentum_sgd, compression=dgcopt.DGC(0.1), backward_passes_per_step=2) for _ in range(2))
    for ranks in (first, second):
        for seed in range(3):
            for optimizer in ranks.optimizers:
                optimizer.zero_grad()
            ranks.backward(seed)
            if ranks is second:
                for optimizer in ranks.optimizers:
                    optimizer.load_state_dict(optimizer.state_dict())
            ranks.backward(seed + 10)
            for optimizer in ranks.optimizers:
                optimizer.step()
    assert_close(second.weights(), first.weights(), 0)
    second.backward(3)
    for optimizer in second.optimizers:
        optimizer.load_state_dict(optimizer.state_dict())
    second.backward(4)
    second.backward(5)
    with pytest.raises(RuntimeError, match="computed 3 times"):
        second.backward(6)


def test_a_state_that_is_refused_changes_nothing():
    ranks = Ranks(2, momentum_sgd, compression=dgcopt.DGC(0.1))
    ranks.step(0)
    states = [optimizer.state_dict() for optimizer in ranks.optimizers]
    ranks.step(1)
    before = copy.deepcopy([optimizer.state_dict() for optimizer in ranks.optimizers])
    for optimizer, state in zip(ranks.optimizers, states, strict=True):
        more = [{**state["param_groups"][0], "params": [0, 1, 2]}]
        for groups in (more, more * 2):
            with pytest.raises(ValueError, match="loaded state dict"):
                optimizer.load_state_dict({**state, "param_groups": groups})
        shorter = {name: tensor[:1] for name, tensor in state["dgcopt"]["memory"]["residual"].items()}
        with pytest.raises(dgcopt.ConfigError, match="the state holds residual of shape"):
            optimizer.load_state_dict({**state, "dgcopt": {**state["dgcopt"], "memory": {"residual": shorter}}})
    assert same([optimizer.state_dict() for optimizer in ranks.optimizers], before)


@pytest.mark.parametrize(
    ("names", "dtype", "problem"),
    [
        (["0.weight", "more"], torch.float64, "two parameters cannot have one name"),
        (["more", "more"], torch.float64, "two parameters cannot have one name"),
        (["more"], torch.float64, "the group has 2 parameter"),
        ("ab", torch.float64, "the group has 2 parameter"),
        (["more", "extra"], torch.complex64, "parameter 'more' has dtype complex64"),
        (["more", "other"], torch.float64, "parameter 'other' matches none of PerParameter's patterns"),
    ],
)
def test_parameters_that_are_refused_are_not_added(names, dtype, problem: str):
    rules = dgcopt.PerParameter({"?.*": dgcopt.DGC(0.1), "[em]*": dgcopt.BF16()})
    for size in (1, 2):
        comms, models = dgcopt.simulated_world(size), [small_model() for _ in range(size)]
        named = [*models[0].named_parameters(), ("more?", nn.Parameter(torch.zeros(1)))]
        for comm, model in zip(comms, models, strict=True):
            named[:-1] = model.named_parameters()
            optimizer = dgcopt.DistributedOptimizer(momentum_sgd(model.parameters()), named, rules, comm=comm)
            before = dict(synchronised(optimizer).names)
            group = {"params": [nn.Parameter(torch.zeros(3, dtype=dtype)) for _ in range(2)]}
            with pytest.raises(dgcopt.ConfigError, match=problem):
                optimizer.add_param_group(group, names)
            assert len(optimizer.param_groups) == 1 and synchronised(optimizer).names == before
            optimizer.add_param_group({"params": [nn.Parameter(torch.zeros(3))]}, ["more"])
            assert [*synchronised(optimizer).names.values()] == [*before.values(), "more"]


def test_state_is_not_loaded_once_gradients_are_on_their_way():
    ranks = Ranks(2, momentum_sgd, backward_passes_per_step=2)
    for seed in range(2):
        ranks.backward(seed)
    for optimizer in ranks.optimizers:
        optimizer.step()
    for seed in range(2):
        ranks.backward(seed)
    with pytest.raises(dgcopt.ConfigError, match="finish the step first"):
        ranks.optimizers[0].load_state_dict(ranks.optimizers[0].state_dict())


class Rows(nn.Module):
    """Reads some rows of a table, other ones on every rank."""

    def __init__(self, sparse: bool) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.table = nn.EmbeddingBag(30, 5, mode="sum", sparse=sparse, dtype=torch.float64)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.table((10 * x).long().abs() % 30)


@pytest.mark.parametrize("kind", [SGD, torch.optim.Adagrad])
def test_sparse_gradients_as_dense_ones(kind: type):
    def make(params):
        return kind(list(params), lr=0.1)

    as_sparse = weights_after(make=make, model=lambda: Rows(True))
    as_dense = weights_after(make=make, model=lambda: Rows(True), sparse_as_dense=True)
    assert_close(as_dense, as_sparse)
    assert_close(as_dense, weights_after(make=make, model=lambda: Rows(False)))
    ranks = Ranks(2, make, model=lambda: Rows(True), sparse_as_dense=True)
    ranks.step(0)
    assert not ranks.models[0].table.weight.grad.is_sparse and synchronised(ranks.optimizers[0]).engine.layout.buckets


def test_sparse_adam_takes_sparse_gradients_also_where_they_travel_as_dense_ones():
    def make(params):
        return torch.optim.SparseAdam(list(params), lr=0.1)

    as_sparse = weights_after(make=make, model=lambda: Rows(True))
    assert_close(weights_after(make=make, model=lambda: Rows(True), sparse_as_dense=True), as_sparse)


@pytest.mark.parametrize("flavour", [{}, {"nesterov": True}, {"dampening": 0.3}])
def test_rows_have_momentum_too(flavour: dict):
    """Sparse gradients bypass DGC's memory, and the optimizer's own momentum with it."""

    def make(params):
        return SGD(list(params), lr=0.1, momentum=0.9, **flavour)

    bare = weights_after(make=make, model=lambda: Rows(True))
    assert_close(weights_after(make=make, model=lambda: Rows(True), compression=dgcopt.DGC(1.0)), bare)


def test_an_optimizer_whose_first_base_is_none() -> None:
    """As in other packages: Python refused to give an object of such a class ours."""

    class Descent(ABC, torch.optim.Optimizer):
        def __init__(self, params: Any) -> None:
            super().__init__(params, {"lr": 0.1})

        @torch.no_grad()
        def step(self, closure: Any = None) -> None:
            for param in self.param_groups[0]["params"]:
                param.sub_(param.grad, alpha=0.1)

    ranks, plain = Ranks(2, Descent), Ranks(2, lambda params: torch.optim.SGD(params, lr=0.1))
    for seed in range(2):
        ranks.step(seed)
        plain.step(seed)
    assert all(torch.equal(*pair) for pair in zip(ranks.weights(), plain.weights(), strict=True))
    assert type(pickle.loads(pickle.dumps(plain.optimizers[0]))) is torch.optim.SGD
    assert bare_class(copy.deepcopy(ranks.optimizers[0])) is Descent


@pytest.mark.parametrize("lr", [0.5, torch.tensor(0.5, dtype=torch.float64)], ids=["number", "tensor"])
@pytest.mark.parametrize("compression", [None, dgcopt.DGC(0.1, warmup=None)], ids=["dense", "DGC"])
def test_ranks_without_data_step_with_the_learning_rate_of_others(compression, lr):
    """Their schedulers stand still: replicas would drift apart."""
    batches = (2, 0, 9)
    ranks = Ranks(3, lambda params: SGD(params, copy.deepcopy(lr), momentum=0.9), compression=compression)
    schedules = [OneCycleLR(optimizer, max_lr=0.5, total_steps=12) for optimizer in ranks.optimizers]
    with contextlib.ExitStack() as loops:
        ends = [loops.enter_context(contextlib.ExitStack()) for _ in batches]
        for end, optimizer in zip(ends, ranks.optimizers, strict=True):
            end.enter_context(dgcopt.join(optimizer))
        for seed in range(9):
            for end, count in zip(ends, batches, strict=True):
                if count == seed:
                    end.close()
            active = [rank for rank, count in enumerate(batches) if seed < count]
            inputs, targets = small_batch(seed=seed)
            for rank in active:
                ranks.optimizers[rank].zero_grad()
                nn.functional.cross_entropy(ranks.models[rank](inputs[rank::3]), targets[rank::3]).backward()
            for rank in active:
                group = ranks.optimizers[rank].param_groups[0]
                before = float(group["lr"])
                ranks.optimizers[rank].step()
                assert rank != active[0] or float(group["lr"]) == before, "taken from a rank without data"
                schedules[rank].step()
    ranks.assert_replicas_equal()


class Taken(torch.optim.Optimizer):
    """Momentum-free descent whose attributes and private methods have names that a wrapper might use."""

    FREE = (
        "mode",
        "comm",
        "engine",
        "wrapped",
        "names",
        "parameter_names",
        "bare",
        "bare_step",
        "settings",
        "optimizer",
    )
    METHODS = ("_join", "_restore", "_connect", "_average", "_end_step", "_use_gradients", "_within", "_named")

    def __init__(self, params: Any, lr: float = 0.1) -> None:
        super().__init__(params, {"lr": lr})
        vars(self).update({name: f"my {name}" for name in self.FREE})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        self.check()
        for group in self.param_groups:
            for param in group["params"]:
                if param.grad is not None:
                    param.sub_(param.grad, alpha=group["lr"])

    def check(self) -> None:
        assert all(vars(self)[name] == f"my {name}" for name in self.FREE)
        assert all(getattr(self, name)() == f"my {name}" for name in self.METHODS)


for method in Taken.METHODS:
    setattr(Taken, method, lambda self, *args, method=method: f"my {method}")


@pytest.mark.parametrize("compression", [None, dgcopt.DGC(0.1), dgcopt.Adasum()])
def test_attributes_and_methods_of_an_optimizer_stay_its_own(compression):
    """It is averaged like one without them."""
    ranks = Ranks(2, Taken, compression=compression)
    plain = Ranks(2, lambda params: SGD(params, lr=0.1), compression=compression)
    for seed in range(3):
        ranks.step(seed)
        plain.step(seed)
    ranks.assert_replicas_equal()
    assert_close(ranks.weights(), plain.weights())
    optimizer = ranks.optimizers[0]
    optimizer.check()
    assert {*vars(optimizer)} - {*vars(Taken([torch.nn.Parameter(torch.ones(1))]))} == {"_dgcopt"}


@pytest.mark.parametrize("name", ADDED)
@pytest.mark.parametrize("where", ["object", "class"])
def test_a_public_name_that_an_optimizer_has_already_is_refused(name, where):
    kind = type("Mine", (SGD,), {name: lambda self: None} if where == "class" else {})
    optimizer = kind([torch.nn.Parameter(torch.ones(2))], lr=0.1)
    if where == "object":
        setattr(optimizer, name, 1)
    with pytest.raises(dgcopt.ConfigError, match=rf"Mine has an attribute '{name}' of its own"):
        dgcopt.DistributedOptimizer(optimizer, comm=dgcopt.simulated_world(2)[0])
    assert type(optimizer) is kind


def test_an_attribute_averaging_of_its_own():
    """Gradients are averaged; weights are not, since `optimizer.averaging` would be replaced."""
    optimizer = SGD([torch.nn.Parameter(torch.ones(2))], lr=0.1)
    optimizer.averaging = True
    comm = dgcopt.simulated_world(2)[0]
    with pytest.raises(dgcopt.ConfigError, match="SGD has an attribute 'averaging' of its own"):
        dgcopt.LocalSGD(optimizer, 2, comm=comm)
    dgcopt.DistributedOptimizer(optimizer, comm=comm)
    dgcopt.sync_buffers(torch.nn.BatchNorm1d(2), optimizer)
    assert optimizer.averaging is True


class SAM(torch.optim.Optimizer):
    """Sharpness-aware minimization in two steps, without `step`, as scripts write it."""

    def __init__(self, params: Any, lr: float = 0.1, rho: float = 0.05) -> None:
        super().__init__(params, {"rho": rho})
        self.base_optimizer = SGD(self.param_groups, lr=lr, momentum=0.9)
        self.param_groups = self.base_optimizer.param_groups

    @torch.no_grad()
    def first_step(self) -> None:
        params = [param for group in self.param_groups for param in group["params"]]
        norm = torch.stack([param.grad.norm() for param in params]).norm()
        for param in params:
            self.state[param]["old"] = param.data.clone()
            param.add_(param.grad, alpha=0.05 / float(norm))
        self.zero_grad()

    def descend(self) -> None:
        for group in self.param_groups:
            for param in group["params"]:
                param.data = self.state[param]["old"]

    def second_step(self) -> None:
        """After `descend`, which simulated ranks do before any of them steps."""
        self.base_optimizer.step()
        self.zero_grad()


@pytest.mark.parametrize("compression", [None, dgcopt.TopK(0.2), dgcopt.DGC(0.2)])
def test_an_optimizer_that_steps_by_other_methods_is_noticed(compression, caplog):
    """Weights move, and nothing is sent: said once a rank. With the one inside it wrapped, ranks stay together."""
    for what in ("outside", "synchronised", "inside"):
        comms, models = dgcopt.simulated_world(2), [small_model() for _ in range(2)]
        sams = [SAM(model.parameters()) for model in models]
        wrapped = sams if what != "inside" else [sam.base_optimizer for sam in sams]
        for optimizer, model, comm in zip(wrapped, models, comms, strict=True):
            dgcopt.DistributedOptimizer(optimizer, model.named_parameters(), compression, comm=comm)
        caplog.clear()
        for seed in range(4):
            for methods in (["first_step"], ["descend", "second_step"]):
                inputs, targets = small_batch(seed=seed)
                for rank, model in enumerate(models):
                    nn.functional.cross_entropy(model(inputs[rank::2]), targets[rank::2]).backward()
                for optimizer in wrapped if what == "synchronised" else ():
                    optimizer.synchronize()
                for method in methods:
                    for sam in sams:
                        getattr(sam, method)()
        weights = [[param.detach() for param in model.parameters()] for model in models]
        told = [
            record.getMessage()
            for record in caplog.records
            if "this SAM's step() was not called" in record.getMessage()
        ]
        assert all(map(torch.equal, *weights)) == (what != "outside")
        assert len(told) == (2 if what == "outside" else 0)
        if told:
            assert "sam.base_optimizer = dgcopt.DistributedOptimizer(sam.base_optimizer, ...)" in told[0]


def test_backward_passes_without_a_step_that_are_meant(caplog):
    """Gradients that are looked at, accumulated, or made by a loop within the loop in no_sync()."""
    ranks = Ranks(2, momentum_sgd)
    for seed in range(12):
        ranks.backward(seed)
        if seed % 3:
            for optimizer in ranks.optimizers:
                optimizer.zero_grad()
    every = [param for model in ranks.models for param in model.parameters()]
    before = [weight.detach().clone() for weight in every]
    with contextlib.ExitStack() as inside, torch.no_grad():
        for optimizer in ranks.optimizers:
            inside.enter_context(optimizer.no_sync())
        for seed in range(8):
            with torch.enable_grad():
                ranks.backward(seed)
            for weight in every:
                weight.sub_(weight.grad, alpha=0.1)
        for weight, old in zip(every, before, strict=True):
            weight.copy_(old)
    for seed in range(5):
        ranks.step(seed)
        for weight in every:
            weight.detach().mul_(0.99)
    ranks.assert_replicas_equal()
    assert not [record for record in caplog.records if "was not called" in record.getMessage()]


class Around(torch.optim.Optimizer):
    """A wrapper that leaves out torch's own `__init__`: it makes gradients of each parameter orthogonal to it."""

    def __init__(self, inner: torch.optim.Optimizer) -> None:
        self.inner = inner
        self.param_groups, self.state, self.defaults = inner.param_groups, inner.state, inner.defaults
        self._optimizer_step_pre_hooks, self._optimizer_step_post_hooks = {}, {}

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for param in (param for group in self.param_groups for param in group["params"]):
            along = (param * param.grad).sum() / (param * param).sum()
            param.grad.sub_(param, alpha=float(along))
            param.mul_(1 - 0.01 * float(param.grad.norm()))  # as TRAC and Magma move weights by local gradients
        self.inner.step()


@pytest.mark.parametrize("compression", [None, dgcopt.TopK(0.2), dgcopt.DGC(0.2)])
def test_a_wrapper_around_an_optimizer_is_put_around_the_wrapped_one(compression):
    """Averaged first, ranks stay together."""
    wrapper = Around(SGD(small_model().parameters(), 0.1))
    with pytest.raises(
        dgcopt.ConfigError, match=r"Around .* goes around SGD. Wrap that one \(optimizer\.inner\) before"
    ):
        dgcopt.DistributedOptimizer(wrapper, comm=dgcopt.simulated_world(2)[0])
    ranks = Ranks(2, momentum_sgd, compression=compression)
    around = [Around(optimizer) for optimizer in ranks.optimizers]
    for seed in range(4):
        for optimizer in ranks.optimizers:
            optimizer.zero_grad()
        ranks.backward(seed)
        for optimizer in ranks.optimizers:
            optimizer.synchronize()
        for wrapper, optimizer in zip(around, ranks.optimizers, strict=True):
            with optimizer.skip_synchronize():
                wrapper.step()
    ranks.assert_replicas_equal()


class WithoutHooks(SGD):
    """Saves and loads state by itself, as bitsandbytes' optimizers load theirs."""

    def state_dict(self) -> dict[str, Any]:
        params = [param for group in self.param_groups for param in group["params"]]
        state = {place: self.state[param] for place, param in enumerate(params) if param in self.state}
        groups = [{**group, "params": [*range(len(group["params"]))]} for group in self.param_groups]
        return {"state": state, "param_groups": groups}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        saved = copy.deepcopy(state_dict)
        params = [param for group in self.param_groups for param in group["params"]]
        groups = [
            {**new, "params": old["params"]} for new, old in zip(saved["param_groups"], self.param_groups, strict=True)
        ]
        state = {params[place]: kept for place, kept in saved["state"].items()}
        self.__setstate__({"state": state, "param_groups": groups})


def test_an_optimizer_whose_state_is_saved_and_loaded_without_hooks():
    """What ranks hold back is in its state, and restored."""
    make, resume = [Ranks(2, lambda p: WithoutHooks(p, 0.1, 0.9), compression=dgcopt.TopK(0.1)) for _ in range(2)]
    for seed in range(3):
        make.step(seed)
    for ours, theirs, mine, yours in zip(make.optimizers, resume.optimizers, make.models, resume.models, strict=True):
        yours.load_state_dict(mine.state_dict())
        state = ours.state_dict()
        assert ours.residual_norm() > 0 and state["dgcopt"]["step"] == 3
        theirs.load_state_dict(state)
        assert same(theirs.state_dict()["dgcopt"]["memory"], state["dgcopt"]["memory"])
        assert not any(key.startswith("dgcopt") for o in (ours, theirs) for group in o.param_groups for key in group)
    for seed in range(3, 6):
        make.step(seed)
        resume.step(seed)
    assert_close(make.weights(), resume.weights(), 0)


def test_averaging_notices_state_that_was_loaded_without_hooks(caplog):
    for kind, told in ((WithoutHooks, 1), (SGD, 0)):
        caplog.clear()
        model = small_model()
        optimizer = dgcopt.SlowMo(kind(model.parameters(), 0.1), comm=dgcopt.simulated_world(1)[0])
        for _ in range(2):
            model(small_batch()[0]).square().sum().backward()
            optimizer.step()
            optimizer.load_state_dict(SGD.state_dict(optimizer))
        optimizer.step()
        assert sum("without torch's load_state_dict hooks" in text for text in caplog.messages) == 2 * told


@pytest.mark.parametrize("rule", [dgcopt.LocalSGD(2), dgcopt.DiLoCo(2)])
def test_schedule_free_optimizers_are_not_averaged(rule):
    """They keep a second set of weights in their state."""
    kind = type("SGDScheduleFree", (SGD,), {"train": lambda self: None, "eval": lambda self: None})
    optimizer = kind([nn.Parameter(torch.ones(2))], 0.1)
    with pytest.raises(dgcopt.ConfigError, match=r"SGDScheduleFree is schedule-free: .* Use DistributedOptimizer"):
        rule.attach(optimizer, comm=dgcopt.simulated_world(2)[0])
    dgcopt.DistributedOptimizer(optimizer, comm=dgcopt.simulated_world(2)[0])


class Hessian(torch.optim.Optimizer):
    """Differentiates gradients in its step, as AdaHessian does."""

    def step(self, closure: Any = None) -> None:
        params = [param for group in self.param_groups for param in group["params"]]
        torch.autograd.grad([param.grad for param in params], params, [torch.ones_like(param) for param in params])


@pytest.mark.parametrize("compression", [None, dgcopt.DGC(0.2)])
def test_gradients_that_have_a_graph(compression):
    """Are averaged; a step that goes through the graph is refused."""
    for make in (momentum_sgd, lambda params: Hessian(params, {})):
        ranks = Ranks(2, make, compression=compression)
        for model in ranks.models:
            with warnings.catch_warnings(action="ignore"):
                model(small_batch()[0]).square().mean().backward(create_graph=True)
        refused = pytest.raises(dgcopt.ConfigError, match=r"Hessian\.step\(\) differentiates gradients, as AdaHessian")
        for optimizer in ranks.optimizers:
            with nullcontext() if make is momentum_sgd else refused:
                optimizer.step()
        ranks.assert_replicas_equal()
