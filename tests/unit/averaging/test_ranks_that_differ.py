"""Ranks that differ: weights that are not finite, other settings, other steps, and failed rounds."""

from __future__ import annotations

import copy
import functools
import itertools

import pytest
import torch

import dgcopt
from dgcopt import DivergenceError, LocalSGD, MismatchError
from dgcopt.averaging import Averaging
from tests.support.averaging import (
    World,
    assert_close,
    assert_worlds_close,
    identical,
    plain,
)
from tests.support.worlds import small_model


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


@pytest.mark.parametrize("rule", [LocalSGD(4), dgcopt.DiLoCo(4)])
@pytest.mark.parametrize("again", [LocalSGD(4).attach, dgcopt.DistributedOptimizer])
def test_a_model_wrapped_again_between_two_rounds_is_told_how(rule: Averaging, again):
    """The error names the call that makes ranks equal without the loss of a rank's steps."""
    world = World(2, rule).train(range(2))
    earlier = world.optimizers

    def wrap() -> None:
        world.comms = dgcopt.simulated_world(2)
        world.optimizers = [
            again(plain(model.parameters()), model.named_parameters(), comm=comm)
            for model, comm in zip(world.models, world.comms, strict=True)
        ]

    wrap()
    world.backward(2)
    words = step_all(world)
    assert sorted(words) == [0, 1]
    assert all("come apart" in text and "call averaging.average() of that optimizer" in text for text in words.values())
    for optimizer in earlier:
        optimizer.averaging.average()
    wrap()
    world.train(range(2, 4))


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
