"""PerParameter: every parameter is trained as if its rule were the only one."""

from __future__ import annotations

import contextlib
import copy
import io
import pickle
import zlib
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.optim import SGD, Adam, AdamW, Optimizer, RMSprop
from torch.optim.lr_scheduler import OneCycleLR

import dgcopt
from dgcopt import kernels
from dgcopt.compressors import Compressor
from dgcopt.errors import ConfigError
from dgcopt.gradients import tracker
from dgcopt.gradients.optimizer import synchronised

SHAPES = {"conv.weight": (70, 9), "conv.bias": (70,), "fc.weight": (50, 33), "fc.bias": (33,), "norm.weight": (65,)}

Make = Callable[[Iterable[Tensor]], Optimizer]


def momentum(params: Iterable[Tensor]) -> Optimizer:
    return SGD(params, lr=0.1, momentum=0.9, weight_decay=0.01)


def noise(*what: object, shape: tuple[int, ...]) -> Tensor:
    generator = torch.Generator().manual_seed(zlib.crc32(repr(what).encode()))
    return torch.randn(shape, generator=generator)


class World:
    """Ranks of one simulated world, whose gradients do not depend on weights, so that no parameter does on another."""

    def __init__(
        self,
        size: int,
        make: Make,
        compressor: Compressor | None,
        names: Iterable[str] = SHAPES,
        nodes: int = 1,
        attach: Callable[..., Any] = dgcopt.DistributedOptimizer,
        **settings: Any,
    ) -> None:
        self.step_count = 0
        self.params = [{name: nn.Parameter(noise(name, shape=SHAPES[name])) for name in names} for _ in range(size)]
        self.optimizers: list[Any] = [
            attach(make(params.values()), params.items(), compressor, comm=comm, **settings)
            for params, comm in zip(self.params, dgcopt.simulated_world(size, nodes), strict=True)
        ]

    def step(self) -> dict[str, Tensor]:
        """The weights after it, alike on all ranks."""
        for rank, (params, optimizer) in enumerate(zip(self.params, self.optimizers, strict=True)):
            optimizer.zero_grad()
            trained = {name: param for name, param in params.items() if param.requires_grad}
            grads = [noise(self.step_count, rank, name, shape=SHAPES[name]) for name in trained]
            sum((p * g).sum() for p, g in zip(trained.values(), grads, strict=True)).backward()  # type: ignore[union-attr]
        for optimizer in self.optimizers:
            optimizer.step()
        self.step_count += 1
        for params in self.params:
            assert all(torch.equal(params[name], first) for name, first in self.params[0].items())
        return {name: param.detach().clone() for name, param in self.params[0].items()}

    def train(self, steps: int = 5) -> list[dict[str, Tensor]]:
        return [self.step() for _ in range(steps)]


def patterns(rules: Mapping[str, Compressor]) -> dict[str, str]:
    return {name: dgcopt.PerParameter(rules).pattern_for(name) for name in SHAPES}


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


# -- which rule is whose -----------------------------------------------------------------------------------------------


def test_the_first_match_wins() -> None:
    rules = {"fc.bias": dgcopt.TopK(), "*.bias": dgcopt.NoCompression(), "[cf]*": dgcopt.DGC(), "*": dgcopt.DGC()}
    assert patterns(rules) == {
        "conv.weight": "[cf]*",
        "conv.bias": "*.bias",
        "fc.weight": "[cf]*",
        "fc.bias": "fc.bias",
        "norm.weight": "*",
    }


def named(*names: str) -> dict[Tensor, str]:
    return {nn.Parameter(torch.zeros(3)): name for name in names}


