"""PerParameter: every parameter is trained as if its rule were the only one."""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.optim import SGD, Adam, AdamW, Optimizer, RMSprop
from torch.optim.lr_scheduler import OneCycleLR

import dgcopt
from dgcopt.compressors import Compressor
from dgcopt.errors import ConfigError
from dgcopt.gradients.synchronised import synchronised
from tests.support.rules import EACH_ITS_OWN, MIXED, SHAPES, Make, World, momentum, noise, patterns


def assert_as_alone(
    rules: Mapping[str, Compressor], make: Make, size: int, together: Any = None, steps: int = 5, **settings: Any
) -> None:
    """Each parameter is where it would be if all were of its rule, after each step and to the bit."""
    compressor = dgcopt.PerParameter(rules) if together is None else together
    ours = World(size, make, compressor, **settings).train(steps)
    alone = {pattern: World(size, make, rule, **settings).train(steps) for pattern, rule in rules.items()}
    for name, pattern in patterns(rules).items():
        for step in range(steps):
            assert torch.equal(ours[step][name], alone[pattern][step][name]), f"{name} at step {step}"


SPARSE = {
    "*.bias": dgcopt.NoCompression(),
    "fc.*": dgcopt.DGC(0.1),
    "norm.*": dgcopt.DGC(0.1, vectors="dense"),
    "*": dgcopt.TopK(0.05),
}
KINDS_OF_MOMENTUM: dict[str, Make] = {
    "none": lambda p: SGD(p, lr=0.1),
    "decay": lambda p: SGD(p, lr=0.1, weight_decay=0.1),
    "momentum": momentum,
    "nesterov": lambda p: SGD(p, lr=0.1, momentum=0.9, nesterov=True, weight_decay=0.01),
    "dampening": lambda p: SGD(p, lr=0.1, momentum=0.9, dampening=0.3, weight_decay=0.01),
    "one by one": lambda p: SGD(p, lr=0.1, momentum=0.9, foreach=False),
    "maximize": lambda p: SGD(p, lr=0.1, momentum=0.9, maximize=True),
}


@pytest.mark.parametrize("size", [2, 3])
@pytest.mark.parametrize("make", KINDS_OF_MOMENTUM.values(), ids=KINDS_OF_MOMENTUM)
def test_each_parameter_is_trained_as_if_its_rule_were_the_only_one(make: Make, size: int) -> None:
    assert_as_alone(SPARSE, make, size)


@pytest.mark.parametrize("settings", [{"op": "sum"}, {"gradient_predivide_factor": 2.0}, {"bucket_mb": 1e-5}], ids=str)
def test_with_other_settings_of_the_optimizer(settings: dict) -> None:
    assert_as_alone(SPARSE, momentum, 3, **settings)


def test_the_rest_of_a_model_may_travel_with_momentum_corrected_in_two_ways() -> None:
    rules = {"*.bias": dgcopt.DGC(0.3, vectors="sparse"), "fc.*": dgcopt.DGC(0.1), "*": dgcopt.NoCompression()}
    assert_as_alone(rules, momentum, 2)
    one = dgcopt.DGC(0.1)
    assert_as_alone({"fc.*": one, "*.bias": dgcopt.NoCompression(), "*": one}, momentum, 2)


@pytest.mark.parametrize("size", [2, 3])
def test_biases_beside_dgc_are_those_of_dense_training(size: int) -> None:
    """As with DGC's own `vectors="dense"`, but to the bit, as it is SGD itself that steps them."""
    rules = dgcopt.PerParameter({"*.bias": dgcopt.NoCompression(), "*": dgcopt.DGC(0.05)})
    ours, dense, own = (World(size, momentum, c).train(8) for c in (rules, None, dgcopt.DGC(0.05)))
    for mine, whole, dgc in zip(ours, dense, own, strict=True):
        for name in SHAPES:
            if name.endswith("bias"):
                assert torch.equal(mine[name], whole[name])
                torch.testing.assert_close(mine[name], dgc[name])
            else:
                assert torch.equal(mine[name], dgc[name])


def test_several_groups_and_a_schedule_of_momentum() -> None:
    """The groups are whole again after each step: schedulers change them, and checkpoints number them."""

    def make(params: Iterable[Tensor]) -> Optimizer:
        first, *others = params
        groups = [{"params": [first, others[0]], "lr": 0.05}, {"params": others[1:], "momentum": 0.5}]
        return SGD(groups, lr=0.1, momentum=0.9, weight_decay=0.01)

    def train(compressor: Compressor) -> list[dict[str, Tensor]]:
        world = World(2, make, compressor)
        schedulers = [OneCycleLR(optimizer, [0.1, 0.2], total_steps=10) for optimizer in world.optimizers]
        weights = []
        for _ in range(8):
            groups = [(group, dict(group), list(group["params"])) for group in world.optimizers[0].param_groups]
            weights.append(world.step())
            after = world.optimizers[0].param_groups
            assert len(after) == 2
            for (group, settings, params), now in zip(groups, after, strict=True):
                assert now is group and now["params"] is settings["params"]
                assert all(a is b for a, b in zip(now["params"], params, strict=True))
                assert all(now[key] is value for key, value in settings.items())
            for scheduler in schedulers:
                scheduler.step()
        return weights

    ours, alone = train(dgcopt.PerParameter(SPARSE)), {p: train(rule) for p, rule in SPARSE.items()}
    for name, pattern in patterns(SPARSE).items():
        assert all(torch.equal(a[name], b[name]) for a, b in zip(ours, alone[pattern], strict=True)), name


