"""Averaging of parameters of every kind, and of parameters that come and go."""

from __future__ import annotations

import functools
from collections.abc import Iterable

import pytest
import torch
from torch import Tensor, nn
from torch.optim import SGD, Optimizer

import dgcopt
from dgcopt import ConfigError, LocalSGD, MismatchError
from dgcopt.averaging import Averaging
from tests.support.averaging import (
    Make,
    World,
    adam,
    assert_worlds_close,
    identical,
    momentum,
    plain,
)
from tests.support.worlds import small_model


@pytest.mark.parametrize("make", [momentum, adam])
@pytest.mark.parametrize("overlap", [False, True])
def test_parameters_come_and_go(make: Make, overlap: bool):
    """Frozen at the start, unfrozen, frozen later on, and a group that is added."""
    runs = []
    for rule in (LocalSGD(3, overlap=overlap), None):
        world = World(2, rule, lambda params: make(list(params)[:4]))
        arriving: dict[str, Tensor] = {}
        for model in world.models:
            model[0].weight.requires_grad_(False)
        for step in range(1, 16):
            if step == 5:
                for model in world.models:
                    model[0].weight.requires_grad_(True)
            if step == 7:
                for _, model, optimizer in world:
                    optimizer.add_param_group({"params": list(model[4].parameters()), "lr": 0.03})
            if step == 10:
                for model in world.models:
                    model[2].bias.requires_grad_(False)
                    model[2].bias.grad = None
            if step == 13:
                for model in world.models:
                    model[2].bias.requires_grad_(True)
            world.backward(step)
            world.put(arriving)
            for optimizer in world.optimizers:
                optimizer.step()
            arriving = world.means() if rule is None and step % 3 == 0 else {}
            if not overlap:
                world.put(arriving)
        runs.append(world)
    assert_worlds_close(*runs)
    names = runs[0].optimizers[0].averaging.names.values()
    assert list(names) == [name for name, _ in runs[0].models[0].named_parameters()]


