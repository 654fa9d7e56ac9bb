"""PerParameter's patterns, its checkpoints, and wrappers within and around it."""

from __future__ import annotations

import copy
import io
import pickle
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.optim import SGD, Optimizer

import dgcopt
from dgcopt import kernels
from dgcopt.compressors import Compressor
from dgcopt.errors import ConfigError
from dgcopt.gradients import tracker
from dgcopt.gradients.synchronised import synchronised
from tests.support.rules import SHAPES, World, momentum, noise, patterns
from tests.unit.compressors.test_per_parameter import FROZEN, SPARSE, assert_as_alone


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
def test_wrong_rules_are_refused(rules: Any, words: str) -> None:
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


def test_pickles_hold_no_parameters() -> None:
    compressor = dgcopt.PerParameter(SPARSE)
    compressor.see_parameters(named(*SHAPES))
    again = pickle.loads(pickle.dumps(compressor))
    assert repr(again) == repr(compressor) and not again._pattern_of


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


def test_diloco_and_join_refuse_rules_inside_too() -> None:
    with pytest.raises(ConfigError, match="OneBitAdam learns Adam's second moments"):
        dgcopt.DiLoCo(4, compression=dgcopt.PerParameter({"*": FROZEN}))
    world = World(2, momentum, dgcopt.PerParameter({"*": dgcopt.Adasum()}))
    with pytest.raises(ConfigError, match="join does not work with Adasum"), dgcopt.join(world.optimizers[0]):
        pass


def test_each_rule_answers_for_its_own_buckets() -> None:
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
    monkeypatch.setattr("dgcopt.flat.gradient.SMALL", 1)  # copied gradients are bounded by the copy
    world = World(2, momentum, dgcopt.PerParameter({"*": dgcopt.DGC(0.1, overlap=True)}))
    world.train(2)
    read: list[int] = []
    monkeypatch.setattr(tracker, "peaks", lambda grads: read.append(len(grads)) or kernels.peaks(grads))
    world.train(1)
    assert not read
    monkeypatch.setattr(tracker.GradientTracker, "bounded", lambda *args: None)
    world.train(1)
    assert read, "without maxima the vote reads gradients"
