"""Store and Runner: one more caller of the same generators is short."""

from __future__ import annotations

import copy
from unittest.mock import Mock

import pytest
import torch
from torch import Tensor

import dgcopt
from dgcopt.collectives import AllReduce
from dgcopt.exchange.runner import Job, Runner, describe_in_flight
from dgcopt.exchange.scheduler import PendingExchange, context_of, exchange_of
from dgcopt.flat.buckets import build_buckets
from dgcopt.flat.gradient import GradientBucket
from dgcopt.flat.store import Store


class EveryK:
    """A list of tensors becomes their mean over ranks, compressed with error feedback, at every k-th call."""

    def __init__(self, tensors: list[Tensor], compressor: dgcopt.Compressor, comm: dgcopt.Comm, every: int) -> None:
        named = [(f"t{place}", tensor) for place, tensor in enumerate(tensors)]
        self.shapes = {name: tensor.shape for name, tensor in named}
        self.compressor, self.comm, self.every, self.calls = compressor, comm, every, 0
        self.together = False
        self.buckets = build_buckets(named, compressor.kind, 2**20, 2**20, None, GradientBucket)
        self.store = Store()
        self.runner = Runner(comm, "every k", lambda: None, self.roll_back)
        self.restore(Store().state())

    def restore(self, state: dict) -> None:
        self.store.restore(state, self.shapes)
        self.contexts = {bucket: context_of(bucket, self.comm, "average", self.store) for bucket in self.buckets}

    def __call__(self) -> None:
        self.calls += 1
        if self.calls % self.every == 0:
            self.runner.add(self.exchange())
            self.runner.go()

    def exchange(self) -> Job:
        self.exchanges = [PendingExchange(bucket.label, bucket) for bucket in self.buckets]
        launches = []
        for pending in self.exchanges:
            pending.of.grad.copy_(pending.of.read())
            launches.append((pending, exchange_of(pending.of, self.compressor, self.contexts[pending.of])))
        for some in [launches] if self.together else [[launch] for launch in launches]:
            self.runner.scheduler.launch_together(some)
        yield from self.runner.scheduler.finish(self.exchanges, self.compressor.in_turn)
        for pending in self.exchanges:
            self.contexts[pending.of].commit()
            pending.of.write(self.contexts[pending.of].dense(pending.result))

    def roll_back(self) -> str:
        for context in self.contexts.values():
            context.rollback()
        return describe_in_flight(self.exchanges)


def world(size: int, compressor: dgcopt.Compressor, every: int = 2) -> tuple[list[list[Tensor]], list[EveryK]]:
    tensors = [[torch.full((5, 3), float(rank)), torch.arange(70.0) * rank] for rank in range(size)]
    comms = dgcopt.simulated_world(size)
    return tensors, [EveryK(mine, compressor, comm, every) for mine, comm in zip(tensors, comms, strict=True)]


def test_the_fourth_caller_exchanges_every_k_calls() -> None:
    tensors, callers = world(3, dgcopt.NoCompression())
    for caller in callers:
        caller()
    assert [mine[0][0, 0].item() for mine in tensors] == [0.0, 1.0, 2.0], "not yet"
    for caller in callers:
        caller()
    for mine in tensors:
        assert torch.equal(mine[0], torch.full((5, 3), 1.0)) and torch.equal(mine[1], torch.arange(70.0))
    assert callers[0].runner.scheduler.telemetry.sent_bytes > 0


def test_residuals_are_kept_by_name_and_continue_in_another_caller() -> None:
    tensors, callers = world(2, dgcopt.TopK(0.1), every=1)
    for caller in callers:
        caller()
    state = callers[1].store.state()
    sent = 2 * tensors[1][1]
    torch.testing.assert_close(state["memory"]["residual"]["t1"] + sent, torch.arange(70.0), rtol=0, atol=0)
    other = EveryK([torch.zeros(5, 3), torch.zeros(70)], dgcopt.TopK(0.1), dgcopt.simulated_world(2)[1], 1)
    other.restore(state)
    assert other.store.residual_norm() == callers[1].store.residual_norm() > 0
    with pytest.raises(
        dgcopt.ConfigError, match=r"residual of shape \(70,\) for parameter 't1', which has shape \(7,\)"
    ):
        other.store.restore(state, {"t0": torch.Size((5, 3)), "t1": torch.Size((7,))})
    assert other.store.residual_norm() > 0, "what does not fit changes nothing"