class Mixed(nn.Module):
    """Several dtypes, channels-last, empty, scalar, shared, and one that no loss ever uses."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.low = nn.Linear(12, 10).to(torch.bfloat16)
        self.conv = nn.Conv2d(2, 6, (1, 3)).to(memory_format=torch.channels_last)
        self.wide = nn.Linear(18, 5).double()
        self.again = nn.Linear(18, 5).double()
        self.again.weight = self.wide.weight
        self.empty = nn.Parameter(torch.zeros(0, 3))
        self.scalar = nn.Parameter(torch.tensor(0.5))
        self.unused = nn.Parameter(torch.ones(3))

    def forward(self, x: Tensor) -> Tensor:
        x = self.low(x.to(torch.bfloat16)).float()
        x = self.conv(x.view(-1, 2, 1, 5)).tanh().flatten(1).double()
        return self.wide(x) + self.scalar * self.again(x) + self.empty.sum()


@pytest.mark.parametrize("overlap", [False, True])
def test_parameters_of_every_kind(overlap: bool):
    def make(params: Iterable[Tensor]) -> Optimizer:
        first, second, *others = params
        return SGD([{"params": [first, second], "lr": 0.2}, {"params": others}], lr=0.1, momentum=0.9)

    ours = World(3, LocalSGD(2, overlap=overlap), make, Mixed).train(range(5))
    theirs = World(3, None, make, Mixed)
    arriving: dict[str, Tensor] = {}
    for step in range(1, 6):
        theirs.backward(step - 1)
        theirs.put(arriving)
        for optimizer in theirs.optimizers:
            optimizer.step()
        arriving = theirs.means() if step % 2 == 0 else {}
        if not overlap:
            theirs.put(arriving)
    for rank in range(3):
        for here, there in zip(ours.models[rank].parameters(), theirs.models[rank].parameters(), strict=True):
            tolerance = 2e-2 if here.dtype == torch.bfloat16 else 1e-3
            torch.testing.assert_close(here, there, rtol=tolerance, atol=tolerance)
    assert ours.models[0].conv.weight.is_contiguous(memory_format=torch.channels_last)
    assert ours.models[0].wide.weight is ours.models[0].again.weight


def test_parameters_that_cannot_be_averaged_are_refused():
    two_numbers = nn.Parameter(torch.ones(3, dtype=torch.complex64))
    with pytest.raises(ConfigError, match="'phase' has dtype complex64"):
        LocalSGD().attach(SGD([two_numbers], lr=0.1), [("phase", two_numbers)], dgcopt.simulated_world(1)[0])
    whole = nn.Parameter(torch.ones(3, dtype=torch.int64), requires_grad=False)
    with pytest.raises(ConfigError, match="none of the optimizer's parameters requires a gradient"):
        LocalSGD().attach(SGD([whole], lr=0.1), [("count", whole)], dgcopt.simulated_world(1)[0])
    model = small_model()
    with pytest.raises(ConfigError, match=r"1 parameter.s. of the optimizer were not named"):
        LocalSGD().attach(
            plain(model.parameters()), list(model.named_parameters())[1:], comm=dgcopt.simulated_world(1)[0]
        )


def model_with_frozen_waves() -> nn.Module:
    model = small_model()
    model[1].waves = nn.Parameter(torch.ones(3, dtype=torch.complex64), requires_grad=False)
    return model


def test_parameters_that_have_become_what_cannot_be_averaged_are_refused():
    world = World(2, LocalSGD(2)).train(range(1))
    for _, _, optimizer in world:
        optimizer.add_param_group({"params": [nn.Parameter(torch.ones(3, dtype=torch.complex64))]})
        with pytest.raises(ConfigError, match=r"'group1.parameter0' has dtype complex64"):
            optimizer.step()
    world = World(2, LocalSGD(2), model=model_with_frozen_waves).train(range(3))
    for _, model, optimizer in world:
        model[1].waves.requires_grad = True
        with pytest.raises(ConfigError, match=r"'1.waves' has dtype complex64"):
            optimizer.step()
    world = World(2, LocalSGD(2)).train(range(1))
    for _, model, optimizer in world:
        model[4].bias.data = torch.zeros(7, dtype=torch.float64)
        model[4].bias.grad = None
        with pytest.raises(ConfigError, match=r"'4.bias' had 5 elements when it was last exchanged, and has 7"):
            optimizer.step()


@pytest.mark.parametrize(
    "rule",
    [LocalSGD(4), dgcopt.DiLoCo(4), dgcopt.SlowMo(4), dgcopt.DiLoCo(4, delay=1), LocalSGD(4, overlap=True)],
    ids=str,
)
def test_parameters_frozen_within_a_window_are_averaged_once_more(rule: Averaging) -> None:
    world = World(3, rule, plain)
    for seed in range(6):
        world.step(seed)
    for _, model, _ in world:
        model[0].requires_grad_(False)
    for seed in range(6, 10):
        world.step(seed)
    frozen = [model[0].weight.detach().clone() for _, model, _ in world]
    assert torch.equal(frozen[0], frozen[1]) and torch.equal(frozen[0], frozen[2])
    for seed in range(10, 14):
        world.step(seed)
    for _, model, _ in world:
        assert torch.equal(model[0].weight, frozen[0]), "and stays"


@pytest.mark.parametrize(
    ("rule", "frozen_at", "left"),
    [(LocalSGD(4, node_every=2), 6, 0.0), (dgcopt.DiLoCo(4, alpha=0.5), 4, 0.5)],
    ids=str,
)
def test_parameters_frozen_after_a_round_that_left_them_apart_are_in_the_next(
    rule: Averaging, frozen_at: int, left: float
) -> None:
    """Which is of all machines, or leaves as much of a rank's own weights as `alpha` says."""
    world = World(4, rule, plain, nodes=2).train(range(frozen_at))
    weights = [model[0].requires_grad_(False).weight for _, model, _ in world]
    before = weights[0] - weights[3]
    assert before.any()
    world.train(range(frozen_at, 8))
    torch.testing.assert_close(weights[0] - weights[3], left * before)


