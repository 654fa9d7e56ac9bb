"""What every averaging algorithm rests on, on simulated ranks: against bare optimizers whose weights are averaged by
hand, with whatever people do to optimizers, scalers, checkpoints and parameters."""

from __future__ import annotations

import contextlib
import copy
import functools
import itertools
import pickle
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.optim import SGD, Adam, AdamW, Optimizer
from torch.optim.lr_scheduler import ExponentialLR, OneCycleLR, StepLR

import dgcopt
from dgcopt import ConfigError, DivergenceError, LocalSGD, MismatchError, SlowMo
from dgcopt.averaging import Averaging, Rounds, Sync
from dgcopt.checkpoint import reshare
from dgcopt.collectives import AllReduce, Broadcast
from dgcopt.kernels import BLOCK
from tests.support.worlds import small_batch, small_model

Make = Callable[[Iterable[Tensor]], Optimizer]
momentum: Make = functools.partial(SGD, lr=0.1, momentum=0.9)
adam: Make = functools.partial(Adam, lr=0.01)
plain: Make = functools.partial(SGD, lr=0.1)


class World:
    """N ranks; with a rule averaged by it, without one by hand, if asked to."""

    def __init__(
        self, size: int, rule: Averaging | None = None, make: Make = momentum, model=small_model, nodes: int = 1
    ) -> None:
        self.comms = dgcopt.simulated_world(size, nodes)
        self.models: list[nn.Module] = [model() for _ in range(size)]
        self.optimizers: list[Any] = [make(model.parameters()) for model in self.models]
        if rule is not None:
            for model, optimizer, comm in zip(self.models, self.optimizers, self.comms, strict=True):
                assert rule.attach(optimizer, model.named_parameters(), comm) is optimizer

    def __iter__(self) -> Iterator[tuple[int, nn.Module, Any]]:
        return iter(zip(range(len(self.models)), self.models, self.optimizers, strict=True))

    def loss(self, rank: int, seed: int) -> Tensor:
        """Of a rank's own share of a batch."""
        dtype = next(self.models[rank].parameters()).dtype
        inputs, targets = small_batch(seed=seed, dtype=dtype)
        size = len(self.models)
        return nn.functional.cross_entropy(self.models[rank](inputs[rank::size]).float(), targets[rank::size])

    def backward(self, seed: int) -> None:
        for rank, _, optimizer in self:
            optimizer.zero_grad()
            self.loss(rank, seed).backward()

    def step(self, seed: int) -> None:
        self.backward(seed)
        for optimizer in self.optimizers:
            optimizer.step()

    def train(self, seeds: Iterable[int]) -> World:
        for seed in seeds:
            self.step(seed)
        return self

    @torch.no_grad()
    def means(self, ranks: Iterable[int] | None = None) -> dict[str, Tensor]:
        """Over all ranks or some, of every parameter that is trained."""
        named = [dict(self.models[rank].named_parameters()) for rank in ranks or range(len(self.models))]
        trained = [name for name, param in named[0].items() if param.requires_grad]
        return {name: sum(mine[name].double() for mine in named) / len(named) for name in trained}

    @torch.no_grad()
    def put(self, values: dict[str, Tensor]) -> None:
        for model in self.models:
            for name, value in values.items():
                model.get_parameter(name).copy_(value)

    def average_by_hand(self) -> None:
        self.put(self.means())

    def weights(self, rank: int = 0) -> list[Tensor]:
        return [param.detach().clone() for param in self.models[rank].parameters()]

    def states(self) -> list[dict[str, Any]]:
        return [copy.deepcopy({"model": m.state_dict(), "optimizer": o.state_dict()}) for _, m, o in self]

    def load(self, states: list[dict[str, Any]]) -> None:
        for (_, model, optimizer), state in zip(self, states, strict=True):
            model.load_state_dict(state["model"])
            optimizer.load_state_dict(state["optimizer"])


def by_hand(world: World, seeds: Iterable[int], every: int) -> World:
    """`world`, of bare optimizers, trained by local SGD from the first step of a window."""
    for step, seed in enumerate(seeds, 1):
        world.step(seed)
        if step % every == 0:
            world.average_by_hand()
    return world


def assert_close(ours: Iterable[Tensor], theirs: Iterable[Tensor], tolerance: float = 1e-12) -> None:
    for x, y in zip(ours, theirs, strict=True):
        torch.testing.assert_close(x, y, rtol=tolerance, atol=tolerance)


def assert_worlds_close(ours: World, theirs: World, tolerance: float = 1e-12) -> None:
    for rank in range(len(ours.models)):
        assert_close(ours.weights(rank), theirs.weights(rank), tolerance)


def identical(world: World) -> bool:
    return all(
        torch.equal(x, y)
        for rank in range(1, len(world.models))
        for x, y in zip(world.weights(rank), world.weights(0), strict=True)
    )


# -- the optimizer stays what it is ----------------------------------------------------------------------------------


def test_the_very_object_is_averaged():
    comm = dgcopt.simulated_world(2)[0]
    model = small_model()
    optimizer = momentum(model.parameters())
    rule = LocalSGD(every=4)
    assert rule.attach(optimizer, model.named_parameters(), comm) is optimizer and type(optimizer) is SGD
    assert optimizer.averaging.rule is not rule and repr(optimizer.averaging.rule) == repr(rule)
    other = momentum(model.parameters())
    assert LocalSGD(other, 4, named_parameters=model.named_parameters(), comm=comm) is other
    assert repr(other.averaging.rule) == repr(rule) == repr(LocalSGD(4))
    assert list(other.averaging.names.values()) == [name for name, _ in model.named_parameters()]
    numbered = LocalSGD(momentum(model.parameters()), comm=comm)
    assert "group0.parameter1" in numbered.averaging.names.values()