def test_momentum_that_began_before_it_was_wrapped_is_taken_over_where_it_is_corrected() -> None:
    def make(params: Iterable[Tensor]) -> Optimizer:
        params = list(params)
        optimizer = momentum(params)
        for param in params:
            optimizer.state[param]["momentum_buffer"] = noise("buffer", shape=tuple(param.shape))
        return optimizer

    assert_as_alone(SPARSE, make, 2)


FROZEN = dgcopt.OneBitAdam(2, dgcopt.EFSignSGD())


@pytest.mark.parametrize("make", [lambda p: Adam(p, lr=0.01), lambda p: AdamW(p, lr=0.01, weight_decay=0.1)])
@pytest.mark.parametrize("size", [2, 3])
def test_adam_is_frozen_for_some_and_goes_on_for_others(make: Make, size: int) -> None:
    assert_as_alone({"*.bias": dgcopt.NoCompression(), "*": FROZEN}, make, size, steps=6)


def test_a_rule_looks_at_the_groups_of_its_own_parameters() -> None:
    """DeMo takes SGD without momentum, and another group may have some."""

    def make(params: Iterable[Tensor]) -> Optimizer:
        params = list(params)
        return SGD([{"params": params[:2]}, {"params": params[2:], "momentum": 0.9}], lr=0.1)

    rules = {"conv.*": dgcopt.DeMo(values="fp32", indices="int32"), "*": dgcopt.DGC(0.1)}
    ours = World(2, make, dgcopt.PerParameter(rules)).train()
    dgc = World(2, make, rules["*"]).train()
    demo = World(2, lambda p: SGD(p, lr=0.1), rules["conv.*"]).train()
    for name, pattern in patterns(rules).items():
        alone = dgc if pattern == "*" else demo
        assert all(torch.equal(a[name], b[name]) for a, b in zip(ours, alone, strict=True)), name
    with pytest.raises(ConfigError, match="DeMo keeps the momentum itself"):
        World(2, momentum, dgcopt.PerParameter(rules))


@pytest.mark.parametrize("size", [2, 3])
@pytest.mark.parametrize(
    "make",
    [
        lambda p: AdamW(p, lr=0.01, weight_decay=0.1),
        lambda p: Adam(p, lr=0.01, weight_decay=0.1, amsgrad=True),
        lambda p: RMSprop(p, lr=0.01, momentum=0.9),
    ],
)
def test_updates_of_some_parameters_and_gradients_of_others(make: Make, size: int) -> None:
    clipped = dgcopt.DGC(0.3, clip=dgcopt.LocalClip(0.5, per="tensor"))
    rules = {"*.bias": dgcopt.NoCompression(), "fc.*": clipped, "norm.*": dgcopt.BF16(), "*": dgcopt.TopK(0.1)}
    assert_as_alone(rules, make, size)
    gradients = dgcopt.DGC(0.3, clip=dgcopt.LocalClip(0.5, per="tensor"), source="gradient")
    assert_as_alone({"*.bias": gradients, "*": dgcopt.TopK(0.1)}, make, size)


def test_adam_is_frozen_for_some_beside_updates_of_others() -> None:
    rules = {"*.bias": dgcopt.NoCompression(), "fc.*": FROZEN, "*": dgcopt.TopK(0.1)}
    assert_as_alone(rules, lambda p: AdamW(p, lr=0.01), 2, steps=6)


def test_ranks_compare_the_state_that_is_to_be_equal_on_all() -> None:
    world = World(2, lambda p: AdamW(p, lr=0.01), dgcopt.PerParameter(MIXED))
    world.train(2)
    replicated = synchronised(world.optimizers[0]).wrapped.replicated()
    assert {name: len(tensors) for name, tensors in replicated.items()} == {
        name: 4 if name.endswith("bias") else 1 for name in SHAPES
    }


def test_a_step_that_is_void_is_so_for_gradients_and_updates() -> None:
    world = World(2, lambda p: AdamW(p, lr=0.01), dgcopt.PerParameter(MIXED))
    world.train(2)
    before = copy.deepcopy([(params, opt.state_dict()["state"]) for params, opt in _pairs(world)])
    for rank, (params, optimizer) in enumerate(_pairs(world)):
        optimizer.zero_grad()
        sum(p.sum() for p in params.values()).backward()  # type: ignore[union-attr]
        if rank == 1:
            params["fc.bias"].grad[0] = torch.nan  # type: ignore[index]
    for optimizer in world.optimizers:
        optimizer.step()
    for (params, optimizer), (weights, state) in zip(_pairs(world), before, strict=True):
        assert all(torch.equal(params[name], weights[name]) for name in SHAPES)
        for place, mine in optimizer.state_dict()["state"].items():
            assert all(torch.equal(mine[key], state[place][key]) for key in mine)


