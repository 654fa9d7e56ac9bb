"""State of averaging: saved anywhere in a window, loaded before or after wrapping, on another number of ranks."""

from __future__ import annotations

import copy
import functools
import pickle
from typing import Any

import pytest
import torch

import dgcopt
from dgcopt import ConfigError, DivergenceError, LocalSGD, SlowMo
from dgcopt.averaging import Averaging
from dgcopt.checkpoint import reshare
from tests.support.averaging import (
    Make,
    World,
    adam,
    assert_close,
    assert_worlds_close,
    by_hand,
    identical,
    momentum,
    plain,
)
from tests.support.worlds import small_model


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
def test_a_loaded_state_saved_before_any_step_is_unchanged(rule: Averaging, sizes: tuple[int, ...]):
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


def test_parameters_frozen_within_a_window_are_averaged_after_a_restart():
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
        remedy = r'dgcopt\.check_replicas\(model\.state_dict\(\), on_divergence="resync"\)'  # no setting of averaging
        with pytest.raises(DivergenceError, match=f"replicas have come apart: .*{remedy}"):
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


def with_added_layers(rule: Averaging, at_first: int) -> World:
    """Ranks whose optimizers have `at_first` layers when they are averaged, and the others before any step."""
    made = World(3, rule, lambda params: in_groups(list(params), at_first))
    for _, model, optimizer in made:
        for layer in [model[0], model[2], model[4]][at_first:]:
            add_layer(optimizer, layer)
    return made


def in_groups(params: list[torch.Tensor], layers: int) -> torch.optim.Optimizer:
    optimizer = momentum(params[:2])
    for place in range(2, 2 * layers, 2):
        optimizer.add_param_group({"params": params[place : place + 2], "lr": 0.03})
    return optimizer


def add_layer(optimizer: torch.optim.Optimizer, layer: torch.nn.Module) -> None:
    optimizer.add_param_group({"params": list(layer.parameters()), "lr": 0.03})


def trained_with_layers_that_arrive(rule: Averaging) -> World:
    world = World(3, rule, lambda params: momentum(list(params)[:2]))
    for step in range(5):
        for _, model, optimizer in world if 0 < step < 3 else ():
            add_layer(optimizer, model[2 * step])
        world.step(step)
    return world


@pytest.mark.parametrize("at_first", [1, 2, 3])
@pytest.mark.parametrize(
    "rule",
    [
        LocalSGD(2),
        SlowMo(2),
        dgcopt.DiLoCo(2),
        dgcopt.DiLoCo(2, delay=1),
        dgcopt.DiLoCo(2, compression=dgcopt.TopK(0.1)),
        dgcopt.DiLoCo(2, compression=dgcopt.PowerSGD(2), alpha=0.5),
    ],
    ids=str,
)
def test_training_continues_bit_for_bit_whenever_groups_were_added(rule: Averaging, at_first: int):
    whole, resumed = trained_with_layers_that_arrive(rule), with_added_layers(rule, at_first)
    resumed.load(pickle.loads(pickle.dumps(whole.states())))
    again = trained_with_layers_that_arrive(rule)
    again.load(resumed.states())
    for world in (whole, resumed, again):
        world.train(range(5, 11))
    assert_worlds_close(resumed, whole, 0)
    assert_worlds_close(again, whole, 0)


def test_parameters_in_other_fragments_keep_anchor_momentum_and_residual(caplog: pytest.LogCaptureFixture):
    rule = dgcopt.DiLoCo(2, fragments=2, compression=dgcopt.TopK(0.1))
    whole, resumed = trained_with_layers_that_arrive(rule), with_added_layers(rule, 3)
    resumed.load(whole.states())
    assert "some are in other fragments" in caplog.text
    for mine, theirs in zip(resumed.optimizers, whole.optimizers, strict=True):
        found, expected = held_for_anchors(mine), held_for_anchors(theirs)
        assert found.keys() == expected.keys() and all(map(torch.equal, found.values(), map(expected.get, found)))
    resumed.train(range(5, 9))
    anchors = [[*optimizer.averaging.sync.anchors.values()] for optimizer in resumed.optimizers]
    assert all(map(torch.equal, anchors[0], anchors[1])) and all(map(torch.equal, anchors[0], anchors[2]))


def test_anchors_are_saved_in_the_order_of_parameters():
    """So that equal runs write equal files."""
    world = World(2, dgcopt.DiLoCo(2)).train(range(3))
    for _, model, optimizer in world:
        anchors = optimizer.state_dict()["averaging"]["dgcopt"]["shared"]["anchor"]
        assert [*anchors] == [name for name, _ in model.named_parameters()]


def held_for_anchors(optimizer: Any) -> dict[tuple[str, str], torch.Tensor]:
    """Outer momenta and residuals by parameter name."""
    held: dict[tuple[str, str], torch.Tensor] = {}
    name_of = {anchor: optimizer.averaging.names[param] for param, anchor in optimizer.averaging.sync.anchors.items()}
    for outer in optimizer.averaging.outers:
        residual = outer.state_dict()["dgcopt"]["memory"]["residual"]
        held |= {("residual", name): tensor for name, tensor in residual.items()}
        held |= {("momentum", name_of[anchor]): state["momentum_buffer"] for anchor, state in outer.state.items()}
    return held


