"""The two-phase commit of a step, by a caller of its own: shards of tensors, with a group inside and one across."""

from __future__ import annotations

import copy
from collections.abc import Callable, Generator, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor

import dgcopt
from dgcopt.collectives import AllGather, AllReduce, Collective, Exchange, ReduceScatter
from dgcopt.compressors import Compressor, Context
from dgcopt.exchange.commit import CommitMarker, FinishedExchange
from dgcopt.exchange.runner import Job, Runner, on_their_way
from dgcopt.exchange.scheduler import PendingExchange, context_of, exchange_of
from dgcopt.exchange.step import Aborted, Description, Step
from dgcopt.exchange.vote import Ballot, Verdict, checksum, fingerprint
from dgcopt.flat.buckets import build_buckets
from dgcopt.flat.gradient import GradientBucket, is_finite
from dgcopt.flat.store import Store

SHAPES = [(8, 3), (4, 50)]
REPLICAS = [(0, 1), (2, 3)]
SIZE = 4
SKIPPED = "another shard of this replica"


class Shards(Step):
    """Each `.grad` of this rank's shards becomes its mean over the replicas, on all ranks or on none."""

    def __init__(self, shards: Sequence[Tensor], compressor: Compressor, comm: dgcopt.Comm) -> None:
        self.runner = Runner(comm, "shards", lambda: None, self.fail)
        super().__init__(self.runner.scheduler, CommitMarker())
        self.shards, self.compressor, self.store = shards, compressor, Store()
        named = [(f"t{place}", shard) for place, shard in enumerate(shards)]
        self.buckets = build_buckets(named, compressor.kind, 1, 1, None, GradientBucket)
        self.contexts = {bucket: context_of(bucket, comm, "average", self.store) for bucket in self.buckets}
        self.steps, self.stale, self.final, self.here = 0, False, True, True
        self.rule, self.outcomes, self.log = "", list[Any](), list[str]()
        self.ended()

    def __call__(self) -> None:
        self.runner.add(self.run())
        self.runner.go()

    @property
    def exchanges(self) -> Sequence[PendingExchange[GradientBucket]]:
        return self.pending

    def ballot(self, final: bool) -> Ballot:
        used = [shard.grad is not None for shard in self.shards]
        finite = all(is_finite(shard.grad) for shard in self.shards if shard.grad is not None)
        launched = sum(pending.exchange is not None for pending in self.pending)
        word, marks = checksum([self.rule]), fingerprint(used)
        final, self.final = final and self.final, True
        flags = {"stale": self.stale, "complete": all(used), "final": final, "here": self.here}
        return Ballot(self.here, finite, self.steps, word, launched, used=marks, **flags)

    def describe(self) -> Description:
        return Description([self.rule], "rules", "Give all ranks one rule.")

    def launch(self, used: Sequence[bool] | None = None, together: bool = False) -> None:
        self.log.append(f"launch {used} {'together' if together else 'apart'}")
        self.launch_until(len(self.buckets))

    def catch_up(self, launched: int) -> None:
        self.launch_until(launched)

    def adapt(self, verdict: Verdict) -> Job:
        self.log.append("adapt")
        yield from ()

    def launch_until(self, launched: int) -> None:
        for place, bucket in enumerate(self.buckets[:launched]):
            if place >= len(self.pending):
                self.pending.append(PendingExchange(bucket.label, bucket))
            if self.pending[place].exchange is None:
                bucket.fill(range(len(bucket.segments)), bucket.grads())
                exchange = exchange_of(bucket, self.compressor, self.contexts[bucket])
                self.scheduler.launch(self.pending[place], exchange)

    def finished(self, used: Sequence[bool] | None) -> list[FinishedExchange]:
        finished = []
        for place, pending in enumerate(self.pending):
            flags = None if used is None else [used[place]]
            write = partial(pending.of.prepare, used=flags)
            finished.append(FinishedExchange(pending, self.contexts[pending.of], flags, write, pending.of.elements))
        return finished

    def used(self) -> list[bool]:
        return [shard.grad is not None for shard in self.shards]

    def rollback(self) -> None:
        for context in self.contexts.values():
            context.rollback()

    def cancelled(self) -> None:
        self.log.append("cancelled")
        self.stale = False

    def committed(self, finished: Sequence[FinishedExchange]) -> None:
        self.steps += 1
        self.outcomes.append("committed")

    def aborted(self, why: Aborted) -> None:
        self.outcomes.append(why)

    def ended(self) -> None:
        self.pending: list[PendingExchange[GradientBucket]] = []

    def fail(self) -> str:
        told = on_their_way(self.pending)
        self.rollback()
        self.ended()
        return told


class Halves(Compressor):
    """Half of the gradient and the residual, which is kept until a later step sends it."""

    def exchange(self, grad: Tensor, ctx: Context) -> Exchange:
        total = ctx.add_residual(grad)
        half = total / 2
        ctx.keep_residual(total - half)
        rows = yield AllGather(half)
        ctx.checks.look_at(rows.sum(0), by_sender=rows)
        return rows.mean(0)