@pytest.mark.parametrize("first", [True, False], ids=["scheduler first", "scheduler last"])
@pytest.mark.parametrize("kind", ["StepLR", "OneCycleLR"])
def test_schedulers_made_before_and_after_wrapping(kind: str, first: bool):
    make = {
        "StepLR": functools.partial(StepLR, step_size=2, gamma=0.5),
        "OneCycleLR": functools.partial(OneCycleLR, max_lr=0.2, total_steps=10),
    }[kind]
    runs = []
    for averaged in (True, False):
        world = World(3)
        schedules = [make(optimizer) for optimizer in world.optimizers] if first else []
        if averaged:
            for (_, model, optimizer), comm in zip(world, world.comms, strict=True):
                LocalSGD(optimizer, 3, named_parameters=model.named_parameters(), comm=comm)
        schedules = schedules or [make(optimizer) for optimizer in world.optimizers]
        for step in range(1, 9):
            world.step(step)
            if not averaged and step % 3 == 0:
                world.average_by_hand()
            for schedule in schedules:
                schedule.step()
        runs.append(world)
    assert_worlds_close(*runs)
    assert runs[0].optimizers[0].averaging.step == 8


@pytest.mark.parametrize("make", [momentum, adam])
@pytest.mark.parametrize("how", [copy.deepcopy, lambda optimizer: pickle.loads(pickle.dumps(optimizer))])
def test_copied_or_pickled_it_is_the_bare_optimizer(make: Make, how):
    world = World(2, LocalSGD(2), make).train(range(3))
    twin = how(world.optimizers[0])
    assert type(twin) is type(world.optimizers[0]) and not hasattr(twin, "averaging")
    bare = make(small_model().parameters())
    bare.load_state_dict(twin.state_dict())
    assert "averaging" not in twin.state_dict()
    assert_close(twin.param_groups[0]["params"], world.weights(0), 0)
    twin.step()  # by itself, without waiting for anyone
    assert world.optimizers[0].averaging.step == 3


def test_wrapping_twice_is_refused():
    world = World(2, LocalSGD(3))
    with pytest.raises(ConfigError, match=r"already averaged by LocalSGD\(every=3.*\. Wrap it once"):
        LocalSGD(world.optimizers[0], comm=world.comms[0])


def test_what_averages_gradients_over_the_same_ranks_is_refused():
    """And leaves no trace: both optimizer and wire can be used."""
    world = World(2)
    for (_, model, optimizer), comm in zip(world, world.comms, strict=True):
        dgcopt.DistributedOptimizer(optimizer, model.named_parameters(), comm=comm)
        with pytest.raises(ConfigError, match=r"so LocalSGD has no effect.* smaller process_set, or set warm"):
            LocalSGD(optimizer, comm=comm)
        LocalSGD(optimizer, 2, warmup_steps=1, named_parameters=model.named_parameters(), comm=comm)
    assert_worlds_close(world.train(range(4)), World(2, LocalSGD(2, warmup_steps=1)).train(range(4)), 0)


def test_gradients_within_a_machine_and_weights_over_all():
    ours, theirs = World(4, nodes=2), World(4, nodes=2)
    for (_, model, optimizer), comm in zip(ours, ours.comms, strict=True):
        dgcopt.DistributedOptimizer(optimizer, model.named_parameters(), process_set="node", comm=comm)
        LocalSGD(optimizer, 3, named_parameters=model.named_parameters(), comm=comm)
    for step in range(1, 8):
        ours.step(step)
        theirs.backward(step)
        for first in (0, 2):
            for params in zip(theirs.models[first].parameters(), theirs.models[first + 1].parameters(), strict=True):
                center = (params[0].grad + params[1].grad) / 2
                for param in params:
                    param.grad = center.clone()
        for optimizer in theirs.optimizers:
            optimizer.step()
        if step % 3 == 0:
            theirs.average_by_hand()
        assert_worlds_close(ours, theirs)
        assert identical(ours) == (step % 3 == 0)


# -- what persists ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("overlap", [False, True])
@pytest.mark.parametrize("make", [momentum, adam])
@pytest.mark.parametrize("saved_after", [1, 3, 5])
def test_training_continues_bit_for_bit_from_anywhere_in_a_window(saved_after: int, make: Make, overlap: bool):
    """With overlap, at the end of a window, an exchange is under way."""
    rule = LocalSGD(3, overlap=overlap)
    whole = World(3, rule, make).train(range(7))
    saving = World(3, rule, make).train(range(saved_after))
    states = saving.states()
    assert states[0]["optimizer"]["averaging"]["dgcopt"]["under_way"] == (overlap and saved_after % 3 == 0)
    resumed = World(3, rule, make).train(range(50, 52))  # used, and in the middle of something else
    resumed.load(pickle.loads(pickle.dumps(states)))
    for world in (saving, resumed):
        world.train(range(saved_after, 7))
        assert_worlds_close(world, whole, 0)
        assert all(optimizer.averaging.step == 7 for optimizer in world.optimizers)


