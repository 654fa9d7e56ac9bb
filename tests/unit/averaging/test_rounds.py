"""What every averaging algorithm rests on, on simulated ranks: against bare optimizers whose weights are averaged by
hand, with whatever people do to optimizers, scalers, checkpoints and parameters."""

from __future__ import annotations

import copy
import functools
import pickle
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim import SGD, Adam, AdamW
from torch.optim.lr_scheduler import OneCycleLR, StepLR

import dgcopt
from dgcopt import ConfigError, LocalSGD, SlowMo
from dgcopt.averaging import Averaging, Rounds, Sync
from dgcopt.collectives import AllReduce, Broadcast
from dgcopt.kernels import BLOCK
from tests.support.averaging import (
    Make,
    World,
    adam,
    assert_close,
    assert_worlds_close,
    identical,
    momentum,
)
from tests.support.worlds import small_model

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


def test_gradient_averaging_over_the_same_ranks_is_refused():
    """And leaves no trace: both optimizer and wire can be used."""
    world = World(2)
    for (_, model, optimizer), comm in zip(world, world.comms, strict=True):
        dgcopt.DistributedOptimizer(optimizer, model.named_parameters(), comm=comm)
        with pytest.raises(ConfigError, match=r"so LocalSGD has no effect.* smaller process_set, or set warm"):
            LocalSGD(optimizer, comm=comm)
        LocalSGD(optimizer, 2, warmup_steps=1, named_parameters=model.named_parameters(), comm=comm)
        with (
            pytest.raises(ConfigError, match=r"warmup_steps of LocalSGD: remove one .* the same number of batches"),
            dgcopt.join(optimizer),
        ):
            pass
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


def test_gradients_of_a_skipped_step_that_failed_do_not_come_back():
    """The optimizer's own step raised after they were hidden, and there are others by now."""
    world = World(2, LocalSGD(2), model=functools.partial(small_model, torch.float32))
    optimizer, scaler = world.optimizers[0], torch.amp.GradScaler("cpu", init_scale=256.0)

    def fail(*args: Any) -> None:
        raise RuntimeError("out of memory")

    hook = optimizer.register_step_pre_hook(fail)
    scaler.scale(world.loss(0, 0) * torch.inf).backward()
    with pytest.raises(RuntimeError, match="out of memory"):
        scaler.step(optimizer)
    hook.remove()
    optimizer.zero_grad()
    world.loss(0, 1).backward()
    grads = [param.grad for param in world.models[0].parameters()]
    optimizer.step()
    assert all(param.grad is grad for param, grad in zip(world.models[0].parameters(), grads, strict=True))


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


def test_ranks_that_rejoin_keep_their_account():
    optimizer = World(2, LocalSGD(2)).train(range(2)).optimizers[0]
    telemetry = optimizer.averaging.telemetry
    optimizer.averaging.rejoin(dgcopt.simulated_world(1)[0])
    assert optimizer.averaging.telemetry is telemetry and telemetry.steps == 2


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


def test_a_mean_on_request_counts_as_a_round():
    world = World(2, LocalSGD(every=4)).train(range(3))
    assert [optimizer.averaging.replica.steps_since_sync for optimizer in world.optimizers] == [3, 3]
    for optimizer in world.optimizers:
        optimizer.averaging.average()
    for optimizer in world.optimizers:
        optimizer.averaging.finish_round()
        state = optimizer.averaging.state()
        assert state["since"] == 0 and not state["apart"], "no rank has progress of its own"


def test_a_round_in_flight_ends_before_ranks_may_run_out_of_data():
    """Which do not overlap rounds with their steps."""
    world = World(2, LocalSGD(every=2, overlap=True)).train(range(2))
    rounds = [optimizer.averaging for optimizer in world.optimizers]
    assert all(each.sync.in_flight for each in rounds)
    for each in rounds:
        each.join(True, False)
    assert not any(each.sync.in_flight for each in rounds)