def _pairs(world: World) -> list[tuple[dict[str, nn.Parameter], Any]]:
    return list(zip(world.params, world.optimizers, strict=True))


def test_an_optimizer_that_may_not_step_some_without_the_others() -> None:
    rules = {"*.bias": dgcopt.NoCompression(), "*": dgcopt.TopK(0.1, source="update")}
    with pytest.raises(ConfigError, match=r"'\*.bias': 'gradient', '\*': 'update'.* SGD may not be able to step them"):
        World(2, momentum, dgcopt.PerParameter(rules))
    with pytest.raises(ConfigError, match="source must be"):
        dgcopt.PerParameter({"*": dgcopt.TopK()}, source="updates")  # type: ignore[arg-type]


@pytest.mark.parametrize("source", ["gradient", "update"])
@pytest.mark.parametrize("size", [2, 3])
def test_one_source_for_all(source: Any, size: int) -> None:
    rules = {"*.bias": dgcopt.NoCompression(), "fc.*": dgcopt.DGC(0.1), "*": dgcopt.TopK(0.1)}
    given = {pattern: copy.deepcopy(rule) for pattern, rule in rules.items()}
    for rule in given.values():
        rule.source = source
    together = dgcopt.PerParameter(rules, source)
    assert_as_alone(given, lambda p: AdamW(p, lr=0.01), size, together)
    assert repr(together).endswith(f", source={source!r})") and rules["*"].source == "auto", "they are copies"


def assert_each_as_in(train: Callable[[Compressor], dict[str, Tensor]]) -> None:
    ours = train(dgcopt.PerParameter(EACH_ITS_OWN))
    alone = {pattern: train(rule) for pattern, rule in EACH_ITS_OWN.items()}
    for name, pattern in patterns(EACH_ITS_OWN).items():
        assert torch.equal(ours[name], alone[pattern][name]), name


@pytest.mark.parametrize("make", [momentum, lambda p: AdamW(p, lr=0.01)])
def test_a_rank_that_has_run_out_of_data_goes_along(make: Make) -> None:
    def train(compressor: Compressor) -> dict[str, Tensor]:
        world = World(2, make, compressor)
        with contextlib.ExitStack() as last:
            last.enter_context(dgcopt.join(world.optimizers[1]))
            with dgcopt.join(world.optimizers[0]):
                world.train(3)
            for step in range(3, 5):
                world.optimizers[1].zero_grad()
                params = world.params[1]
                sum((p * noise(step, 1, n, shape=SHAPES[n])).sum() for n, p in params.items()).backward()  # type: ignore[union-attr]
                world.optimizers[1].step()
        assert all(torch.equal(world.params[0][name], param) for name, param in world.params[1].items())
        return world.params[1]  # type: ignore[return-value]

    assert_each_as_in(train)


@pytest.mark.parametrize("make", [momentum, lambda p: AdamW(p, lr=0.01)])
def test_scaled_losses(make: Make) -> None:
    """One overflows: its step is taken by nobody, for no rule."""

    def train(compressor: Compressor) -> dict[str, Tensor]:
        world = World(2, make, compressor)
        scalers = [torch.amp.GradScaler("cpu", init_scale=1024.0) for _ in range(2)]
        for step in range(4):
            for rank, (params, optimizer) in enumerate(_pairs(world)):
                optimizer.zero_grad()
                loss = sum((p * noise(step, rank, n, shape=SHAPES[n])).sum() for n, p in params.items())
                scalers[rank].scale(loss * (torch.inf if (step, rank) == (2, 1) else 1.0)).backward()
            for scaler, optimizer in zip(scalers, world.optimizers, strict=True):
                scaler.unscale_(optimizer)
            for scaler, optimizer in zip(scalers, world.optimizers, strict=True):
                scaler.step(optimizer)
                scaler.update()
        assert [optimizer.telemetry.skipped for optimizer in world.optimizers] == [1, 1]
        assert all(torch.equal(world.params[0][name], param) for name, param in world.params[1].items())
        return world.params[0]  # type: ignore[return-value]

    assert_each_as_in(train)


@pytest.mark.parametrize("source", ["gradient", "update"])
def test_a_clip_is_of_the_rules_own_parameters(source: Any) -> None:
    clipped = dgcopt.DGC(0.3, clip=dgcopt.LocalClip(0.5), source=source)
    rest = dgcopt.DGC(0.1, source=source)
    make: Make = (lambda p: AdamW(p, lr=0.01)) if source == "update" else momentum
    ours = World(3, make, dgcopt.PerParameter({"fc.*": clipped, "*": rest})).train()
    theirs = [World(3, make, clipped, ["fc.weight", "fc.bias"]).train()]
    theirs.append(World(3, make, rest, [name for name in SHAPES if not name.startswith("fc")]).train())
    for world in theirs:
        for mine, alone in zip(ours, world, strict=True):
            assert all(torch.equal(mine[name], weight) for name, weight in alone.items())