@pytest.mark.parametrize("warmup_steps", [2, 5])
def test_a_warm_up_continues_where_it_was(warmup_steps: int):
    rule = LocalSGD(3, warmup_steps=warmup_steps)
    whole = World(2, rule).train(range(9))
    resumed = World(2, rule).train(range(50, 54))
    resumed.load(World(2, rule).train(range(3)).states())
    assert_worlds_close(resumed.train(range(3, 9)), whole, 0)


@pytest.mark.parametrize("overlap", [False, True])
@pytest.mark.parametrize("saved_after", [2, 3])
@pytest.mark.parametrize(("before", "after"), [(4, 2), (2, 4), (3, 1), (1, 3), (2, 3)])
def test_another_number_of_ranks_goes_on_from_the_mean(before: int, after: int, saved_after: int, overlap: bool):
    """Of all the weights that there were; each with the state of the optimizer whose turn it is, in the same window."""
    rule = LocalSGD(3, overlap=overlap)
    old = World(before, rule).train(range(saved_after))
    center = [sum(tensors) / before for tensors in zip(*(old.weights(rank) for rank in range(before)), strict=True)]
    states = old.states()
    ours = World(after, rule).train(range(50, 52))
    ours.load([reshare(states, rank, after) for rank in range(after)])
    for optimizer in ours.optimizers:
        optimizer.averaging.average()
    assert identical(ours)
    for rank in range(after):
        assert_close(ours.weights(rank), center)

    theirs = World(after)
    theirs.load([copy.deepcopy(states[rank % before]) for rank in range(after)])
    for model in theirs.models:
        for param, value in zip(model.parameters(), center, strict=True):
            param.data.copy_(value)
    for step in range(saved_after + 1, 8):
        ours.step(step)
        theirs.step(step)
        if overlap:
            for optimizer in ours.optimizers:
                optimizer.averaging.finish_round()
        if step % 3 == 0:
            theirs.average_by_hand()
        assert_worlds_close(ours, theirs)


@pytest.mark.parametrize("sizes", [(4, 3, 3), (4, 3, 4), (4, 2, 1), (2, 3, 2), (3, 2, 4, 3)], ids=str)
@pytest.mark.parametrize("rule", [LocalSGD(3), SlowMo(3, sharded=False), SlowMo(3), dgcopt.DiLoCo(2)], ids=str)
def test_what_is_saved_again_before_any_step_is_what_was_loaded(rule: Averaging, sizes: tuple[int, ...]):
    """Whose mean the ranks have yet to come to: of ranks that there are no more, weights were lost."""
    old = World(sizes[0], rule).train(range(4))
    direct, again = World(sizes[-1], rule), old
    direct.load([reshare(old.states(), rank, sizes[-1]) for rank in range(sizes[-1])])
    for size in sizes[1:]:
        states, again = again.states(), World(size, rule)
        again.load([reshare(states, rank, size) for rank in range(size)] if len(states) != size else states)
    center = [sum(tensors) / sizes[0] for tensors in zip(*map(old.weights, range(sizes[0])), strict=True)]
    for world in (direct, again):
        for _, model, optimizer in world:
            for param in model.parameters():
                param.grad = torch.zeros_like(param)
            optimizer.state.clear()
        for optimizer in world.optimizers:
            optimizer.averaging.average()
        assert_close(world.weights(), center)
    ours, theirs = ([s["optimizer"]["averaging"]["dgcopt"]["memory"] for s in w.states()] for w in (again, direct))
    for kind, by_name in theirs[0].items():
        for name in by_name:
            sums = [sum(memory[kind][name].double() for memory in of) for of in (ours, theirs)]
            torch.testing.assert_close(*sums)


def test_an_exchange_that_was_under_way_is_saved_again_before_any_step():
    rule = LocalSGD(3, overlap=True)
    whole = World(2, rule).train(range(3))
    resumed = World(2, rule)
    for _ in range(2):
        resumed.load(whole.states())
        whole, resumed = resumed, World(2, rule)
    assert whole.states()[0]["optimizer"]["averaging"]["dgcopt"]["under_way"]
    assert_worlds_close(whole.train(range(3, 7)), World(2, rule).train(range(7)), 0)


def test_what_was_frozen_within_a_window_comes_together_after_a_restart():
    """And what was never trained does not travel."""
    whole, resumed = World(2, LocalSGD(4)), World(2, LocalSGD(4))
    for model in whole.models + resumed.models:
        model[4].requires_grad_(False)
    whole.train(range(2))
    for model in whole.models + resumed.models:
        model[0].requires_grad_(False)
    resumed.load(whole.states())
    for world in (whole, resumed):
        world.train(range(2, 3))
        travels = [segment.name for bucket in world.optimizers[0].averaging.buckets() for segment in bucket.segments]
        assert travels == ["0.weight", "0.bias", "2.weight", "2.bias"]
        world.train(range(3, 4))
        assert identical(world)
    assert_worlds_close(whole, resumed, 0)


@pytest.mark.parametrize("size", [2, 3])
def test_weights_that_were_taken_over_are_not_saved_again(size: int):
    """They would come back with another number of ranks; also those of parameters that are frozen by now."""
    states, ours = World(2, LocalSGD(2)).train(range(3)).states(), World(size, LocalSGD(2))
    for model in ours.models:
        model[0].requires_grad_(False)
    ours.load([reshare(states, rank, size) for rank in range(size)])
    ours.train(range(3, 4))
    assert identical(ours)
    assert "weights" not in ours.states()[0]["optimizer"]["averaging"]["dgcopt"]["memory"]


