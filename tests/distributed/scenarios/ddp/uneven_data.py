"""Ranks with different numbers of batches, in DDP's join() and in dgcopt.join."""

import itertools
import math
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.algorithms.join import Join

import dgcopt

from .registry import Scenario, registered_in
from .training import CPU, RATIO, Training, assert_close, assert_same_on_all_ranks, batch, flat, plain, small_model

SCENARIOS: dict[str, Scenario] = {}
scenario = registered_in(SCENARIOS)


@scenario
def join_serves_ranks_that_have_more_data() -> None:
    """Rank 0 runs out of data first. Averages divide by all ranks, or by those that have data, as DDP is told."""

    def run(hook, by_all: bool = True) -> Training:
        training = Training(hook, plain)
        with training.ddp.join(divide_by_initial_world_size=by_all):
            for step in range(4 + 3 * dist.get_rank()):
                training.step(step)
        assert_same_on_all_ranks(training.weights())
        training.run(2, first=7)
        return training

    dense = {by_all: run(None, by_all).weights() for by_all in (True, False)}
    assert not torch.allclose(dense[True], dense[False], atol=1e-3)
    for by_all, weights in dense.items():
        for compressor in (dgcopt.NoCompression(), dgcopt.DGC(1.0, overlap=True), dgcopt.DGC(1.0)):
            training = run(compressor, by_all)
            assert_close(training.weights(), weights)
            assert training.state.telemetry.repeated == (
                0 if by_all or not training.state.compressor.overlaps(CPU) else 2
            )
        assert training.state.step == 9
        assert run(dgcopt.DGC(RATIO), by_all).memory().abs().sum() > 0


@scenario
def join_is_that_of_distributed_optimizer() -> None:
    """With what each rank held back when it ran out of data, and when others did."""
    most = 7
    clips = None, dgcopt.LocalClip(0.3), dgcopt.LocalClip(0.1, per="tensor"), dgcopt.LocalClip(value=0.01)
    for by_all, clip in itertools.product((True, False), clips):
        training = Training(dgcopt.DGC(RATIO, clip=clip), plain)
        with training.ddp.join(divide_by_initial_world_size=by_all):
            for step in range(4 + 3 * dist.get_rank()):
                training.step(step)
        replica = small_model()
        optimizer = dgcopt.DistributedOptimizer(
            plain(replica.parameters()), replica.named_parameters(), dgcopt.DGC(RATIO, clip=clip)
        )
        with dgcopt.join(optimizer, divide_by="all" if by_all else "active"):
            for step in range(4 + 3 * dist.get_rank()):
                inputs, targets = batch(step)
                optimizer.zero_grad()
                nn.functional.cross_entropy(replica(inputs), targets).backward()
                optimizer.step()
        assert training.state.step == optimizer.telemetry.steps == most
        assert_close(training.weights(), flat(replica.parameters()))
        assert math.isclose(training.memory().norm(), optimizer.residual_norm(), rel_tol=1e-6)


@scenario
def uneven_data_of_two_models() -> None:
    """One in DDP, one of ours, in one loop: each ends as it would by itself, in either order and join."""

    def torchs(*members: Any, divide_by: str) -> Join:
        return Join([*members], divide_by_initial_world_size=divide_by == "all")

    found = []
    for order, divide_by, join in (
        ("do", "active", dgcopt.join),
        ("do", "active", torchs),
        ("d", "active", dgcopt.join),
        ("o", "active", dgcopt.join),
        ("od", "all", dgcopt.join),
        ("od", "all", torchs),
        ("d", "all", dgcopt.join),
        ("o", "all", dgcopt.join),
    ):
        training, replica = Training(make=plain), small_model()
        optimizer = dgcopt.DistributedOptimizer(plain(replica.parameters()), replica.named_parameters())
        members = {"d": training.ddp, "o": optimizer}
        with join(*(members[each] for each in order), divide_by=divide_by):
            for step in range(4 + 3 * dist.get_rank()):
                for each in order:
                    if each == "d":
                        training.step(step)
                    else:
                        inputs, targets = batch(step)
                        optimizer.zero_grad()
                        nn.functional.cross_entropy(replica(inputs), targets).backward()
                        optimizer.step()
        found.append({"d": training.weights(), "o": flat(replica.parameters())})
    for *both, first, second in (found[:4], found[4:]):
        for together in both:
            assert_close(together["d"], first["d"])
            assert_close(together["o"], second["o"])
    with pytest.raises(dgcopt.ConfigError, match="only if it is the first"), dgcopt.join(optimizer, training.ddp):
        pass
    from torch.distributed.optim import ZeroRedundancyOptimizer  # half a second, which no other rank has to wait for

    zero = ZeroRedundancyOptimizer(training.model.parameters(), torch.optim.SGD, lr=0.1)
    with pytest.raises(dgcopt.ConfigError, match="own last batch"), dgcopt.join(training.ddp, zero):
        pass
    with pytest.raises(RuntimeError, match="exhausted"), dgcopt.join(training.ddp, throw_on_early_termination=True):
        for step in range(4 + 3 * dist.get_rank()):
            training.step(step)
    averaged = dgcopt.LocalSGD(plain(replica.parameters()))
    with pytest.raises(dgcopt.ConfigError, match="averaged weights"), dgcopt.join(training.ddp, averaged):
        pass
