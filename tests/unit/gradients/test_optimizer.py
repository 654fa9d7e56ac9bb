"""What scripts written for Horovod or for a bare optimizer count on, on simulated ranks."""

import copy
import pickle
import sys
import warnings
from contextlib import nullcontext
from functools import partial
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim import SGD, Adam

import dgcopt
from dgcopt.gradients.synchronised import synchronised
from tests.support.worlds import Ranks, assert_close, momentum_sgd, small_batch, small_model, weights_after

SLOWDOWN = (
    "optimizer.step() called without optimizer.skip_synchronize() context after optimizer.synchronize(). This can "
    "cause training slowdown. You may want to consider using optimizer.skip_synchronize() context if you use "
    "optimizer.synchronize() in your code."
)


# -- one object, as torch made it ------------------------------------------------------------------------------------


def test_names_of_parameters_and_class():
    ranks = Ranks(2, momentum_sgd)
    optimizer, model = ranks.optimizers[0], ranks.models[0]
    assert isinstance(optimizer, SGD) and type(optimizer).__name__ == "SGD" and type(optimizer).__doc__ == SGD.__doc__
    assert synchronised(optimizer).names == {param: name for name, param in model.named_parameters()}


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


class Merged(nn.Module):
    """Has a frozen part that was loaded in inference mode, and cannot require a gradient any more."""

    def __init__(self) -> None:
        super().__init__()
        self.trained = small_model()
        with torch.inference_mode():
            self.merged = nn.Parameter(torch.ones(5, dtype=torch.float64), requires_grad=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.trained(x) + self.merged


@pytest.mark.parametrize("compression", [None, dgcopt.DGC(0.1), dgcopt.TopK(0.5, source="update")], ids=repr)
def test_frozen_parameters_made_in_inference_mode_are_left_alone(compression: Any) -> None:
    ranks = Ranks(2, momentum_sgd, model=Merged, compression=compression, check_replicas_every=1)
    for seed in range(3):
        ranks.step(seed)
        ranks.assert_replicas_equal()
    assert all(model.merged.eq(1).all() for model in ranks.models)


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