def test_without_average_the_mean_is_taken_by_the_first_step():
    """Whose gradients are of the weights before it."""
    old = World(4, LocalSGD(3), plain).train(range(2))
    center = [sum(tensors) / 4 for tensors in zip(*(old.weights(rank) for rank in range(4)), strict=True)]
    ours = World(2, LocalSGD(9), plain)
    states = old.states()
    for rank, (model, optimizer) in enumerate(zip(ours.models, ours.optimizers, strict=True)):
        state = reshare(states, rank, 2)
        model.load_state_dict(state["model"])
        optimizer.load_state_dict(state["optimizer"])
    ours.step(7)
    for rank in range(2):
        grads = [param.grad for param in ours.models[rank].parameters()]
        assert_close(ours.weights(rank), [x - 0.1 * grad for x, grad in zip(center, grads, strict=True)])


def test_state_of_another_rank_is_refused():
    world = World(2, LocalSGD(3)).train(range(2))
    states = [optimizer.state_dict() for optimizer in world.optimizers]
    with pytest.raises(ConfigError, match=r"rank 1 of 2 and cannot be loaded on rank 0 of 2: .*checkpoint.load.*"):
        world.optimizers[0].load_state_dict(states[1])
    smaller = World(1, LocalSGD(3))
    with pytest.raises(ConfigError, match="rank 0 of 2 and cannot be loaded on rank 0 of 1"):
        smaller.optimizers[0].load_state_dict(states[0])
    del states[1]["averaging"]
    world.optimizers[0].load_state_dict(states[1])  # the optimizer's own, as it would be without us
    momentum(small_model().parameters()).load_state_dict(states[0])


def loaded_before_wrapping(rule: Averaging, states: list[dict[str, Any]]) -> World:
    world = World(2)
    world.load(states)
    for (_, model, optimizer), comm in zip(world, world.comms, strict=True):
        rule.attach(optimizer, model.named_parameters(), comm)
    return world


@pytest.mark.parametrize("saved_after", [3, 5, 6])
@pytest.mark.parametrize(
    "rule", [LocalSGD(3, warmup_steps=2), LocalSGD(3), SlowMo(3), dgcopt.DiLoCo(3), dgcopt.LowPrecisionDecentralized()]
)
def test_state_loaded_before_wrapping_goes_on_at_its_step(rule: Averaging, saved_after: int, caplog):
    """And what did not come along is told: it was dropped, and steps were counted anew, without a word."""
    whole = World(2, rule).train(range(saved_after))
    states = whole.states()
    caplog.clear()
    world = loaded_before_wrapping(rule, states)
    kept = states[0]["optimizer"]["averaging"]["dgcopt"]
    told = [text for text in caplog.messages if "the memory of averaging" in text]
    assert len(told) == 2 * any(kept["memory"].values() or kept["shared"].values())
    assert all(f"step {saved_after}," in text and "loaded before the optimizer was wrapped" in text for text in told)
    assert [optimizer.averaging.step for optimizer in world.optimizers] == [saved_after] * 2
    assert not any(key.startswith("dgcopt") for optimizer in world.optimizers for key in optimizer.param_groups[0])
    if identical(whole):
        world.step(7)
        assert [optimizer.averaging.step for optimizer in world.optimizers] == [saved_after + 1] * 2
    else:
        with pytest.raises(DivergenceError, match="replicas have come apart"):
            world.step(7)


def test_local_sgd_loaded_before_wrapping_at_the_end_of_a_window_loses_nothing():
    rule = LocalSGD(3, warmup_steps=2)
    whole = World(2, rule).train(range(5))
    assert_worlds_close(loaded_before_wrapping(rule, whole.states()).train(range(5, 9)), whole.train(range(5, 9)), 0)


def test_rank_0_loads_before_wrapping_and_hands_its_state_out():
    states = World(2, LocalSGD(3)).train(range(6)).states()
    world = World(2)
    world.models[0].load_state_dict(states[0]["model"])
    world.optimizers[0].load_state_dict(states[0]["optimizer"])
    for (_, model, optimizer), comm in zip(world, world.comms, strict=True):
        LocalSGD(3).attach(optimizer, model.named_parameters(), comm)
    root = {key: world.optimizers[0].state_dict()[key] for key in ("state", "param_groups")}
    for _, model, optimizer in world:  # what dgcopt.broadcast_optimizer_state does
        model.load_state_dict(states[0]["model"])
        optimizer.load_state_dict(copy.deepcopy(root))
    world.train(range(6, 9))
    assert [optimizer.averaging.step for optimizer in world.optimizers] == [9, 9] and identical(world)


def test_state_of_other_parameters_is_refused():
    states = World(2, LocalSGD(3)).train(range(2)).states()
    kept = states[0]["optimizer"]["averaging"]["dgcopt"]["memory"]["weights"]
    kept["0.weight"] = kept["0.weight"][:5]
    with pytest.raises(ConfigError, match=r"weights of shape \(5, 12\) for parameter '0.weight', which has shape \(30"):
        World(2, LocalSGD(3)).optimizers[0].load_state_dict(states[0]["optimizer"])
    kept["else"] = kept.pop("0.weight")
    with pytest.raises(ConfigError, match="for parameter 'else', which this optimizer does not have"):
        World(2, LocalSGD(3)).optimizers[0].load_state_dict(states[0]["optimizer"])


