"""Parameters and buffers that are cast, resized, replaced or added later, and parameter groups changed by hand."""

from __future__ import annotations

import copy
import gc
import logging
import sys
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

import dgcopt
from dgcopt import ConfigError, MismatchError
from dgcopt.gradients.introspection import is_sharded_elsewhere
from dgcopt.gradients.synchronised import steps_of
from tests.support.worlds import Ranks, momentum_sgd, small_batch, small_model


def floats() -> nn.Module:
    return small_model(torch.float32)


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
    ranks = Ranks(2, momentum_sgd, floats)
    ranks.step()
    ranks.models[1].double()
    for model in ranks.models:
        model(torch.ones(1, 12, dtype=next(model.parameters()).dtype)).sum().backward()
    with pytest.raises(MismatchError, match=r"rank 0 has \[parameter 0\.weight: float32 .*rank 1 has .*float64"):
        ranks.optimizers[0].step()


def test_a_parameter_of_another_size_is_told_by_name() -> None:
    """What is kept of it, and its neighbours in flat memory, are where they were."""
    for numel in (3, 400):
        ranks = Ranks(2, momentum_sgd, compression=dgcopt.DGC(0.5))
        ranks.step()
        for model in ranks.models:
            model[4].bias.data = torch.zeros(numel, dtype=torch.float64)
            model[4].bias.grad = torch.zeros(numel, dtype=torch.float64)
        with pytest.raises(ConfigError, match=rf"'4\.bias' had 5 elements .* and has {numel}: make the optimizer anew"):
            ranks.optimizers[0].step()


@pytest.mark.parametrize("compression", [None, dgcopt.TopK(0.1)])
def test_a_complex_parameter_that_is_no_longer_frozen_is_refused(compression: Any) -> None:
    def model() -> nn.Module:
        made = small_model()
        made[1].waves = nn.Parameter(torch.ones(3, dtype=torch.complex64), requires_grad=False)
        return made

    ranks = Ranks(2, momentum_sgd, model, compression=compression)
    ranks.step()
    ranks.step(1)
    for each in ranks.models:
        each[1].waves.requires_grad = True
    ranks.backward(2)
    for optimizer in ranks.optimizers:
        with pytest.raises(ConfigError, match=r"'1.waves' has dtype complex64.*Freeze it"):
            optimizer.step()


