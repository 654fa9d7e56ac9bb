"""Hooks of a caller in the two-phase commit: begin, launch, flush, confirm, committed."""

from __future__ import annotations

import copy
from collections.abc import Callable, Generator, Sequence
from dataclasses import replace
from typing import Any
from unittest.mock import Mock

import pytest
import torch
from torch import Tensor

import dgcopt
from dgcopt.collectives import AllReduce
from dgcopt.exchange.commit import FinishedExchange
from dgcopt.exchange.runner import Job
from dgcopt.exchange.vote import Verdict
from tests.support.shards import SIZE, TOPK, Halves, Shards, World, equal, spoiling


class Begins(Shards):
    """Treats the gradients of every step as changed since the launch."""

    def begin(self, verdict: Verdict) -> Generator[Any, Tensor, Verdict]:
        yield from ()
        return replace(verdict, stale=True)


def test_a_caller_may_act_on_the_vote_before_all_others() -> None:
    world = World(TOPK, Begins)
    world.backward(0)
    for caller in world.callers:
        caller.launch()
    assert not world.step()
    assert [caller.scheduler.telemetry.repeated for caller in world.callers] == [1] * SIZE


class Interrupted(BaseException):
    """Injected."""


class FailsToCommit(Shards):
    """Interrupted once between the first and the last change."""

    fails = False

    def committed(self, finished: Sequence[FinishedExchange]) -> None:
        if self.fails:
            raise Interrupted
        super().committed(finished)


def test_an_interrupted_commit_is_told_until_state_is_restored() -> None:
    world = World(TOPK, FailsToCommit)
    world.backward(0)
    world.callers[1].fails = True
    errors = world.step()
    assert any(isinstance(error, Interrupted) for error in errors)
    with pytest.raises(dgcopt.InterruptedStep, match="memory and gradients took their new values"):
        world.callers[1].runner.finish(world.callers[1].run)
    world.callers[1].marker.end()
    world.callers[1].marker.check(0)


class Flushes(Shards):
    """Adds one to every result once memory is committed, as the last step of a warm-up adds residuals."""

    def flush(self, used: list[bool] | None) -> Job | None:
        return self.adding_one() if self.steps == 1 else None

    def adding_one(self) -> Job:
        with pytest.raises(dgcopt.InterruptedStep):
            self.marker.check(0)
        self.memory_then = copy.deepcopy(self.store.memory())
        one = yield self.scheduler.start(AllReduce(torch.ones(1)), "flush")
        for pending in self.pending:
            pending.result = self.contexts[pending.of].dense(pending.result) + one


def test_a_flush_comes_after_memory_and_before_gradients() -> None:
    plain, world = World(TOPK), World(TOPK, Flushes)
    for seed in range(2):
        for each in (plain, world):
            each.backward(seed)
            assert not each.step()
    for one, other in zip(plain.callers, world.callers, strict=True):
        assert equal(one.store.memory(), other.store.memory()) and equal(other.memory_then, other.store.memory())
        for shard, flushed in zip(one.shards, other.shards, strict=True):
            torch.testing.assert_close(flushed.grad, shard.grad + 1)
        assert not any(context.memory.idle for context in other.contexts.values()), "memory is committed once"
        other.marker.check(0)


def test_a_flush_leaves_memory_of_parameters_without_a_gradient() -> None:
    world = World(TOPK, Flushes)
    world.backward(0)
    assert not world.step()
    before = [caller.store.memory()["residual"]["t1"].clone() for caller in world.callers]
    world.backward(1)
    for caller in world.callers:
        caller.shards[1].grad = None
    assert not world.step()
    assert equal([caller.store.memory()["residual"]["t1"] for caller in world.callers], before)
    assert all(tensor.any() for tensor in before)


def test_each_step_is_confirmed_once_before_anything_changes() -> None:
    """As ranks do that may be lost while others go on."""
    world, asked = World(Halves()), list[int]()
    for rank, caller in enumerate(world.callers):

        def confirm(start: Callable[..., Any], rank: int = rank, caller: Shards = caller) -> bool:
            caller.marker.check(rank)
            assert len(caller.outcomes) == caller.scheduler.telemetry.skipped + asked.count(rank)
            asked.append(rank)
            return len(asked) <= SIZE

        caller.comm.confirm = confirm
    world.backward(0)
    assert not world.step() and sorted(asked) == [0, 1, 2, 3]
    assert all(caller.same_ranks_left for caller in world.callers)
    world.backward(1)
    world.callers[0].shards[0].grad.fill_(torch.inf)
    assert not world.step() and sorted(asked) == [0, 0, 1, 1, 2, 2, 3, 3]
    assert not any(caller.same_ranks_left for caller in world.callers)
    world.backward(2)
    world.callers[3].scheduler.start = spoiling(world.callers[3].scheduler.start)
    assert not world.step() and asked.count(2) == 3, "an abort for what has arrived is confirmed too"


def test_a_rank_that_cannot_prepare_its_gradients_confirms_no_step() -> None:
    """Ranks that may be lost would commit it without this one."""
    world = World(TOPK)
    world.backward(0)
    caller = world.callers[1]
    caller.comm.confirm = Mock()  # type: ignore[method-assign]
    caller.buckets[0].prepare = Mock(side_effect=MemoryError)  # type: ignore[method-assign]
    assert {type(error) for error in world.step()} == {MemoryError}
    assert not caller.comm.confirm.called and not caller.store.residual_norm()


class ChangesEarly(Shards):
    """Changes state in its launch, as an optimizer whose step makes the update to send."""

    def launch(self, used: Sequence[bool] | None = None, together: bool = False) -> None:
        self.marker.begin("the optimizer's state")
        super().launch(used, together)


def test_an_abort_by_all_ranks_interrupts_no_step() -> None:
    world = World(Halves(), ChangesEarly)
    world.backward(0)
    start = world.callers[0].scheduler.start
    world.callers[0].scheduler.start = spoiling(start)
    assert not world.step()
    assert [caller.steps for caller in world.callers] == [0] * SIZE
    world.callers[0].scheduler.start = start
    world.backward(1)
    assert not world.step() and [caller.steps for caller in world.callers] == [1] * SIZE


def test_the_verdict_is_returned() -> None:
    verdicts: list[Verdict | None] = []

    class Told(Shards):
        def __call__(self) -> None:
            self.runner.add(self.telling())
            self.runner.go()

        def telling(self) -> Job:
            verdicts.append((yield from self.run()))

    world = World(TOPK, Told)
    world.backward(0)
    assert not world.step()
    assert [verdict is not None and verdict.is_taken for verdict in verdicts] == [True] * SIZE