@pytest.mark.parametrize("rule", [LocalSGD(3), SlowMo(3), dgcopt.DiLoCo(3)], ids=str)
def test_state_is_loaded_with_a_group_that_no_step_has_seen(rule: Averaging):
    """As a script does that builds all groups anew before it resumes."""
    whole, resumed = (World(2, rule, lambda params: plain(list(params)[:4])) for _ in range(2))
    whole.train(range(2))
    for world in (whole, resumed):
        for _, model, optimizer in world:
            optimizer.add_param_group({"params": list(model[4].parameters()), "lr": 0.03})
    resumed.load(whole.train(range(2, 4)).states())
    assert_worlds_close(resumed.train(range(4, 8)), whole.train(range(4, 8)), 0)


def test_average_is_the_exact_mean_and_no_step():
    """At the end of training, or in the middle of a window, which goes on where it was."""
    ours, theirs = World(4, LocalSGD(3)).train(range(2)), by_hand(World(4), range(2), 3)
    for optimizer in ours.optimizers:
        optimizer.averaging.average()
    theirs.average_by_hand()
    assert identical(ours) and all(optimizer.averaging.step == 2 for optimizer in ours.optimizers)
    ours.step(2)
    theirs.step(2)
    theirs.average_by_hand()
    assert_worlds_close(ours, theirs)
    assert identical(ours)


# -- loss scaling ----------------------------------------------------------------------------------------------------

SCALED: dict[str, Make] = {
    "SGD": momentum,
    "Adam": adam,
    "fused SGD": functools.partial(SGD, lr=0.1, momentum=0.9, fused=True),
    "fused Adam": functools.partial(Adam, lr=0.01, fused=True),
    "fused AdamW": functools.partial(AdamW, lr=0.01, fused=True),
}


@pytest.mark.parametrize("way", ["as documented", "unscale_", "unscale_ and clip_grad_norm_"])
@pytest.mark.parametrize("name", SCALED)
def test_an_overflow_on_one_rank_is_that_ranks_alone(name: str, way: str):
    """It skips its update and lowers its scale, as a scaler with the bare optimizer does, and the windows stay
    aligned."""
    runs = []
    for rule in (LocalSGD(3), None):
        world = World(3, rule, SCALED[name], functools.partial(small_model, torch.float32))
        scalers = [torch.amp.GradScaler("cpu", init_scale=256.0, growth_interval=4) for _ in range(3)]
        for step in range(1, 10):
            for rank, _, optimizer in world:
                optimizer.zero_grad()
                loss = world.loss(rank, step)
                if (step, rank) in ((2, 1), (3, 2), (6, 0), (6, 2)):
                    loss = loss * torch.inf
                scalers[rank].scale(loss).backward()
            for rank, model, optimizer in world:
                if way != "as documented":
                    scalers[rank].unscale_(optimizer)
                if "clip" in way:
                    nn.utils.clip_grad_norm_(model.parameters(), 0.05)
                before = world.weights(rank)
                scalers[rank].step(optimizer)
                scalers[rank].update()
                if step == 2:
                    assert torch.equal(before[0], world.weights(rank)[0]) == (rank == 1)
            if rule is None and step % 3 == 0:
                world.average_by_hand()
            assert identical(world) == (step % 3 == 0)
        runs.append((world, [scaler.get_scale() for scaler in scalers]))
    (ours, scales), (theirs, expected) = runs
    assert scales == expected and len(set(scales)) > 1
    assert_worlds_close(ours, theirs, 1e-6)
    assert all(optimizer.averaging.step == 9 for optimizer in ours.optimizers)
    assert not any(hasattr(optimizer, "found_inf") for optimizer in ours.optimizers)


def test_gradients_of_a_skipped_step_are_still_there():
    world = World(2, LocalSGD(2), model=functools.partial(small_model, torch.float32))
    scaler = torch.amp.GradScaler("cpu", init_scale=256.0)
    scaler.scale(world.loss(0, 0) * torch.inf).backward()
    world.loss(1, 0).backward()
    scaler.step(world.optimizers[0])
    world.optimizers[1].step()
    assert all(param.grad is not None for param in world.models[0].parameters())


# -- uneven data -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("divide_by", ["active", "all"])
@pytest.mark.parametrize("every", [1, 2, 3, 4])
def test_ranks_that_run_out_of_data(every: int, divide_by: Any):
    """Means are of the ranks that have made a step since the last one, or of all; all go on from the same step."""
    batches = (3, 7, 0, 6)
    ours, theirs = World(4, LocalSGD(every)), World(4)
    with contextlib.ExitStack() as loops:
        ends = [loops.enter_context(contextlib.ExitStack()) for _ in batches]
        for end, optimizer in zip(ends, ours.optimizers, strict=True):
            end.enter_context(dgcopt.join(optimizer, divide_by=divide_by))
        for step in range(8):
            for rank, end in enumerate(ends):
                if batches[rank] == step:
                    end.close()
            ours.backward(step)
            for rank, _, optimizer in ours:
                if step < batches[rank]:
                    optimizer.step()
    since = [False] * 4
    for step in range(1, 2 * every + 8):
        theirs.backward(step - 1)
        for rank, _, optimizer in theirs:
            if step <= batches[rank]:
                optimizer.step()
                since[rank] = True
        if step % every == 0 and any(since):
            theirs.put(theirs.means([rank for rank in range(4) if since[rank] or divide_by == "all"]))
            since, last = [False] * 4, step
    assert_worlds_close(ours, theirs)
    assert identical(ours)
    assert {optimizer.averaging.step for optimizer in ours.optimizers} == {last}
    for step in range(1, every + 1):
        ours.step(step)
        theirs.step(step)
    theirs.average_by_hand()
    assert_worlds_close(ours, theirs)