@pytest.mark.parametrize("saved_after", [4, 5, 6])
@pytest.mark.parametrize(
    "rule",
    [
        dgcopt.LowPrecisionDecentralized(),
        dgcopt.SPARTA(0.2, choose="drift"),
        SlowMo(3, base=dgcopt.LowPrecisionDecentralized()),
    ],
    ids=str,
)
def test_training_continues_bit_for_bit_after_a_layer_was_unfrozen(rule: Averaging, saved_after: int):
    """Ranges and patches are those of buckets, and the layer has buckets of its own."""
    whole, resumed = World(3, rule), World(3, rule)
    for world in (whole, resumed):
        for model in world.models:
            model[2].requires_grad_(False)
    whole.train(range(4))
    for world in (whole, resumed):
        for model in world.models:
            model[2].requires_grad_(True)
    resumed.load(pickle.loads(pickle.dumps(whole.train(range(4, saved_after)).states())))
    again = World(3, rule)
    again.load(resumed.states())  # before any step
    for world in (whole, resumed, again):
        world.train(range(saved_after, 9))
    assert_worlds_close(resumed, whole, 0)
    assert_worlds_close(again, whole, 0)


@pytest.mark.parametrize(
    ("rule", "step"),
    [
        (LocalSGD(3, overlap=True), 3),
        (dgcopt.Decentralized(), 4),
        (dgcopt.SPARTA(0.2, overlap=True), 4),
        (dgcopt.SPARTA(0.2, choose="drift", overlap=True), 4),
        (dgcopt.DiLoCo(4, delay=1), 3),
    ],
    ids=str,
)
def test_a_round_in_flight_is_launched_again_without_a_layer_unfrozen_since(rule: Averaging, step: int):
    """The mean of three equal float32 numbers may be another one, and coordinates are drawn from all in a bucket."""
    whole, resumed = (World(3, rule, model=functools.partial(small_model, torch.float32)) for _ in range(2))
    for model in whole.models:
        model[2].requires_grad_(False)
    whole.train(range(step))
    for model in whole.models:
        model[2].requires_grad_(True)
    states = whole.states()
    assert states[0]["optimizer"]["averaging"]["dgcopt"]["under_way"]
    resumed.load(states)
    for world in (whole, resumed):
        world.train(range(step, 9))
        for optimizer in world.optimizers:
            optimizer.averaging.finish_round()
    assert_worlds_close(resumed, whole, 0)


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


@pytest.mark.parametrize("before", [LocalSGD(8), SlowMo(8, momentum=0.0)], ids=str)
def test_slow_steps_of_whole_anchors_start_from_a_common_state_only(before: Averaging):
    """Anchors of ranks whose weights differ would keep them apart for ever."""
    old, ours = World(3, before).train(range(5)), World(3, SlowMo(4, sharded=False))
    with pytest.raises(ConfigError, match="rank 0: the state was saved by another algorithm, between two rounds"):
        ours.load(old.states())
    for optimizer in old.optimizers:
        optimizer.averaging.average()
    ours.load(old.states())
    assert identical(ours.train(range(5, 8)))
    sharded = World(3, SlowMo(4))
    sharded.load(World(3, before).train(range(5)).states())
    assert identical(sharded.train(range(5, 8)))


@pytest.mark.parametrize(
    ("before", "saved_after", "after"),
    [
        ({"every": 4, "delay": 2}, 3, {"every": 8, "delay": 2}),
        ({"every": 4, "delay": 1, "fragments": 2}, 1, {"every": 4, "delay": 0, "fragments": 2}),
        ({"every": 4, "delay": 1, "fragments": 2}, 1, {"every": 6, "delay": 1, "fragments": 2}),
    ],
)
def test_progress_in_flight_is_in_the_next_outer_step_of_another_schedule(before: dict, saved_after: int, after: dict):
    """As in a run without delay before: no outer step has come, so nothing else differs."""
    outer = functools.partial(torch.optim.SGD, lr=1.0)
    runs = []
    for delay in (before["delay"], 0):
        old = World(2, dgcopt.DiLoCo(outer=outer, **{**before, "delay": delay}), plain).train(range(saved_after))
        assert old.states()[0]["optimizer"]["averaging"]["dgcopt"]["under_way"] == (delay > 0)
        resumed = World(2, dgcopt.DiLoCo(outer=outer, **after), plain)
        resumed.load(old.states())
        runs.append(resumed.train(range(saved_after, 9)))
    assert_worlds_close(*runs, 0)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize(("before", "after"), [(8, 1), (6, 4)])
def test_the_mean_that_another_number_of_ranks_goes_on_from_is_rounded_once(
    before: int, after: int, dtype: torch.dtype
):
    model = functools.partial(small_model, dtype)
    old, ours = World(before, LocalSGD(16), plain, model).train(range(5)), World(after, LocalSGD(16), plain, model)
    center = [sum(x.float() for x in of) / before for of in zip(*map(old.weights, range(before)), strict=True)]
    ours.load([reshare(old.states(), rank, after) for rank in range(after)])
    ours.backward(5)
    for _, _, optimizer in ours:
        optimizer.averaging.finish_round()
    for found, exact in zip(ours.weights(), center, strict=True):
        nearest = exact.to(dtype).float()
        assert ((found.float() - exact).abs() <= 1.01 * (nearest - exact).abs() + 1e-6 * exact.abs()).all()
