"""What is changed after an optimizer was wrapped: it takes effect, or is told with its name, on all ranks."""

from __future__ import annotations

import contextlib
import copy
import logging
from typing import Any

import pytest
import torch
from torch import nn

import dgcopt
from dgcopt import ConfigError, MismatchError
from dgcopt.collectives import AllGather, AllReduce
from dgcopt.exchange import group_settings
from dgcopt.exchange.group_settings import GroupSettings
from dgcopt.gradients.synchronised import steps_of
from dgcopt.testing import ConformanceError, check_compressor
from tests.support.worlds import Ranks, same, small_batch, small_model


def sgd(params: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(params, lr=0.1, momentum=0.9)


def adamw(params: Any) -> torch.optim.Optimizer:
    return torch.optim.AdamW(params, lr=0.02, weight_decay=0.1)


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


@pytest.mark.parametrize("compression", [None, dgcopt.TopK(0.1)])
def test_a_complex_parameter_that_is_no_longer_frozen_is_refused(compression: Any) -> None:
    def model() -> nn.Module:
        made = small_model()
        made[1].waves = nn.Parameter(torch.ones(3, dtype=torch.complex64), requires_grad=False)
        return made

    ranks = Ranks(2, sgd, model, compression=compression)
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


def adam(params: Any) -> torch.optim.Optimizer:
    return torch.optim.AdamW([{"params": list(params)}], lr=torch.tensor(0.1), betas=(0.9, 0.99))


OF_A_GROUP: list[tuple[Any, str, Any, str]] = [
    (sgd, "lr", 0.05, r"rank 0 has \[lr of parameter group 0: 0\.1\], rank 1 has \[lr of parameter group 0: 0\.05\]"),
    (sgd, "weight_decay", 0.01, r"weight_decay of parameter group 0: 0\], rank 1 has .*: 0\.01"),
    (sgd, "momentum", 0.8, r"momentum of parameter group 0: 0\.9\], rank 1 has .*: 0\.8"),
    (sgd, "nesterov", True, r"nesterov of parameter group 0: False\], rank 1 has .*: True"),
    (adam, "betas", (0.9, 0.98), r"betas of parameter group 0: 0\.9, 0\.99\], rank 1 has .*: 0\.9, 0\.98"),
    (adam, "lr", torch.tensor(0.2), r"lr of parameter group 0: 0\.1\d*\], rank 1 has .*: 0\.2"),
]


@pytest.mark.parametrize(("make", "name", "value", "words"), OF_A_GROUP, ids=[case[1] for case in OF_A_GROUP])
@pytest.mark.parametrize("kind", [dgcopt.TopK, dgcopt.DGC], ids=["sent during backward", "sent after the vote"])
def test_a_number_in_a_parameter_group_that_one_rank_changes(
    kind: Any, make: Any, name: str, value: Any, words: str
) -> None:
    """Told before weights or memory move; once ranks agree again, they go on as if it had never been."""
    ranks, untouched = (Ranks(3, make, compression=kind(0.5)) for _ in range(2))
    for seed in range(3):
        ranks.step(seed)
        untouched.step(seed)
    group = ranks.optimizers[1].param_groups[0]
    before, told = group[name], [optimizer.state_dict()["dgcopt"] for optimizer in ranks.optimizers]
    group[name] = value
    ranks.backward(3)
    for optimizer in ranks.optimizers:
        with pytest.raises(MismatchError, match=words):
            optimizer.step()
    assert same([optimizer.state_dict()["dgcopt"] for optimizer in ranks.optimizers], told)
    assert all(same(ranks.weights(rank), untouched.weights()) for rank in range(3))
    group[name] = before
    for seed in range(4, 6):
        ranks.step(seed)
        untouched.step(seed)
    assert all(same(ranks.weights(rank), untouched.weights()) for rank in range(3))


def test_a_tensor_that_one_rank_changes_in_place() -> None:
    ranks = Ranks(2, adam)
    ranks.step()
    ranks.optimizers[1].param_groups[0]["lr"].mul_(0.5)
    ranks.backward()
    with pytest.raises(MismatchError, match=r"lr of parameter group 0: 0\.1\d*\], rank 1 has .*: 0\.05"):
        ranks.optimizers[0].step()


def test_settings_that_differ_on_purpose() -> None:
    """From the start, and later; what is not named is still compared."""
    lrs = iter((0.1, 0.2))
    ranks = Ranks(2, lambda params: torch.optim.SGD(params, next(lrs), momentum=0.9), may_differ=("lr",))
    ranks.step()
    ranks.optimizers[1].param_groups[0]["lr"] = 0.3
    ranks.step()
    assert [optimizer.param_groups[0]["lr"] for optimizer in ranks.optimizers] == [0.1, 0.3]
    ranks.optimizers[1].param_groups[0]["momentum"] = 0.5
    ranks.backward()
    with pytest.raises(MismatchError, match=r"momentum of parameter group 0"):
        ranks.optimizers[0].step()
    for wrong in ("lr", ("rate",), None):
        with pytest.raises(ConfigError, match=r'such as \("lr",\).*there are .*lr.*weight_decay'):
            Ranks(1, sgd, may_differ=wrong)


def test_settings_are_taken_over_from_rank_0_where_divergence_is_mended(caplog: pytest.LogCaptureFixture) -> None:
    ranks = Ranks(2, sgd, on_divergence="resync")
    for seed, lr in enumerate((0.1, 0.05, 0.1, 0.02)):
        ranks.optimizers[1].param_groups[0]["lr"] = lr
        ranks.step(seed)
        assert ranks.optimizers[1].param_groups[0]["lr"] == 0.1
        ranks.assert_replicas_equal()
    told = [record.getMessage() for record in caplog.records if "lr of parameter group 0: 0.02" in record.getMessage()]
    assert len(told) == 2, "on each rank"


def test_settings_are_not_read_anew_until_one_changes(monkeypatch: pytest.MonkeyPatch) -> None:
    """A step compares them by few operations, whatever their number."""
    optimizer = torch.optim.AdamW([{"params": [nn.Parameter(torch.ones(2))], "lr": place} for place in range(50)])
    settings = GroupSettings(optimizer)
    read: list[Any] = []
    numbers = group_settings._numbers
    monkeypatch.setattr(group_settings, "_numbers", lambda value: (read.append(value), numbers(value))[1])
    first = settings.checksum()
    once = len(read)
    read.clear()
    assert settings.checksum() == first and len(read) < once / 2
    optimizer.param_groups[7]["weight_decay"] = 1
    assert settings.checksum() != first
    twin = GroupSettings(copy.deepcopy(optimizer))
    twin._optimizer.param_groups[7] = dict(reversed(twin._optimizer.param_groups[7].items()))
    twin._optimizer.param_groups[7]["weight_decay"] = 1.0
    assert twin.checksum() == settings.checksum(), "neither their order nor their type matters"


def test_a_tensor_on_an_accelerator_is_not_read_in_a_step() -> None:
    optimizer = torch.optim.Adam([nn.Parameter(torch.ones(2))], lr=0.1)
    settings = GroupSettings(optimizer)
    optimizer.param_groups[0]["lr"] = torch.empty((), device="meta")  # a read raises
    settings.checksum()


# -- gradients -------------------------------------------------------------------------------------------------------


def clip(ranks: Ranks, on: list[int]) -> None:
    for rank in on:
        nn.utils.clip_grad_norm_(ranks.models[rank].parameters(), 0.01)


@pytest.mark.parametrize("compression", [None, dgcopt.DGC(0.5)])
def test_averaged_gradients_that_one_rank_clips(compression: Any) -> None:
    """Weights have come apart by then: told at the next step, on all ranks, with the rank."""
    for on, by_hand in (([0, 1, 2], [0, 1, 2]), ([1], [0, 1, 2]), ([1], [1])):
        ranks = Ranks(3, sgd, compression=compression)
        for seed in range(3):
            for optimizer in ranks.optimizers:
                optimizer.zero_grad()
            ranks.backward(seed)
            if seed == 2 and len(on) == 1:
                for optimizer in ranks.optimizers:
                    with pytest.raises(
                        MismatchError, match=r"rank\(s\) \[1\] changed the averaged gradients of step 1"
                    ):
                        optimizer.step()
                break
            for rank in by_hand:
                ranks.optimizers[rank].synchronize()
            if seed:
                clip(ranks, on)
            for rank, optimizer in enumerate(ranks.optimizers):
                with optimizer.skip_synchronize() if rank in by_hand else contextlib.nullcontext():
                    optimizer.step()


def test_a_rank_that_clips_by_its_optimizer_alone() -> None:
    ranks = Ranks(2, sgd)
    ranks.backward()
    ranks.optimizers[0].clip_grad_norm_(0.01)
    for optimizer in ranks.optimizers:
        optimizer.step()
    ranks.backward()
    with pytest.raises(MismatchError, match=r"rank\(s\) \[0\] changed the averaged gradients of step 0"):
        ranks.optimizers[0].step()


def test_averaged_gradients_that_one_rank_clips_are_mended() -> None:
    ranks = Ranks(2, sgd, on_divergence="resync")
    for seed in range(3):
        for optimizer in ranks.optimizers:
            optimizer.zero_grad()
        ranks.backward(seed)
        for optimizer in ranks.optimizers:
            optimizer.synchronize()
        clip(ranks, [1] if seed == 0 else [])
        for optimizer in ranks.optimizers:
            with optimizer.skip_synchronize():
                optimizer.step()
        assert all(map(torch.equal, ranks.weights(0), ranks.weights(1))) == (seed > 0)


@pytest.mark.parametrize("compression", [None, dgcopt.TopK(0.5), dgcopt.DGC(0.5)])
def test_own_gradients_that_one_rank_changes(compression: Any, caplog: pytest.LogCaptureFixture) -> None:
    """May be meant, as of a clip that depends on the norm: said once, and only if others with gradients have not."""
    ranks = Ranks(3, sgd, compression=compression)
    for on in ([], [0, 1, 2], [], [1], [1, 2]):
        for optimizer in ranks.optimizers:
            optimizer.zero_grad()
        ranks.backward()
        clip(ranks, on)
        for optimizer in ranks.optimizers:
            optimizer.step()
        told = [record.getMessage() for record in caplog.records if "changed their gradients" in record.getMessage()]
        assert len(told) == (3 if on in ([1], [1, 2]) else 0)
        ranks.assert_replicas_equal()
    assert "step 3: rank(s) [1] changed their gradients between backward() and the exchange" in told[0]


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
def test_parameters_trained_from_a_checkpoint_on_have_the_same_buckets_as_without_one(comes: str) -> None:
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


# -- parameter groups that are changed by hand -----------------------------------------------------------------------


def first_layers(params: Any) -> torch.optim.Optimizer:
    return adamw([*params][:4])


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
    optimizer = dgcopt.DistributedOptimizer(adamw(params[1:]), named, comm=comm)
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
    optimizer = dgcopt.DistributedOptimizer(adamw(others), comm=dgcopt.simulated_world(2)[0])
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


# -- frozen layers ---------------------------------------------------------------------------------------------------


UPDATES: dict[str, dict[str, Any]] = {
    "TopK": {"compression": dgcopt.TopK(0.1)},
    "DGC": {"compression": dgcopt.DGC(0.1)},
    "TopK without the first moment": {"compression": dgcopt.TopK(0.1, first_moment="residual")},
    "by name": {"compression": dgcopt.PerParameter({"0.*": dgcopt.TopK(0.1), "*": dgcopt.DGC(0.2)})},
    "Adasum": {"op": "adasum"},
}
GRADIENTS: dict[str, dict[str, Any]] = {
    "dense": {},
    "DGC of gradients": {"compression": dgcopt.DGC(0.1, source="gradient")},
}


def bits_of(models: list[nn.Module]) -> list[list[torch.Tensor]]:
    return [[param.detach().clone() for param in model[0].parameters()] for model in models]


@pytest.mark.parametrize("keeps", ["zeros", "the last one"])
@pytest.mark.parametrize("settings", [*UPDATES.values(), *GRADIENTS.values()], ids=[*UPDATES, *GRADIENTS])
def test_a_frozen_layer_that_keeps_its_gradient_stays_equal_on_all_ranks(settings: dict[str, Any], keeps: str) -> None:
    """The optimizer steps it, and where updates travel, each rank by an update of its own."""
    ranks = Ranks(2, adamw, **settings)
    for seed in range(12):
        is_frozen = 4 <= seed < 8
        for model, optimizer in zip(ranks.models, ranks.optimizers, strict=True):
            model[0].requires_grad_(not is_frozen)
            if keeps == "zeros":
                optimizer.zero_grad(set_to_none=False)
        ranks.backward(seed)
        before = bits_of(ranks.models)
        for optimizer in ranks.optimizers:
            optimizer.step()
        ranks.assert_replicas_equal()
        stays = same(before, bits_of(ranks.models))
        assert stays == (is_frozen and settings in UPDATES.values()), "updates move what they travel for"


def test_a_dense_frozen_layer_that_keeps_its_gradient_is_stepped_as_in_one_process() -> None:
    ranks, whole = Ranks(2, adamw), small_model()
    bare = adamw(whole.parameters())
    for seed in range(6):
        for model, optimizer in zip([*ranks.models, whole], [*ranks.optimizers, bare], strict=True):
            model[0].requires_grad_(seed < 3)
            optimizer.zero_grad(set_to_none=False)
        inputs, targets = small_batch(seed=seed)
        nn.functional.cross_entropy(whole(inputs), targets).backward()
        ranks.backward(seed)
        for optimizer in (*ranks.optimizers, bare):
            optimizer.step()
    ranks.assert_replicas_equal()
    for ours, theirs in zip(ranks.weights(), whole.parameters(), strict=True):
        torch.testing.assert_close(ours, theirs.detach(), rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("settings", [*UPDATES.values(), *GRADIENTS.values()], ids=[*UPDATES, *GRADIENTS])
def test_a_layer_that_is_frozen_but_during_backward_is_exchanged(settings: dict[str, Any]) -> None:
    """Also one that was frozen when the optimizer was wrapped."""

    def frozen() -> nn.Module:
        model = small_model()
        model[0].requires_grad_(False)
        return model

    ranks = Ranks(2, adamw, frozen, **settings)
    assert not any(param.requires_grad for model in ranks.models for param in model[0].parameters())
    for seed in range(6):
        for model, optimizer in zip(ranks.models, ranks.optimizers, strict=True):
            optimizer.zero_grad()
            model[0].requires_grad_(seed >= 2)
        ranks.backward(seed)
        before = bits_of(ranks.models)
        for model, optimizer in zip(ranks.models, ranks.optimizers, strict=True):
            model[0].requires_grad_(False)
            optimizer.step()
        ranks.assert_replicas_equal()
        assert same(before, bits_of(ranks.models)) == (seed < 2)


@pytest.mark.parametrize("make", [sgd, adamw])
@pytest.mark.parametrize("compression", [None, dgcopt.TopK(0.1)], ids=repr)
def test_a_rank_without_data_steps_frozen_layers_that_keep_their_gradient(make: Any, compression: Any) -> None:
    ranks = Ranks(2, make, compression=compression)

    def backward(rank: int, seed: int) -> None:
        ranks.optimizers[rank].zero_grad(set_to_none=False)
        inputs, targets = small_batch(seed=seed)
        nn.functional.cross_entropy(ranks.models[rank](inputs[rank::2]), targets[rank::2]).backward()

    with dgcopt.join(ranks.optimizers[0]):
        with dgcopt.join(ranks.optimizers[1]):
            for seed in range(4):
                for rank in range(2):
                    ranks.models[rank][0].requires_grad_(seed < 2)
                    backward(rank, seed)
                for optimizer in ranks.optimizers:
                    optimizer.step()
        for seed in range(4, 8):
            backward(0, seed)
            ranks.optimizers[0].step()
    ranks.assert_replicas_equal()


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


def test_the_last_residual_kept_in_a_step_counts() -> None:
    class Twice(dgcopt.EFSignSGD):
        def exchange(self, grad, ctx):
            result = yield from super().exchange(grad, ctx)
            ctx.keep_residual(torch.ones_like(grad))
            return result

    ranks = Ranks(2, sgd, compression=Twice())
    ranks.step()
    kept = ranks.optimizers[0].state_dict()["dgcopt"]["memory"]["residual"]
    assert all(bool((held == 1).all()) for held in kept.values())