@pytest.mark.parametrize(
    ("rule", "share", "nodes"),
    [
        (LocalSGD(4, node_every=2), 1.0, 2),
        (SlowMo(4, momentum=0.0, slow_lr=0.5, base=dgcopt.SGP()), 0.5, 1),
        (SlowMo(4, momentum=0.0, slow_lr=0.5, base=LocalSGD(4, node_every=1)), 0.5, 2),
    ],
    ids=str,
)
@pytest.mark.parametrize("batches", [(2, 2, 4, 4), (2, 2, 2, 2), (3, 2, 1, 0)])
def test_what_only_some_have_heard_of_is_not_lost(batches: tuple[int, ...], rule: Averaging, share: float, nodes: int):
    """Of ranks that run out of data before an exchange of all, after one with their machine or a peer."""
    world = World(4, rule, plain, nodes=nodes)
    start = world.weights()
    moved = [torch.zeros_like(param) for param in start]
    with contextlib.ExitStack() as loops:
        ends = [loops.enter_context(contextlib.ExitStack()) for _ in batches]
        for end, optimizer in zip(ends, world.optimizers, strict=True):
            end.enter_context(dgcopt.join(optimizer))
        for step in range(5):
            for rank, end in enumerate(ends):
                if batches[rank] == step:
                    end.close()
            world.backward(step)
            for rank, model, optimizer in world:
                if step < batches[rank]:
                    for total, param in zip(moved, model.parameters(), strict=True):
                        total -= share * 0.1 * param.grad / 4
                    optimizer.step()
    assert identical(world) and {optimizer.averaging.step for optimizer in world.optimizers} == {4}
    assert_close(world.weights(), [x + change for x, change in zip(start, moved, strict=True)])


def test_an_outer_step_counts_ranks_with_data_as_local_sgd_does():
    """Which it is with an outer SGD of lr 1."""
    batches, runs = (2, 3, 6), []
    for rule in (LocalSGD(2), dgcopt.DiLoCo(2, functools.partial(SGD, lr=1.0))):
        world = World(3, rule)
        with contextlib.ExitStack() as loops:
            ends = [loops.enter_context(contextlib.ExitStack()) for _ in batches]
            for end, optimizer in zip(ends, world.optimizers, strict=True):
                end.enter_context(dgcopt.join(optimizer))
            for step in range(6):
                for rank, end in enumerate(ends):
                    if batches[rank] == step:
                        end.close()
                world.backward(step)
                for rank, _, optimizer in world:
                    if step < batches[rank]:
                        optimizer.step()
        assert identical(world)
        runs.append(world)
    assert_worlds_close(*runs)


@pytest.mark.parametrize("sharded", [True, False])
def test_a_slow_step_has_the_learning_rate_of_ranks_with_data(sharded: bool):
    """Those without make no steps, and so none of their schedulers."""
    runs = []
    for goes_on in (False, True):
        world = World(2, SlowMo(2, base=LocalSGD(2), sharded=sharded), plain)
        schedules = [ExponentialLR(optimizer, 0.8) for optimizer in world.optimizers]
        with dgcopt.join(world.optimizers[1]):
            with dgcopt.join(world.optimizers[0]):
                world.train(range(3))
                for schedule in schedules:
                    schedule.step()
            for seed in range(3, 9):
                world.optimizers[1].zero_grad()
                world.loss(1, seed).backward()
                world.optimizers[1].step()
                for schedule in schedules if goes_on else schedules[1:]:
                    schedule.step()
        assert identical(world)
        runs.append(world)
    assert_worlds_close(*runs, 0)


# -- ranks that differ -----------------------------------------------------------------------------------------------


def step_all(world: World) -> dict[int, str]:
    """Every rank steps, and steps again; the first error of each that raises one."""
    words: dict[int, str] = {}
    for _, (rank, _, optimizer) in itertools.product(range(2), world):
        try:
            optimizer.step()
        except dgcopt.DGCError as error:
            words.setdefault(rank, f"{type(error).__name__}: {error}")
    return words


@pytest.mark.parametrize("bad", [torch.nan, torch.inf, -torch.inf])
@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
@pytest.mark.parametrize("overlap", [False, True])
def test_weights_that_are_not_finite_are_averaged_by_nobody(bad: float, dtype: torch.dtype, overlap: bool):
    world = World(3, LocalSGD(3, overlap=overlap), plain, functools.partial(small_model, dtype)).train(range(2))
    with torch.no_grad():
        world.models[1][2].bias[4] = bad
    before = [world.weights(rank) for rank in range(3)]
    world.backward(2)
    for model in world.models:
        for param in model.parameters():
            param.grad = torch.zeros_like(param)
    raised = step_all(world)
    assert sorted(raised) == [0, 1, 2]
    for rank, words in raised.items():
        assert f"DivergenceError: rank {rank}: after local step 3 the weights of rank(s) [1] hold NaN or Inf" in words
        assert ("here it is parameter '2.bias'" in words) == (rank == 1) and "Nothing was averaged" in words
        for now, then in zip(world.weights(rank), before[rank], strict=True):
            assert torch.equal(now.nan_to_num(7), then.nan_to_num(7))


