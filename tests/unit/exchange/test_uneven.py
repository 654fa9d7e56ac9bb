"""Uneven data: ranks that run out serve the steps of the others, which average by the ranks that have data."""

import contextlib
import copy
import functools
import math
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim import SGD
from torch.optim.lr_scheduler import ExponentialLR, OneCycleLR

import dgcopt
from dgcopt import ConfigError, LocalSGD, MismatchError, SlowMo
from dgcopt.averaging import Averaging
from tests.support.averaging import (
    World,
    assert_close,
    assert_worlds_close,
    identical,
    plain,
)
from tests.support.worlds import Ranks, small_batch


@pytest.mark.parametrize("lr", [0.5, torch.tensor(0.5, dtype=torch.float64)], ids=["number", "tensor"])
@pytest.mark.parametrize("compression", [None, dgcopt.DGC(0.1, warmup=None)], ids=["dense", "DGC"])
def test_ranks_without_data_step_with_the_learning_rate_of_others(compression, lr):
    """Their schedulers stand still: replicas would drift apart."""
    batches = (2, 0, 9)
    ranks = Ranks(3, lambda params: SGD(params, copy.deepcopy(lr), momentum=0.9), compression=compression)
    schedules = [OneCycleLR(optimizer, max_lr=0.5, total_steps=12) for optimizer in ranks.optimizers]
    with contextlib.ExitStack() as loops:
        ends = [loops.enter_context(contextlib.ExitStack()) for _ in batches]
        for end, optimizer in zip(ends, ranks.optimizers, strict=True):
            end.enter_context(dgcopt.join(optimizer))
        for seed in range(9):
            for end, count in zip(ends, batches, strict=True):
                if count == seed:
                    end.close()
            active = [rank for rank, count in enumerate(batches) if seed < count]
            inputs, targets = small_batch(seed=seed)
            for rank in active:
                ranks.optimizers[rank].zero_grad()
                nn.functional.cross_entropy(ranks.models[rank](inputs[rank::3]), targets[rank::3]).backward()
            for rank in active:
                group = ranks.optimizers[rank].param_groups[0]
                before = float(group["lr"])
                ranks.optimizers[rank].step()
                assert rank != active[0] or float(group["lr"]) == before, "taken from a rank without data"
                schedules[rank].step()
    ranks.assert_replicas_equal()


@pytest.mark.parametrize(
    "clip",
    [
        dgcopt.LocalClip(math.sqrt(2.0)),  # times sqrt(2) in the mean of two
        dgcopt.LocalClip(2.0, per="tensor"),
        dgcopt.LocalClip(value=1.0),
        dgcopt.LocalClip(fn=lambda grad: grad.clamp_(-1, 1)),
    ],
    ids=["norm of the model", "norm of a tensor", "value", "function"],
)
def test_gradients_are_clipped_before_they_stand_for_ranks_without_data(clip):
    compression = dgcopt.DGC(1.0, clip=clip, source="gradient")
    ranks = Ranks(2, lambda p: SGD(p, lr=1.0), lambda: nn.Linear(4, 1, bias=False), compression=compression)
    for model in ranks.models:
        nn.init.zeros_(model.weight)
    weight = ranks.models[1].weight
    with contextlib.ExitStack() as first, contextlib.ExitStack() as second:
        first.enter_context(dgcopt.join(ranks.optimizers[0]))
        second.enter_context(dgcopt.join(ranks.optimizers[1]))
        first.close()
        (10 * weight).sum().backward()
        ranks.optimizers[1].step()
    torch.testing.assert_close(weight, torch.full_like(weight, -1.0))


def test_a_closure_while_a_rank_has_run_out_of_data():
    """Its loss cannot be averaged, and nobody is waited for."""
    ranks = Ranks(2, lambda p: SGD(p, lr=0.1))
    with dgcopt.join(ranks.optimizers[0]):
        pass

    def closure():
        ranks.optimizers[1].zero_grad()
        loss = ranks.models[1](torch.randn(3, 12, dtype=torch.float64)).sum()
        loss.backward()
        return loss

    with (
        pytest.raises(MismatchError, match="exchanged and not taken"),  # rank 0 has taken it by then
        dgcopt.join(ranks.optimizers[1]),
        pytest.raises(ConfigError, match="run out of data"),
    ):
        ranks.optimizers[1].step(closure)


@pytest.mark.parametrize("divide_by", ["active", "all"])
@pytest.mark.parametrize("every", [1, 2, 3, 4])
@pytest.mark.parametrize("overlap", [False, True])
def test_ranks_that_run_out_of_data(every: int, divide_by: Any, overlap: bool):
    """Means are of the ranks that have made a step since the last one, or of all; all go on from the same step."""
    batches = (3, 7, 0, 6)
    ours, theirs = World(4, LocalSGD(every, overlap=overlap)), World(4)
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
    for optimizer in ours.optimizers:
        optimizer.averaging.finish_round()
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
def test_changes_known_to_some_ranks_only_are_not_lost(
    batches: tuple[int, ...], rule: Averaging, share: float, nodes: int
):
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