def step_with_kept_gradients(world: World, seed: int) -> None:
    for rank, _, optimizer in world:
        optimizer.zero_grad(set_to_none=False)
        world.loss(rank, seed).backward()
    for optimizer in world.optimizers:
        optimizer.step()


@pytest.mark.parametrize("make", [momentum, adam])
@pytest.mark.parametrize(
    "rule",
    [
        LocalSGD(3),
        LocalSGD(3, overlap=True),
        LocalSGD(3, warmup_steps=3),
        dgcopt.SlowMo(6, base=LocalSGD(3)),
        dgcopt.DiLoCo(3),
        dgcopt.DiLoCo(3, delay=1),
        dgcopt.SPARTA(1.0),
    ],
    ids=str,
)
def test_frozen_parameters_with_a_gradient_are_averaged_as_they_are_stepped(rule: Averaging, make: Make) -> None:
    world = World(3, rule, make)
    for step in range(24):
        for model in world.models:
            model[0].requires_grad_(not 4 <= step < 18)
        before = world.weights()
        step_with_kept_gradients(world, step)
        assert not torch.equal(world.weights()[0], before[0]), "torch steps it on"
        if step in (11, 23):
            for optimizer in world.optimizers:
                optimizer.averaging.finish_round()
            assert identical(world), f"ranks are apart after step {step}"


def test_frozen_parameters_with_a_gradient_take_the_mean_of_the_ranks() -> None:
    ours, theirs = World(3, LocalSGD(2), momentum), World(3, None, momentum)
    for step in range(1, 11):
        for world in (ours, theirs):
            for model in world.models:
                model[0].requires_grad_(step < 4)
            step_with_kept_gradients(world, step)
        if step % 2 == 0:
            theirs.put(all_means(theirs))
    assert_worlds_close(ours, theirs)


@torch.no_grad()
def all_means(world: World) -> dict[str, Tensor]:
    named = [dict(model.named_parameters()) for model in world.models]
    return {name: sum(mine[name] for mine in named) / len(named) for name in named[0]}


@pytest.mark.parametrize("overlap", [False, True])
def test_a_frozen_gradient_kept_on_some_ranks_only_is_refused(overlap: bool) -> None:
    """By a vote before messages of other sizes are sent."""
    world = World(3, LocalSGD(2, overlap=overlap), momentum)
    for step in range(4):
        step_with_kept_gradients(world, step)
    for rank, model, _ in world:
        model[0].weight.requires_grad_(False)
        if rank == 1:
            model[0].weight.grad = None
    with pytest.raises(MismatchError, match=r"rank 0 has \[0.weight \(frozen.*gradients of frozen parameters to None"):
        for step in range(4, 7):
            step_with_kept_gradients(world, step)


def test_ranks_without_data_average_frozen_parameters_with_a_gradient() -> None:
    world = World(2, LocalSGD(2), momentum)
    with dgcopt.join(world.optimizers[0]):
        with dgcopt.join(world.optimizers[1]):
            for step in range(4):
                step_with_kept_gradients(world, step)
                for model in world.models:
                    model[0].requires_grad_(step < 1)
        for step in range(4, 8):
            world.optimizers[0].zero_grad(set_to_none=False)
            world.loss(0, step).backward()
            world.optimizers[0].step()
    assert identical(world)


@pytest.mark.parametrize("rule", [LocalSGD(2), dgcopt.SlowMo(2), dgcopt.DiLoCo(2)], ids=str)
def test_parameters_appended_to_a_group_by_hand_are_averaged(rule: Averaging) -> None:
    by_hand, by_call = (World(3, rule, lambda params: plain(list(params)[:4])).train(range(3)) for _ in range(2))
    for _, model, optimizer in by_hand:
        optimizer.param_groups[0]["params"] = [*optimizer.param_groups[0]["params"], *model[4].parameters()]
    for _, model, optimizer in by_call:
        optimizer.add_param_group({"params": [*model[4].parameters()]})
    assert identical(by_hand.train(range(3, 8)))
    assert_worlds_close(by_hand, by_call.train(range(3, 8)), 0)