def test_after_a_failure_all_ranks_load_and_go_on():
    """A rank that learned of it in another one's turn is not told once more when state has taken its place."""
    world = World(2, LocalSGD(2)).train(range(3))
    states = world.states()
    world.backward(3)
    world.models[1][0].weight.data.fill_(torch.nan)
    world.optimizers[0].step()
    with pytest.raises(DivergenceError):
        world.optimizers[1].step()
    world.load(copy.deepcopy(states))
    other = World(2, LocalSGD(2))
    other.load(states)
    assert_worlds_close(world.train(range(3, 6)), other.train(range(3, 6)), 0)


@pytest.mark.parametrize("rule", [LocalSGD(4), dgcopt.DiLoCo(4)], ids=str)
def test_a_round_that_failed_leaves_nothing_for_the_next_one_to_settle(rule: Averaging):
    averaging = World(2, rule).train(range(1)).optimizers[0].averaging
    (ctx,), changes = averaging.buckets().values(), []
    ctx.memory.on_commit(lambda: changes.append("memory"))
    averaging.sync.abort()
    ctx.commit()
    assert not changes


def test_large_finite_weights_are_averaged():
    """Whose sum is beyond half precision."""
    world = World(2, LocalSGD(1), plain, functools.partial(small_model, torch.float16))
    for model in world.models:
        for param in model.parameters():
            param.data.fill_(6e4)
            param.grad = torch.zeros_like(param)
    for optimizer in world.optimizers:
        optimizer.step()
    assert identical(world) and world.models[0][0].bias[0] == 6e4


@pytest.mark.parametrize("rule", [LocalSGD(4), LocalSGD(4, warmup_steps=2), LocalSGD(1, overlap=True)])
def test_ranks_that_start_from_different_weights_are_told(rule: LocalSGD):
    """All of them (tests/distributed); here, whose turn it is. Once the weights are alike, training begins."""
    world = World(3, rule)
    world.models[1][2].bias.data[0] += 1e-12
    world.backward(0)
    before = world.weights(0)
    with pytest.raises(DivergenceError, match=r"parameter '2.bias' is not the same on rank.s. .1. as on rank 0.*broad"):
        world.optimizers[0].step()
    assert_close(world.weights(0), before, 0)


def test_ranks_with_different_settings_are_told():
    world = World(2)
    for (rank, model, optimizer), comm in zip(world, world.comms, strict=True):
        LocalSGD(optimizer, (4, 8)[rank], named_parameters=model.named_parameters(), comm=comm)
    world.backward(0)
    with pytest.raises(MismatchError, match=r"rank 0 has \[averaging: LocalSGD\(every=4.* rank 1 .*\(every=8"):
        world.optimizers[0].step()


def test_state_that_only_one_rank_has_loaded_is_told():
    """As a script does where rank 0 reads the checkpoint: others would wait for what it does not do any more."""
    world = World(3, LocalSGD(2))
    states = World(3, LocalSGD(2)).train(range(2)).states()
    for model in world.models:
        model.load_state_dict(states[0]["model"])
    world.optimizers[0].load_state_dict(states[0]["optimizer"])
    world.backward(0)
    raised = step_all(world)
    assert sorted(raised) == [0, 1, 2]
    for words in raised.values():
        assert "MismatchError" in words and "rank 0 has [state: of 3 ranks], rank 1 has [state: none loaded]" in words
        assert "dgcopt.checkpoint.load distributes it" in words


def test_ranks_at_different_steps_are_told():
    world = World(3, LocalSGD(3))
    world.load([World(3, LocalSGD(3)).train(range(1 if rank else 4)).states()[rank] for rank in range(3)])
    world.step(4)
    world.backward(5)
    raised = step_all(world)
    assert sorted(raised) == [0, 1, 2]
    for words in raised.values():
        assert "MismatchError" in words and "rank 0 is at step 6, rank 1 is at step 3, rank 2 is at step 3" in words


# -- parameters that come and go, of any kind ------------------------------------------------------------------------


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


def test_parameters_that_have_become_what_cannot_be_averaged_are_refused():
    world = World(2, LocalSGD(2)).train(range(1))
    for _, _, optimizer in world:
        optimizer.add_param_group({"params": [nn.Parameter(torch.ones(3, dtype=torch.complex64))]})
        with pytest.raises(ConfigError, match=r"'group1.parameter0' has dtype complex64"):
            optimizer.step()
    world = World(2, LocalSGD(2)).train(range(1))
    for _, model, optimizer in world:
        model[4].bias.data = torch.zeros(7, dtype=torch.float64)
        model[4].bias.grad = None
        with pytest.raises(ConfigError, match=r"'4.bias' had 5 elements when it was last exchanged, and has 7"):
            optimizer.step()


# -- what it costs ---------------------------------------------------------------------------------------------------

VOTE = 44
"""Bytes: flags, a checksum of names, and the step."""


def sent(collective, ranks: int) -> tuple[int, int]:
    return collective.nbytes, collective.sent(ranks)


