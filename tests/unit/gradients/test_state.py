"""State and copies of a wrapped optimizer: pickled, copied, saved, loaded, and refused without a change."""

import copy
import pickle
from typing import Any
from unittest.mock import Mock

import pytest
import torch
from torch import nn
from torch.optim import SGD
from torch.optim.lr_scheduler import StepLR

import dgcopt
from dgcopt.gradients.synchronised import synchronised
from tests.support.worlds import Ranks, assert_close, momentum_sgd, same, small_model


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
        (["0.weight", "more"], torch.float64, "parameter names must be unique"),
        (["more", "more"], torch.float64, "parameter names must be unique"),
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


@pytest.mark.parametrize("op", ["average", "sum"])
def test_residuals_of_a_checkpoint_count_once_in_a_dense_exchange(op):
    ranks = Ranks(2, lambda params: SGD(params, lr=1.0), compression=dgcopt.TopK(0.1), op=op)
    ranks.step(0)
    states = [copy.deepcopy(optimizer.state_dict()) for optimizer in ranks.optimizers]
    dense = Ranks(2, lambda params: SGD(params, lr=1.0), op=op)
    for optimizer, state in zip(dense.optimizers, states, strict=True):
        optimizer.load_state_dict(state)
    before = dense.weights()
    for _ in range(3):
        for optimizer, model in zip(dense.optimizers, dense.models, strict=True):
            optimizer.zero_grad()
            (0 * model(torch.zeros(1, 12, dtype=torch.float64))).sum().backward()
        for optimizer in dense.optimizers:
            optimizer.step()
    held = [state["dgcopt"]["memory"]["residual"] for state in states]
    names = [name for name, _ in dense.models[0].named_parameters()]
    sums = [(held[0][name] + held[1][name]) / (2 if op == "average" else 1) for name in names]
    assert_close(dense.weights(), [weight - change for weight, change in zip(before, sums, strict=True)], 1e-12)


def test_loaded_state_drops_a_change_of_the_compressor_that_is_due():
    ranks = Ranks(2, momentum_sgd, compression=dgcopt.DGC(0.1))
    ranks.step(0)
    for optimizer in ranks.optimizers:
        gradients = synchronised(optimizer).engine.gradients
        gradients.change_compressor(Mock(keeps_residual=True))
        optimizer.load_state_dict(optimizer.state_dict())
        assert not gradients.changes_compressor
    ranks.step(1)


@pytest.mark.parametrize(("op", "factor"), [("average", 1.0), ("average", 4.0), ("sum", 1.0)])
def test_momentum_goes_back_to_the_optimizer_after_a_warm_up(op: str, factor: float) -> None:
    """At ratio 1 training is dense, before local steps and in them."""

    def trained(compressor: dgcopt.Compressor) -> torch.Tensor:
        generator, comms = torch.Generator().manual_seed(0), dgcopt.simulated_world(2)
        params = [torch.nn.Parameter(torch.zeros(40)) for _ in comms]
        optimizers: list[Any] = []
        for param, comm in zip(params, comms, strict=True):
            wrapped = dgcopt.DistributedOptimizer(
                torch.optim.SGD([param], lr=0.1, momentum=0.9),
                *([("p", param)], compressor),
                **{"comm": comm, "op": op, "gradient_predivide_factor": factor},
            )
            optimizers.append(dgcopt.LocalSGD(every=100, warmup_steps=3).attach(wrapped))
        for _ in range(6):
            grad = torch.randn(40, generator=generator)
            for param, optimizer in zip(params, optimizers, strict=True):
                optimizer.zero_grad()
                (param * grad).sum().backward()
            for optimizer in optimizers:
                optimizer.step()
        return params[0].detach()

    torch.testing.assert_close(trained(dgcopt.DGC(1.0)), trained(dgcopt.NoCompression()), rtol=0, atol=1e-5)