@pytest.mark.parametrize(
    ("rules", "words"),
    [
        ({"*.bias": 3}, r"the rule of '\*.bias': .* must be a dgcopt.Compressor"),
        ({3: dgcopt.DGC()}, "must be strings, not 3"),
        ({}, "a compressor for each pattern"),
        (dgcopt.DGC(), "a compressor for each pattern"),
        ({"a": dgcopt.PerParameter()}, "the rule of 'a' is a PerParameter itself"),
        ({"a": dgcopt.Hierarchical(dgcopt.PerParameter())}, "the rule of 'a' is a PerParameter itself"),
    ],
)
def test_what_is_no_rule(rules: Any, words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        dgcopt.PerParameter(rules)


@pytest.mark.parametrize(
    ("rules", "words"),
    [
        (["*.bias"], r"parameter 'fc.weight' matches none of PerParameter's patterns, '\*.bias'"),
        (["head.*", "*"], r"'head.\*' matches no parameter. Names are like fc.weight, fc.bias"),
        (
            ["fc.*", "fc.bias", "*"],
            r"'fc.bias' comes too late: earlier patterns, 'fc.\*', already match .* \(fc.bias\)",
        ),
        (["*", "fc.*"], r"'fc.\*' comes too late: .* \(fc.weight, fc.bias\)"),
    ],
)
def test_patterns_that_do_not_fit_the_model(rules: list[str], words: str) -> None:
    compressor = dgcopt.PerParameter({pattern: dgcopt.NoCompression() for pattern in rules})
    for wrapper in (compressor, dgcopt.FP16(compressor)):
        with pytest.raises(ConfigError, match=words):
            wrapper.see_parameters(named("fc.weight", "fc.bias"))
    params = named("fc.weight", "fc.bias")
    optimizer = momentum(params)
    with pytest.raises(ConfigError, match=words):
        dgcopt.DistributedOptimizer(
            optimizer, [(n, p) for p, n in params.items()], compressor, comm=dgcopt.simulated_world(1)[0]
        )
    assert type(optimizer) is SGD, "nothing has happened to it"


def test_a_last_star_may_be_left_with_nothing() -> None:
    rules = {"*.bias": dgcopt.NoCompression(), "*.weight": dgcopt.DGC(), "*": dgcopt.TopK()}
    dgcopt.PerParameter(rules).see_parameters(named("fc.weight", "fc.bias"))


def test_numbers_in_place_of_names_are_told_of() -> None:
    with pytest.raises(ConfigError, match=r"group0.parameter0, .* give the wrapper model.named_parameters\(\)"):
        dgcopt.DistributedOptimizer(
            momentum(named("a", "b")),
            None,
            dgcopt.PerParameter({"*.bias": dgcopt.NoCompression(), "*": dgcopt.DGC()}),
            comm=dgcopt.simulated_world(2)[0],
        )
    with pytest.raises(ConfigError, match=r"group0.parameter0, .* give the wrapper model.named_parameters\(\)"):
        dgcopt.ddp_hook(
            dgcopt.PerParameter({"*.bias": dgcopt.NoCompression(), "*": dgcopt.DGC()}), momentum(named("a", "b"))
        )


def test_names_of_the_model_outside_the_optimizer_count_for_patterns() -> None:
    """A layer that is given to the optimizer later."""
    params, later = named("fc.weight", "fc.bias"), named("head.weight")
    compressor = dgcopt.PerParameter({"head.*": dgcopt.TopK(), "fc.*": dgcopt.NoCompression()})
    both = [(n, p) for p, n in [*params.items(), *later.items()]]
    optimizer = dgcopt.DistributedOptimizer(momentum(params), both, compressor, comm=dgcopt.simulated_world(2)[0])
    optimizer.add_param_group({"params": list(later)})
    with pytest.raises(ConfigError, match="parameter 'other' matches none"):
        optimizer.add_param_group({"params": list(named("other"))}, names=["other"])


# -- each as alone -----------------------------------------------------------------------------------------------------

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


# -- gradients or updates ----------------------------------------------------------------------------------------------


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


MIXED = {"*.bias": dgcopt.NoCompression(), "*": dgcopt.TopK(0.1)}


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


EACH_ITS_OWN: dict[str, Compressor] = {
    "*.bias": dgcopt.NoCompression(),
    "fc.*": dgcopt.DGC(0.3),
    "*": dgcopt.TopK(0.1),
}


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
                scaler.step(optimizer)
                scaler.update()
        assert [optimizer.telemetry.skipped for optimizer in world.optimizers] == [1, 1]
        assert all(torch.equal(world.params[0][name], param) for name, param in world.params[1].items())
        return world.params[0]  # type: ignore[return-value]

    assert_each_as_in(train)


# -- what needs all gradients, and which are all -----------------------------------------------------------------------


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


# -- frozen now, trained later -----------------------------------------------------------------------------------------


def test_a_pattern_for_a_layer_that_is_trained_later() -> None:
    rules = {"fc.*": dgcopt.DGC(0.1), "*": dgcopt.NoCompression()}

    def train(compressor: Compressor) -> list[dict[str, Tensor]]:
        world = World(2, momentum, compressor)
        weights = []
        for trained in (False, True, False, True):
            for params in world.params:
                for name in ("fc.weight", "fc.bias"):
                    params[name].requires_grad_(trained)
                    params[name].grad = None
            weights += world.train(2)
        return weights

    ours, alone = train(dgcopt.PerParameter(rules)), {p: train(rule) for p, rule in rules.items()}
    for name, pattern in patterns(rules).items():
        assert all(torch.equal(a[name], b[name]) for a, b in zip(ours, alone[pattern], strict=True)), name


# -- checkpoints -------------------------------------------------------------------------------------------------------


def test_a_checkpoint_goes_on_to_the_bit() -> None:
    straight, first = (World(2, momentum, dgcopt.PerParameter(SPARSE)) for _ in range(2))
    expected = straight.train(6)
    first.train(3)
    resumed = World(2, momentum, dgcopt.PerParameter(SPARSE))
    for rank in range(2):
        buffer = io.BytesIO()
        torch.save(first.optimizers[rank].state_dict(), buffer)
        resumed.optimizers[rank].load_state_dict(torch.load(io.BytesIO(buffer.getvalue())))
        for name, param in resumed.params[rank].items():
            param.data.copy_(first.params[rank][name])
    resumed.step_count = 3
    for ours, theirs in zip(resumed.train(3), expected[3:], strict=True):
        assert all(torch.equal(ours[name], theirs[name]) for name in SHAPES)


def test_a_copy_of_the_optimizer_goes_on_alike() -> None:
    world = World(2, momentum, dgcopt.PerParameter(SPARSE))
    world.train(2)
    twins = copy.deepcopy(list(zip(world.params, world.optimizers, strict=True)))
    expected = world.train(2)
    world.params, world.optimizers = map(list, zip(*twins, strict=True))
    world.step_count = 2
    for ours, theirs in zip(world.train(2), expected, strict=True):
        assert all(torch.equal(ours[name], theirs[name]) for name in SHAPES)


def test_what_is_pickled_holds_no_parameters() -> None:
    compressor = dgcopt.PerParameter(SPARSE)
    compressor.see_parameters(named(*SHAPES))
    again = pickle.loads(pickle.dumps(compressor))
    assert repr(again) == repr(compressor) and not again._pattern_of


# -- around it, and inside it ------------------------------------------------------------------------------------------


def test_wrappers_inside() -> None:
    rules = {"*.bias": dgcopt.BF16(), "fc.*": dgcopt.FP16(dgcopt.DGC(0.1)), "*": dgcopt.Hierarchical(dgcopt.DGC(0.1))}
    assert_as_alone(rules, momentum, 4, nodes=2)


@pytest.mark.parametrize("wrapper", [dgcopt.FP16, dgcopt.BF16, dgcopt.Hierarchical])
def test_wrappers_around(wrapper: Callable[[Compressor], Compressor]) -> None:
    rules = {pattern: wrapper(rule) for pattern, rule in SPARSE.items()}
    assert_as_alone(rules, momentum, 4, wrapper(dgcopt.PerParameter(SPARSE)), nodes=2)


@pytest.mark.parametrize("settings", [{}, {"fragments": 2}, {"fragments": 2, "delay": 1}], ids=str)
def test_diloco_around(settings: dict) -> None:
    """A fragment has parameters of some rules only, while patterns are of the whole model."""

    def attach(optimizer: Optimizer, names: Any, compression: Compressor, comm: Any) -> Any:
        return dgcopt.DiLoCo(4, compression=compression, **settings).attach(optimizer, names, comm)

    def train(compressor: Compressor) -> list[dict[str, Tensor]]:
        world = World(2, momentum, compressor, attach=attach)
        for _ in range(8):
            for rank, (params, optimizer) in enumerate(zip(world.params, world.optimizers, strict=True)):
                optimizer.zero_grad()
                grads = [noise(world.step_count, rank, name, shape=SHAPES[name]) for name in params]
                sum((p * g).sum() for p, g in zip(params.values(), grads, strict=True)).backward()  # type: ignore[union-attr]
            for optimizer in world.optimizers:
                optimizer.step()
            world.step_count += 1
        return [{name: param.detach().clone() for name, param in params.items()} for params in world.params]

    ours, alone = train(dgcopt.PerParameter(SPARSE)), {p: train(rule) for p, rule in SPARSE.items()}
    for name, pattern in patterns(SPARSE).items():
        assert all(torch.equal(a[name], b[name]) for a, b in zip(ours, alone[pattern], strict=True)), name


def test_what_diloco_and_join_refuse_they_refuse_inside() -> None:
    with pytest.raises(ConfigError, match="OneBitAdam learns Adam's second moments"):
        dgcopt.DiLoCo(4, compression=dgcopt.PerParameter({"*": FROZEN}))
    world = World(2, momentum, dgcopt.PerParameter({"*": dgcopt.Adasum()}))
    with pytest.raises(ConfigError, match="join does not work with Adasum"), dgcopt.join(world.optimizers[0]):
        pass


# -- what a rule says of itself holds for its buckets ------------------------------------------------------------------


def test_what_is_asked_of_buckets_each_rule_answers_for_its_own() -> None:
    compressor = dgcopt.PerParameter({"*.bias": dgcopt.NoCompression(), "*": dgcopt.DGC(0.1)})
    bias, weight = (compressor.kind(name, torch.zeros(3, 3)) for name in ("fc.bias", "fc.weight"))
    assert bias != weight
    assert compressor.adds_up(bias) and not compressor.adds_up(weight)
    assert compressor.in_place(weight) and not compressor.in_place(bias)
    assert not dgcopt.PerParameter(
        {"*.bias": dgcopt.NoCompression(), "*": dgcopt.DGC(clip=dgcopt.LocalClip(1.0))}
    ).in_place(bias)


def test_gradients_are_divided_before_the_sum_where_a_rule_only_adds_up() -> None:
    world = World(3, momentum, dgcopt.PerParameter(SPARSE))
    world.train(2)
    engine = synchronised(world.optimizers[0]).engine
    ops = {bucket.kind.pattern: engine.layout.contexts[bucket].op for bucket in engine.layout.buckets}
    assert ops == {"*.bias": "sum", "fc.*": "average", "norm.*": "average", "*": "average"}


@pytest.mark.parametrize(
    ("overlaps", "together"),
    [((True, True), True), ((True, "auto"), "auto"), ((True, False), False), (("auto", False), False)],
)
def test_exchanges_start_early_if_all_may(overlaps: Any, together: Any) -> None:
    rules = {str(i): dgcopt.DGC(overlap=overlap) for i, overlap in enumerate(overlaps)}
    assert dgcopt.PerParameter(rules).overlap is together or dgcopt.PerParameter(rules).overlap == together


def test_maxima_of_an_exchange_spare_the_vote_a_pass(monkeypatch: pytest.MonkeyPatch) -> None:
    """DGC computes the largest gradient anyway, so the vote reads none again for NaN and Inf."""
    world = World(2, momentum, dgcopt.PerParameter({"*": dgcopt.DGC(0.1, overlap=True)}))
    world.train(2)
    read: list[int] = []
    monkeypatch.setattr(tracker, "peaks", lambda grads: read.append(len(grads)) or kernels.peaks(grads))
    world.train(1)
    assert not read
    monkeypatch.setattr(tracker.GradientTracker, "bounded", lambda *args: None)
    world.train(1)
    assert read, "without maxima the vote reads gradients"