@pytest.mark.parametrize("overlap", [False, True])
def test_telemetry_counts_what_is_sent(overlap: bool):
    world = World(4, LocalSGD(3, overlap=overlap))
    elements = sum(-(-param.numel() // BLOCK) * BLOCK for param in world.models[0].parameters())
    trained = sum(param.numel() for param in world.models[0].parameters())
    exchange = AllReduce(torch.empty(elements, dtype=torch.float64))
    vote = AllReduce(torch.empty(VOTE, dtype=torch.uint8))
    telemetry = world.train(range(1)).optimizers[0].averaging.telemetry
    start = telemetry.payload_bytes, telemetry.sent_bytes
    assert start[0] == 32 + 16 * 6  # a hash of the settings, and one of each parameter
    world.train(range(10))
    assert telemetry.steps == 11
    assert telemetry.dense_bytes == 11 * (2 * 4 * trained * 3 // 4)
    for place in (0, 1):
        one = sent(exchange, 4)[place] + sent(vote, 4)[place]
        counted = (telemetry.payload_bytes, telemetry.sent_bytes)[place]
        assert counted - start[place] == 3 * one, "three exchanges in eleven steps"
    before = telemetry.payload_bytes
    for optimizer in world.optimizers:
        optimizer.averaging.average()
    assert telemetry.payload_bytes - before == exchange.nbytes
    assert telemetry.ratio > 1


def test_warm_up_and_what_follows_have_one_account():
    world = World(2, LocalSGD(2, warmup_steps=3)).train(range(6))
    telemetry = world.optimizers[0].averaging.telemetry
    assert telemetry is world.optimizers[0].telemetry and telemetry.steps == 6


@pytest.mark.parametrize("rule", [LocalSGD(2, warmup_steps=4), dgcopt.DiLoCo(2, warmup_steps=4)], ids=str)
def test_a_warm_up_goes_on_among_the_ranks_that_are_left(rule: Averaging):
    """One of three is lost in it; the others average gradients, then weights, in one account."""
    world = World(3, rule).train(range(2))
    world.models, world.optimizers = world.models[:2], world.optimizers[:2]
    for optimizer, comm in zip(world.optimizers, dgcopt.simulated_world(2), strict=True):
        optimizer.averaging.rejoin(comm)
    theirs, states = World(2), world.states()
    for state in states:
        del state["optimizer"]["averaging"]
    theirs.load(states)
    for seed in (2, 3):
        world.step(seed)
        theirs.backward(seed)
        for grads in zip(*([param.grad for param in model.parameters()] for model in theirs.models), strict=True):
            mean = sum(grads) / 2
            for grad in grads:
                grad.copy_(mean)
        for optimizer in theirs.optimizers:
            optimizer.step()
        assert_close(world.weights(0) + world.weights(1), theirs.weights(0) + theirs.weights(1))
    for optimizer in world.optimizers:
        assert (
            optimizer.averaging.telemetry.steps == 4
            and optimizer.telemetry is optimizer.averaging.runner.scheduler.telemetry
        )
    world.train((4, 5))
    assert_close(world.weights(0), world.weights(1), 0)


def test_alone_nothing_is_sent():
    world = World(1, LocalSGD(1)).train(range(3))
    assert world.optimizers[0].averaging.telemetry.sent_bytes == 0


@pytest.mark.parametrize(
    "rule",
    [LocalSGD(4), dgcopt.DiLoCo(4), dgcopt.SlowMo(4), dgcopt.DiLoCo(4, delay=1), LocalSGD(4, overlap=True)],
    ids=str,
)
def test_what_is_frozen_in_the_middle_of_a_window_comes_together_once_more(rule: Averaging) -> None:
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


class OfRankZero(Averaging):
    """Every other step, all ranks take the weights of rank 0: a round that is no exchange of buckets."""

    by_bucket = False

    def due(self, step: int) -> bool:
        return step % 2 == 0

    def sync(self, round: Rounds) -> Sync:
        return Fetch(round)


class Fetch(Sync):
    in_flight = False

    def run(self) -> Iterator[Any]:
        for bucket in self.round.buckets():
            bucket.write(
                (yield self.round.runner.scheduler.start(Broadcast(bucket.read()), f"weights of {bucket.label}"))
            )
        self.round.replica.mark_synced(self.round.names)


def test_an_algorithm_says_itself_what_a_round_does():
    ours, theirs = World(3, OfRankZero()), World(3)
    for seed in range(5):
        ours.step(seed)
        theirs.step(seed)
        if seed % 2:
            theirs.put(theirs.means([0]))
            assert identical(ours)
        assert_worlds_close(ours, theirs, 0)
    with pytest.raises(ConfigError, match="base must be"):
        SlowMo(base=OfRankZero())


def test_an_epoch_of_another_length_is_told_to_all_that_count_epochs() -> None:
    """As after a change of ranks: wrapping took copies, of the algorithm and of what outer optimizers send by."""
    code = dgcopt.DGC(warmup=dgcopt.Warmup(epochs=1, steps_per_epoch=2))
    rule = dgcopt.DiLoCo(4, fragments=2, compression=code)
    model = small_model()
    averaging = rule.attach(SGD(model.parameters(), lr=0.1), model.named_parameters()).averaging
    averaging.set_steps_per_epoch(44)
    assert [outer.compressor.warmup.steps_per_epoch for outer in averaging.sync.outers] == [11, 11]
    assert averaging.rule.compression.warmup.steps_per_epoch == 11 and code.warmup.steps_per_epoch == 2