def test_a_parameter_moved_to_another_group_by_hand_has_the_settings_of_that_group() -> None:
    world = World(2, dgcopt.SlowMo(2), plain).train(range(3))
    for _, _, optimizer in world:
        (group,) = optimizer.param_groups
        first, *others = group["params"]
        optimizer.param_groups = [{**group, "params": others}, {**group, "params": [first], "lr": 0.01}]
    world.train(range(3, 6))
    for _, _, optimizer in world:
        rates = {s.name: ctx.lr for bucket, ctx in optimizer.averaging.buckets().items() for s in bucket.segments}
        assert rates.pop("0.weight") == 0.01 and {*rates.values()} == {0.1}
    assert identical(world)


@pytest.mark.parametrize("rule", [LocalSGD(2), dgcopt.DiLoCo(2), dgcopt.SGP()], ids=str)
def test_parameters_replaced_by_hand_are_refused(rule: Averaging) -> None:
    """The new ones would be stepped and never averaged."""
    world = World(2, rule, lambda params: plain(list(params)[:4])).train(range(3))
    for rank, model, optimizer in world:
        optimizer.param_groups[0]["params"][2:] = model[4].parameters()
        for _ in range(2):
            with pytest.raises(ConfigError, match=rf"rank {rank}: parameter '2.weight' \(2 of 4\) was removed"):
                optimizer.step()


def test_a_parameter_put_before_others_by_hand_is_refused_without_a_name() -> None:
    model = small_model()
    first, *others = model.parameters()
    optimizer = LocalSGD(2).attach(plain(others), comm=dgcopt.simulated_world(1)[0])
    optimizer.param_groups[0]["params"].insert(0, first)
    with pytest.raises(ConfigError, match=r"would have the name of another, 'group0.parameter0'.*add_param_group"):
        optimizer.step()


class WideMomentum(SGD):
    """SGD with a float32 momentum of weights of half precision."""

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]
        for param in self.param_groups[0]["params"]:
            if param.grad is not None:
                wide = self.state[param].setdefault("wide", torch.zeros_like(param, dtype=torch.float32))
                param.sub_(wide.mul_(0.9).add_(param.grad).to(param.dtype), alpha=0.1)


def test_zeros_for_a_state_that_a_rank_lacks_have_the_dtype_of_the_others() -> None:
    """In another dtype than the parameter's: messages of two dtypes would not fit together."""
    world = World(
        2,
        LocalSGD(4, state_every={"wide": 2}),
        functools.partial(WideMomentum, lr=0.1),
        functools.partial(small_model, torch.bfloat16),
    )
    for seed in range(4):
        world.backward(seed)
        next(world.models[0].parameters()).grad = None
        for optimizer in world.optimizers:
            optimizer.step()
    assert identical(world)
    ours, theirs = ([o.state[p]["wide"] for p in [*m.parameters()][1:]] for _, m, o in world)
    assert all(map(torch.equal, ours, theirs)) and {state.dtype for state in ours} == {torch.float32}


def test_sparse_state_is_refused() -> None:
    """SGD keeps the momentum of sparse gradients as a sparse tensor, which is no part of a flat one."""
    rule = LocalSGD(4, state_every={"momentum_buffer": 1})
    world = World(2, rule, model=lambda: nn.Sequential(nn.Embedding(20, 4, sparse=True), nn.Linear(4, 3)))
    for model in world.models:
        nn.init.ones_(model[0].weight)
        nn.init.ones_(model[1].weight)
        nn.init.zeros_(model[1].bias)
        model(torch.tensor([1, 5])).square().sum().backward()
    with pytest.raises(ConfigError, match=r"'0.weight': SGD has no dense state 'momentum_buffer' of its shape"):
        for optimizer in world.optimizers:
            optimizer.step()
