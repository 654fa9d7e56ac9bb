"""The two-phase commit of a step: committed by all ranks, or aborted and cancelled by all."""

from __future__ import annotations

from unittest.mock import Mock

import pytest
import torch

import dgcopt
from dgcopt.exchange.runner import Job
from dgcopt.exchange.step import Aborted
from tests.support.shards import REPLICAS, SIZE, TOPK, Halves, Shards, World, equal, spoiling

SKIPPED = "another shard of this replica"


def test_a_commit_averages_each_shard_over_the_replicas() -> None:
    world = World(dgcopt.NoCompression())
    means = world.backward(0)
    assert not world.step()
    for place, rows in ((0, slice(0, 8)), (1, slice(8, 16))):
        for replica in REPLICAS:
            caller = world.callers[replica[place]]
            torch.testing.assert_close(caller.shards[0].grad, means[0][rows])
            assert caller.outcomes == ["committed"] and caller.steps == 1 and not caller.pending
            assert caller.log == ["adapt", "launch None together"]
            assert caller.scheduler.telemetry.skipped == caller.scheduler.telemetry.repeated == 0


def test_nothing_is_lost_over_steps_of_which_one_is_aborted() -> None:
    """Applied sums and residuals add up to the gradients of the steps that were taken."""
    world, applied, made = World(TOPK), 0.0, 0.0
    for seed in range(4):
        means = world.backward(seed)
        if seed == 2:
            world.callers[3].shards[0].grad[0, 0] = torch.inf
        assert not world.step()
        if seed != 2:
            made += sum(float(mean.double().sum()) for mean in means)
            applied += sum(float(shard.grad.double().sum()) for rank in (0, 1) for shard in world.callers[rank].shards)
    kept = sum(float(t.double().sum()) for c in world.callers for t in c.store.memory()["residual"].values())
    assert made == pytest.approx(applied + kept / 2, abs=1e-3)
    assert [caller.steps for caller in world.callers] == [3] * SIZE
    assert [caller.scheduler.telemetry.selected for caller in world.callers] == [3 * (3 + 20)] * SIZE


def test_nan_in_one_gradient_aborts_the_step_of_all_replicas_and_all_shards() -> None:
    world, twin = World(TOPK), World(TOPK)
    for each in (world, twin):
        each.backward(0)
        assert not each.step()
    world.backward(1)
    world.callers[2].shards[1].grad[3, 4] = torch.nan
    before = world.kept()
    assert not world.step()
    assert equal(world.kept(), before), "gradients and memory are as before"
    # the ranks of shard 0 have heard it from each other, those of shard 1 from their replica: each names its own
    assert [caller.outcomes[1] for caller in world.callers] == [Aborted([1])] * SIZE
    for each in (world, twin):
        each.backward(2)
        assert not each.step()
    assert equal(world.kept(), twin.kept()), "the next step is as if nothing had been"