@pytest.mark.parametrize("checksums", [False, True])
@pytest.mark.parametrize(
    ("compressor", "apart", "together"),
    [
        (dgcopt.DGC.compact(0.2, warmup=None, reduce="owner"), 4, 2),
        (dgcopt.DGC.compact(0.2, warmup=None), 2, 1),
        (dgcopt.DGC(0.2, reduce="owner"), 3, 3),  # an allreduce goes by itself
    ],
)
def test_small_messages_that_are_launched_together_travel_together(compressor, apart, together, checksums) -> None:
    """As one collective, to the same bits, until there is enough for one of its own; so in every round."""
    results = {}
    for enough, at_once in ((2**18, False), (2**18, True), (1, True)):
        tensors, callers = world(3, copy.deepcopy(compressor), every=1)
        for caller in callers:
            caller.together, caller.comm.checksums = at_once, checksums
        scheduler = callers[0].runner.scheduler
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr("dgcopt.exchange.scheduler.ENOUGH", enough)
            start = Mock(side_effect=scheduler.start)
            patch.setattr(scheduler, "start", start)
            for _ in range(3):
                for caller in callers:
                    caller()
        held = [caller.store.memory() for caller in callers]
        results[enough, at_once] = tensors, held, scheduler.telemetry.payload_bytes, start.call_count
    (one, memory, nbytes, _), *others = results.values()
    for tensors, held, same_bytes, _ in others:
        torch.testing.assert_close(tensors, one, rtol=0, atol=0)
        torch.testing.assert_close(held, memory, rtol=0, atol=0)
        assert nbytes == same_bytes
    if not checksums:  # which an allreduce takes one more collective for
        assert [count for *_, count in results.values()] == [3 * apart, 3 * together, 3 * apart]


class Fails(dgcopt.Compressor):
    """On one rank, after its first collective."""

    def exchange(self, grad, ctx):
        held = ctx.memory.remember("residual", grad)
        held += 1
        mean = yield AllReduce(grad)
        if ctx.rank == 1:
            raise ValueError("the disk is full")
        return mean


def test_an_error_is_raised_on_the_rank_that_it_belongs_to_and_changes_nothing() -> None:
    tensors, callers = world(3, Fails(), every=1)
    before = [[tensor.clone() for tensor in mine] for mine in tensors]
    for caller in callers:
        caller()  # the last one to come moves the others on
    assert all(torch.equal(*pair) for pair in zip(tensors[1], before[1], strict=True))
    assert callers[1].store.residual_norm() == 0 and callers[0].store.residual_norm() > 0
    with pytest.raises(ValueError, match="disk is full"):
        callers[1].runner.progress()  # for another rank that waits, which cannot go on
    with pytest.raises(ValueError, match="disk is full"):
        callers[1].runner.finish()
    callers[1].runner.finish()  # said once
    for caller in callers:
        caller()
    assert callers[1].runner.failed
    callers[1].runner.clear()  # as loaded state does
    callers[1].runner.finish()


def test_jobs_are_done_one_after_another_and_a_failure_ends_them_all() -> None:
    comm = dgcopt.simulated_world(1)[0]
    done: list[str] = []
    runner = Runner(comm, "test", lambda: None, lambda: " Nothing was sent.")

    def job(name: str) -> Job:
        yield runner.scheduler.start(AllReduce(torch.zeros(1)), name)
        if name == "second":
            raise dgcopt.CommError("gone.")
        done.append(name)

    for name in ("first", "second", "third"):
        runner.add(job(name))
    with pytest.raises(dgcopt.CommError, match=r"gone\. Nothing was sent\."):
        runner.finish()
    assert done == ["first"] and not runner.busy


def test_ranks_that_take_turns_meet_where_others_need_not() -> None:
    comm = dgcopt.simulated_world(2)[0]
    runner = Runner(comm, "test", lambda: None, lambda: "")
    assert [handle.collective.label for handle in runner.together("here")] == ["test 0 here"]
    comm.takes_turns = False
    assert not [*runner.together("here")]