# -- four ranks: two replicas of two shards each ---------------------------------------------------------------------


class World:
    """The callers of four ranks, with the group of shards inside each replica."""

    def __init__(self, compressor: Compressor, caller: type[Shards] = Shards) -> None:
        whole = dgcopt.simulated_world(SIZE)
        across = [comm.across_replicas(REPLICAS) for comm in whole]
        self.inside = [[whole[rank].among(replica) for rank in replica] for replica in REPLICAS]
        self.callers = [
            caller([torch.zeros(shape) for shape in SHAPES], copy.deepcopy(compressor), comm) for comm in across
        ]

    def backward(self, seed: int) -> list[Tensor]:
        """Make each rank's gradients, reduce-scatter them inside each replica, and return the means over all ranks."""
        generator = torch.Generator().manual_seed(seed)
        grads = [[torch.randn(2 * rows, cols, generator=generator) for rows, cols in SHAPES] for _ in range(SIZE)]
        for replica, comms in zip(REPLICAS, self.inside, strict=True):
            flat = dgcopt.simulate([scattered(grads[rank]) for rank in replica], comms)
            for rank, mine in zip(replica, flat, strict=True):
                parts = mine.split([rows * cols for rows, cols in SHAPES])
                for shard, part, shape in zip(self.callers[rank].shards, parts, SHAPES, strict=True):
                    shard.grad = part.view(shape).clone()
        return [torch.stack(each).mean(0) for each in zip(*grads, strict=True)]

    def step(self) -> list[BaseException]:
        """Step all ranks; each goes on by itself if another one has failed."""
        errors: list[BaseException] = []
        for again in (False, True):
            for caller in self.callers:
                try:
                    if not again:
                        caller()
                    elif caller.runner.busy or caller.runner.failed:
                        caller.runner.finish()
                except BaseException as error:
                    errors.append(error)
        return errors

    def kept(self) -> Any:
        """Return copies of all gradients, memory and numbers of steps."""
        return copy.deepcopy(
            [([s.grad for s in caller.shards], caller.store.memory(), caller.steps) for caller in self.callers]
        )


def scattered(grads: Sequence[Tensor]) -> Generator[Collective, Tensor, Tensor]:
    parts = []
    for grad in grads:
        parts.append((yield ReduceScatter(grad, op="average")).flatten())
    return torch.cat(parts)


def equal(one: Any, other: Any) -> bool:
    """Return True for the same bits, NaN included."""
    if isinstance(one, Tensor):
        return one.shape == other.shape and torch.equal(one.view(torch.uint8), other.view(torch.uint8))
    if isinstance(one, dict):
        return one.keys() == other.keys() and all(equal(one[key], other[key]) for key in one)
    if isinstance(one, list | tuple):
        return len(one) == len(other) and all(map(equal, one, other))
    return bool(one == other)


TOPK = dgcopt.TopK(0.1)


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


def spoiling(start: Callable[..., Any]) -> Callable[..., Any]:
    """Send NaN in place of the first value of a bucket's message."""

    def spoiled(collective: Collective, label: str) -> Any:
        if " round 0" in label:
            collective.tensor[0] = torch.nan
        return start(collective, label)

    return spoiled


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


class Begins(Shards):
    """Takes every step for one whose gradients have changed."""

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


def test_no_rank_has_data() -> None:
    world = World(TOPK)
    world.backward(0)
    before = world.kept()
    for caller in world.callers:
        caller.here = False
    assert not world.step() and equal(world.kept(), before)
    assert [caller.outcomes for caller in world.callers] == [[Aborted([])]] * SIZE
    assert all(caller.participation.ended and caller.participation.ranks == 0 for caller in world.callers)


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


@pytest.mark.parametrize("inspects", [False, True])
def test_dense_sums_are_inspected_where_asked_for(inspects: bool) -> None:
    world = World(dgcopt.NoCompression())
    world.backward(0)
    for caller in world.callers:
        caller.inspects_sums = inspects
    caller.scheduler.start = spoiling(caller.scheduler.start)
    assert not world.step()
    assert [caller.steps for caller in world.callers] == [0 if inspects else 1] * SIZE


class ChangesEarly(Shards):
    """Its launch changes state already, as an optimizer's own step does that makes the update to send."""

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


def test_a_step_without_a_vote_is_completed_alone() -> None:
    world = World(dgcopt.NoCompression())
    means = world.backward(0)
    for caller in world.callers:
        caller.runner.add(caller.complete())
        caller.runner.go()
    assert all(caller.outcomes == ["committed"] for caller in world.callers)
    torch.testing.assert_close(world.callers[1].shards[0].grad, means[0][8:])
    assert world.callers[0].log == ["launch None apart"]


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