@pytest.mark.parametrize("rank", range(SIZE))
def test_nan_that_arrives_at_the_ranks_of_one_shard_aborts_the_step_of_all(rank: int) -> None:
    world = World(Halves())
    world.backward(0)
    assert not world.step()
    world.backward(1)
    before, caller = world.kept(), world.callers[rank]
    caller.scheduler.start = spoiling(caller.scheduler.start)
    assert not world.step()
    assert equal(world.kept(), before)
    for other in world.callers:
        (found, *_) = other.outcomes[1].arrived
        assert other.outcomes[1].ranks == ()
        if other.comm.ranks("replica").index(world.callers.index(other)) == rank % 2:
            assert found.label.startswith("bucket") and list(found.ranks) == [rank // 2]
        else:
            assert found.label == SKIPPED
    world.backward(2)
    del caller.scheduler.start
    assert not world.step() and [caller.steps for caller in world.callers] == [2] * SIZE


def test_launches_before_the_vote_are_cancelled_by_all_if_gradients_have_changed_on_one() -> None:
    world, twin = World(TOPK), World(TOPK)
    for each in (world, twin):
        each.backward(0)
    for caller in world.callers:
        caller.launch()
    world.callers[1].stale = True
    changed = world.callers[1].shards[0].grad.mul_(2)
    twin.callers[1].shards[0].grad.copy_(changed)
    assert not world.step() and not twin.step()
    # shard 0's ranks 0 and 2 have not heard of it, and go on with what they have launched
    assert [caller.scheduler.telemetry.repeated for caller in world.callers] == [0, 1, 0, 1]
    assert [caller.log[-1] for caller in world.callers] == ["launch None apart", "launch None together"] * 2
    selected = [[caller.scheduler.telemetry.selected for caller in each.callers] for each in (world, twin)]
    assert selected[0] == selected[1], "cancelled selections do not count"
    assert equal(world.kept(), twin.kept())


def test_a_rank_that_has_launched_less_catches_up_before_all_cancel() -> None:
    world, twin = World(TOPK), World(TOPK)
    for each in (world, twin):
        each.backward(0)
    world.callers[0].launch()
    world.callers[2].stale = True
    assert not world.step() and not twin.step()
    assert [caller.scheduler.telemetry.repeated for caller in world.callers] == [1, 0, 1, 0]
    assert equal(world.kept(), twin.kept())


def test_launches_before_the_vote_are_cancelled_if_no_rank_takes_the_step() -> None:
    world = World(TOPK)
    world.backward(0)
    assert not world.step()
    world.backward(1)
    world.callers[2].shards[1].grad[3, 4] = torch.nan
    before = world.kept()
    for caller in world.callers:
        caller.launch()
    assert not world.step() and equal(world.kept(), before)
    assert all(caller.log[-1] == "cancelled" and not caller.pending for caller in world.callers)
    assert all(caller.scheduler.telemetry.repeated == 0 for caller in world.callers), "nothing is sent again"
    twin = World(TOPK)
    for each, seeds in ((twin, (0, 2)), (world, (2,))):
        for seed in seeds:
            each.backward(seed)
            assert not each.step()
    assert equal(world.kept(), twin.kept()), "the cancelled exchanges have left nothing behind"


def test_a_preliminary_vote_ends_the_step_only_if_gradients_are_not_finite() -> None:
    world = World(TOPK)
    world.backward(0)
    for caller in world.callers:
        caller.final = False  # asked once, as a loss scaler does
    assert not world.step() and [caller.outcomes for caller in world.callers] == [["committed"]] * SIZE
    world.backward(1)
    world.callers[0].shards[0].grad.fill_(torch.nan)
    for caller in world.callers:
        caller.final = False
    assert not world.step()
    assert [caller.outcomes[1:] for caller in world.callers] == [[Aborted([0])]] * SIZE
    assert all("cancelled" not in caller.log for caller in world.callers), "nothing was launched"


def test_preliminary_votes_go_on_until_all_ranks_cast_a_final_one() -> None:
    world = World(TOPK)
    world.backward(0)
    for caller in world.callers:
        caller.ballot = Mock(side_effect=map(caller.ballot, (False, False, True)))  # type: ignore[method-assign]
    assert not world.step() and [caller.outcomes for caller in world.callers] == [["committed"]] * SIZE


def test_a_shard_without_a_gradient_counts_as_zero_unless_no_rank_has_one() -> None:
    world = World(dgcopt.NoCompression())
    world.backward(0)
    other = world.callers[2].shards[0].grad.clone()
    world.callers[0].shards[0].grad = None
    for rank in (1, 3):
        world.callers[rank].shards[1].grad = None
    assert not world.step()
    torch.testing.assert_close(world.callers[0].shards[0].grad, other / 2)
    assert world.callers[0].log[-1] == "launch [True, True] together"
    assert world.callers[1].log[-1] == "launch [True, False] together"
    assert world.callers[1].shards[1].grad is None and world.callers[0].shards[1].grad is not None


def test_ranks_that_differ_are_told_how_before_anything_changes() -> None:
    world = World(TOPK)
    world.backward(0)
    world.callers[2].rule = "one of its own"
    before = world.kept()
    errors = world.step()
    told = [error for error in errors if isinstance(error, dgcopt.MismatchError)]
    assert len(told) >= 2 and all("Give all ranks one rule" in str(error) for error in told)
    assert equal([(grads, steps) for grads, _, steps in world.kept()], [(grads, steps) for grads, _, steps in before])
    assert not any(caller.store.residual_norm() for caller in world.callers)


def fail(caller: Shards) -> None:
    """End the step on one rank, after its first launch."""

    def job() -> Job:
        yield from ()
        raise OSError("no space left")

    caller.launch_until(1)
    caller.runner.add(job())
    with pytest.raises(OSError, match="no space left"):
        caller.runner.finish()


def test_collectives_of_a_step_that_failed_on_one_rank_are_not_mixed_with_others() -> None:
    """Wires match by order: its next message would be taken for the second one of the others."""
    world = World(TOPK)
    for seed in range(2):
        world.backward(seed)
        assert not world.step()
    world.backward(2)
    fail(world.callers[2])
    before = world.kept()
    told = [str(error) for error in world.step() if isinstance(error, dgcopt.MismatchError)]
    assert sum("rank 2 (replica 1) has [collectives before this step: 5]" in error for error in told) >= 2
    assert equal([(grads, steps) for grads, _, steps in world.kept()], [(grads, steps) for grads, _, steps in before])


def test_a_step_that_has_failed_on_all_ranks_alike_is_made_again() -> None:
    world, twin = World(TOPK), World(TOPK)
    for each in (world, twin):
        each.backward(0)
    for caller in world.callers:
        fail(caller)
    assert not world.step() and not twin.step() and equal(world.kept(), twin.kept())


def test_no_rank_has_data() -> None:
    world = World(TOPK)
    world.backward(0)
    before = world.kept()
    for caller in world.callers:
        caller.here = False
    assert not world.step() and equal(world.kept(), before)
    assert [caller.outcomes for caller in world.callers] == [[Aborted([])]] * SIZE
    assert all(caller.participation.ended and caller.participation.ranks == 0 for caller in world.callers)


@pytest.mark.parametrize("inspects", [False, True])
def test_dense_sums_are_inspected_where_asked_for(inspects: bool) -> None:
    world = World(dgcopt.NoCompression())
    world.backward(0)
    for caller in world.callers:
        caller.inspects_sums = inspects
    caller.scheduler.start = spoiling(caller.scheduler.start)
    assert not world.step()
    assert [caller.steps for caller in world.callers] == [0 if inspects else 1] * SIZE


def test_a_step_without_a_vote_is_completed_alone() -> None:
    world = World(dgcopt.NoCompression())
    means = world.backward(0)
    for caller in world.callers:
        caller.runner.add(caller.complete())
        caller.runner.go()
    assert all(caller.outcomes == ["committed"] for caller in world.callers)
    torch.testing.assert_close(world.callers[1].shards[0].grad, means[0][8:])
    assert world.callers[0].log == ["launch None apart"]