@pytest.mark.parametrize("numel", [3, 400])
def test_an_averaged_parameter_of_another_size_is_told_by_name(numel: int) -> None:
    comms, models = dgcopt.simulated_world(2), [small_model() for _ in range(2)]
    optimizers = [
        dgcopt.LocalSGD(momentum_sgd(model.parameters()), every=1, named_parameters=model.named_parameters(), comm=comm)
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
    ranks = Ranks(2, momentum_sgd)
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


def test_sharded_modules_are_searched_for_only_if_some_exist(monkeypatch: pytest.MonkeyPatch) -> None:
    """The search, at the first step without gradients, is through all objects of the process."""

    class FSDPModule:
        pass

    def search(*classes: type) -> list[object]:
        searched.extend(classes)
        return referrers(*classes)

    searched: list[type] = []
    referrers, param = gc.get_referrers, nn.Parameter(torch.zeros(3))
    monkeypatch.setitem(sys.modules, "torch.distributed.fsdp", SimpleNamespace(FSDPModule=FSDPModule))
    monkeypatch.setattr(gc, "get_referrers", search)
    monkeypatch.setattr(gc, "get_objects", lambda: pytest.fail("searched all objects"))
    assert not is_sharded_elsewhere([param]) and not searched

    class FSDPLinear(FSDPModule, nn.Linear):
        pass

    module = FSDPLinear(3, 1, bias=False)
    assert not is_sharded_elsewhere([module.weight])
    module.weight.device_mesh = "a shard's"
    assert is_sharded_elsewhere([module.weight]) and not is_sharded_elsewhere([param]) and {*searched} == {FSDPLinear}


def test_buffers_that_one_rank_exchanges() -> None:
    ranks = Ranks(2, momentum_sgd, lambda: nn.Sequential(nn.Linear(12, 5), nn.BatchNorm1d(5)).double())
    ranks.models[1].load_state_dict(ranks.models[0].state_dict())
    dgcopt.sync_buffers(ranks.models[1], ranks.optimizers[1])
    ranks.backward()
    with pytest.raises(MismatchError, match=r"rank 0 has \[.*rank 1 has \[sync_buffers: broadcast, every 1 steps"):
        ranks.optimizers[0].step()


@pytest.mark.parametrize("comes", ["a new group", "an unfrozen layer"])
def test_parameters_trained_from_a_checkpoint_on_have_the_same_buckets_as_without_one(comes: str) -> None:
    """As the order of parameters in buckets decides over last bits."""
    straight, resumed = Ranks(2, momentum_sgd), Ranks(2, momentum_sgd)
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


# -- parameter groups that are changed by hand -----------------------------------------------------------------------


def first_layers(params: Any) -> torch.optim.Optimizer:
    return torch.optim.AdamW([*params][:4], lr=0.02, weight_decay=0.1)


@pytest.mark.parametrize("settings", [{}, {"compression": dgcopt.DGC(0.1)}, {"op": "adasum"}], ids=str)
@pytest.mark.parametrize("when", ["between steps", "after backward"])
@pytest.mark.parametrize("way", ["appended", "a new list", "a new group"])
def test_parameters_put_into_groups_by_hand_are_exchanged(settings: dict[str, Any], when: str, way: str) -> None:
    by_hand, by_call = Ranks(2, first_layers, **settings), Ranks(2, first_layers, **settings)

    def add(ranks: Ranks) -> None:
        for model, optimizer in zip(ranks.models, ranks.optimizers, strict=True):
            groups, new = optimizer.param_groups, [*model[4].parameters()]
            if ranks is by_call:
                optimizer.add_param_group({"params": new})
            elif way == "appended":
                groups[0]["params"] += new
            elif way == "a new list":
                groups[0]["params"] = [*groups[0]["params"], *new]
            else:
                groups.append({**groups[0], "params": new})

    for ranks in (by_hand, by_call):
        for seed in range(6):
            for model in ranks.models:
                model.zero_grad()
            if (seed, when) == (2, "between steps"):
                add(ranks)
            ranks.backward(seed)
            if (seed, when) == (2, "after backward"):
                add(ranks)
            for optimizer in ranks.optimizers:
                optimizer.step()
            ranks.assert_replicas_equal()
    assert all(map(torch.equal, by_hand.weights(), by_call.weights()))
    assert all(map(torch.equal, copy.deepcopy(by_hand.optimizers[0]).param_groups[0]["params"], by_hand.weights()))


def test_a_copy_has_the_names_of_parameters_that_were_put_before_others() -> None:
    comm, _ = dgcopt.simulated_world(2)
    params = [torch.nn.Parameter(torch.ones(n)) for n in range(1, 4)]
    named = [(f"of {param.numel()}", param) for param in params]
    optimizer = dgcopt.DistributedOptimizer(torch.optim.AdamW(params[1:]), named, comm=comm)
    optimizer.param_groups[0]["params"].insert(0, params[0])
    names = steps_of(copy.deepcopy(optimizer)).names
    assert {name: param.numel() for param, name in names.items()} == {"of 1": 1, "of 2": 2, "of 3": 3}


@pytest.mark.parametrize("compression", [None, dgcopt.DGC(0.1)], ids=repr)
def test_parameters_replaced_in_groups_by_hand_are_refused(compression: Any) -> None:
    """The new ones would be stepped by each rank's own gradients."""
    ranks = Ranks(2, first_layers, compression=compression)
    ranks.step()
    ranks.backward()
    for rank, (model, optimizer) in enumerate(zip(ranks.models, ranks.optimizers, strict=True)):
        optimizer.param_groups[0]["params"][2:] = model[4].parameters()
        before = ranks.weights(rank)
        for _ in range(2):
            with pytest.raises(
                ConfigError, match=rf"rank {rank}: parameter '2.weight' \(2 of 4\) was removed.* Freeze"
            ):
                optimizer.step()
        assert all(map(torch.equal, ranks.weights(rank), before))


def test_a_parameter_put_before_others_by_hand_is_refused_without_a_name() -> None:
    first, *others = (torch.nn.Parameter(torch.ones(2)) for _ in range(3))
    optimizer = dgcopt.DistributedOptimizer(torch.optim.AdamW(others), comm=dgcopt.simulated_world(2)[0])
    optimizer.param_groups[0]["params"].insert(0, first)
    with pytest.raises(ConfigError, match=r"would have the name of another, 'group0.parameter0'.*add_param_group"):
        optimizer.step()


def test_a_parameter_that_one_rank_has_put_into_a_group_is_named_on_all() -> None:
    ranks = Ranks(2, first_layers)
    ranks.step()
    ranks.optimizers[1].param_groups[0]["params"] += ranks.models[1][4].parameters()
    ranks.backward()
    with pytest.raises(
        MismatchError, match=r"rank 0 has .*number of parameters: 4.*rank 1 has .*number of parameters: 6"
    ):
        ranks.optimizers[0].step()
