"""Collectives that a device runs while the host goes on, without a device: NCCL's works and groups are fakes."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist

import dgcopt
from dgcopt.coding import Checks
from dgcopt.collectives import AllReduce, SendRecv
from dgcopt.comm.torch import TorchComm
from dgcopt.errors import TimeoutExceeded
from dgcopt.exchange.commit import FinishedExchange, inspect


class Work:
    """Completes after a number of polls; waiting for it returns at once, as on NCCL."""

    def __init__(self, polls: float = 0) -> None:
        self.polls, self.polled = polls, 0

    def wait(self) -> bool:
        return True

    def is_completed(self) -> bool:
        self.polled += 1
        return self.polled > self.polls

    def exception(self) -> None:
        raise TypeError("torch cannot convert a work's exception to Python, not even a missing one")


@pytest.fixture
def nccl(monkeypatch):
    """A comm of two ranks over fakes: `works` are those of the next allreduces, `calls` what was started."""
    fake = SimpleNamespace(works=[], calls=[], backends="cuda:nccl")

    def start(name):
        fake.calls.append(name)
        return fake.works.pop(0) if fake.works else Work()

    for name, value in {
        "is_initialized": lambda: True,
        "get_rank": lambda group=None: 0,
        "get_world_size": lambda group=None: 2,
        "get_backend": lambda group=None: "nccl",
        "get_backend_config": lambda group=None: fake.backends,
        "get_global_rank": lambda group, rank: rank,
        "all_reduce": lambda *args, **kwargs: start("allreduce"),
        "P2POp": lambda *args: args,
        "batch_isend_irecv": lambda peers: [start("sendrecv")],
    }.items():
        monkeypatch.setattr(dist, name, value)
    fake.comm = TorchComm("some group", apart={}, deadline=30.0)
    return fake


def on_device(numel: int = 4) -> torch.Tensor:
    return torch.empty(numel, device="meta")


def reduce(nccl, work: Work, label: str) -> None:
    nccl.works.append(work)
    nccl.comm.run(AllReduce(on_device(), op="sum", label=label))


def test_one_that_never_completes_is_named(nccl):
    reduce(nccl, Work(), "bucket 0")
    reduce(nccl, Work(float("inf")), "bucket 1")
    with pytest.raises(TimeoutExceeded, match=r"^rank 0 waited 0\.02 s for .*bucket 1.* needs rank\(s\) 1\."):
        nccl.comm.finish_on_device(0.02)
    nccl.comm.finish_on_device(0.0)  # the step has failed: nothing of it is waited for again


def test_the_deadline_is_the_comms_own_by_default(nccl):
    nccl.comm.deadline = 0.01
    reduce(nccl, Work(float("inf")), "bucket 7")
    with pytest.raises(TimeoutExceeded, match=r"waited 0\.01 s for .*bucket 7"):
        nccl.comm.finish_on_device()


def test_one_that_completes_later_is_waited_for_once(nccl):
    late = Work(polls=2)
    reduce(nccl, late, "bucket 0")
    assert late.polled == 0  # the host has gone on
    nccl.comm.finish_on_device(10.0)
    assert late.polled == 3
    nccl.comm.finish_on_device(10.0)
    assert late.polled == 3


def test_completed_ones_are_released_as_others_are_added(nccl):
    done, slow = Work(), Work(polls=3)
    reduce(nccl, done, "bucket 0")
    reduce(nccl, slow, "bucket 1")
    reduce(nccl, Work(), "bucket 2")
    reduce(nccl, Work(), "bucket 3")
    assert (done.polled, slow.polled) == (1, 2)


def test_on_cpu_there_is_nothing_to_finish(nccl):
    work = Work(float("inf"))
    work.wait = lambda timeout: True
    nccl.works.append(work)
    nccl.comm.run(AllReduce(torch.ones(4), op="sum", label="bucket 0"))
    nccl.comm.finish_on_device(0.0)
    assert work.polled == 0
    dgcopt.simulated_world(1)[0].finish_on_device(0.0)


def test_only_what_reads_the_device_waits_for_it():
    """A dense sum that nobody looks at costs no wait; a pending check does."""
    finished = []
    comm = SimpleNamespace(finish_on_device=lambda: finished.append(len(finished)))
    context = SimpleNamespace(checks=Checks())
    one = FinishedExchange(SimpleNamespace(result=torch.ones(4), label="bucket 0"), context, None, lambda _: None, 4)
    assert inspect([one], comm) == [] and finished == []
    context.checks.expect(torch.tensor(True), lambda: "wrong")
    assert inspect([one], comm) == [] and finished == [0]
    context.checks.check_finite(torch.tensor([torch.nan]))
    assert [found.label for found in inspect([one], comm)] == ["bucket 0"] and finished == [0, 1]


@pytest.mark.parametrize("backends", ["cuda:nccl", "cpu:gloo,cuda:nccl"])
def test_all_ranks_meet_before_the_first_send_of_a_group(nccl, backends):
    nccl.backends = backends
    nccl.comm.run(SendRecv(on_device(), to=1, source=1))
    nccl.comm.run(SendRecv(on_device(), to=1))
    assert nccl.calls == ["allreduce", "sendrecv", "sendrecv"]


def test_a_rank_that_sends_nothing_meets_the_others_too(nccl):
    nccl.comm.run(SendRecv(on_device()))
    assert nccl.calls == ["allreduce"]


def test_gloo_needs_no_meeting(nccl):
    nccl.backends = "cpu:gloo,cuda:gloo"
    for work in (Work(), Work()):
        work.wait = lambda timeout: True
        nccl.works.append(work)
        nccl.comm.run(SendRecv(torch.ones(4), to=1, source=1))
    assert nccl.calls == ["sendrecv", "sendrecv"]
