"""Exchanges run while backward does, once per step, in one order on all ranks, and their bytes are counted right."""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from typing import Any
from unittest import mock

import torch
from torch import nn

import dgcopt
from dgcopt import DGC, Comm
from dgcopt.collectives import Collective
from dgcopt.comm import Handle

from .optimizers import Branches
from .training import TINY, Recipe, Replica, gather_text, train


class Spy:
    """Writes down what a comm starts: the votes, and everything else."""

    def __init__(self, comm: Comm) -> None:
        self.started: list[str] = []
        self.votes: list[str] = []
        self._start = comm.start
        self._comm = comm

    def __enter__(self) -> Spy:
        def start(collective: Collective) -> Handle:
            (self.votes if collective.group == "control" else self.started).append(collective.describe())
            return self._start(collective)

        self._comm.start = start  # type: ignore[method-assign]
        return self

    def __exit__(self, *error: object) -> None:
        del self._comm.start  # type: ignore[method-assign]


def sgd(named: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD([param for _, param in named], lr=0.1, momentum=0.9)


def buckets_leave_during_backward(comm: Comm) -> None:
    """From the second step on, every bucket has been launched when backward returns, and none inside no_sync()."""
    for compression in (None, DGC(0.1, overlap=True)):
        mine = Replica(Recipe(sgd, compression=compression, buckets=(*TINY.items(),)), comm)
        train([mine], [0])
        with Spy(comm) as spy:
            with mine.optimizer.no_sync():  # type: ignore[attr-defined]
                mine.backward(1)
            assert not spy.started, "sent something inside no_sync()"
            mine.loss(1, 1).backward()
            during = list(spy.started)
            mine.step(1)
        assert during == spy.started, f"{set(spy.started) - set(during)} waited for the end of backward"
        assert len(during) >= 3 and all("bucket" in name for name in during)
        assert "(4.bias" in during[0] or "(4.weight" in during[0], f"the last layer should go first: {during}"


def order_is_the_same_on_all_ranks(comm: Comm) -> None:
    """Though gradients become ready in other orders on each: that of the buckets, and that of the votes."""
    mine = Replica(
        Recipe(
            sgd,
            model=lambda: Branches(comm.size, comm.rank),
            compression=DGC(0.1, overlap=True),
            buckets=(*TINY.items(),),
        ),
        comm,
    )
    with Spy(comm) as spy:
        train([mine], range(5))
    for started in (spy.started, spy.votes):
        hashes = gather_text(comm, hashlib.sha256("\n".join(started).encode()).hexdigest())
        assert len(set(hashes)) == 1, f"ranks started collectives in other orders: {hashes}"
    assert len(spy.started) > 30 and len(spy.votes) > 5


def layered() -> nn.Module:
    """Matrices of 1000 and 130 elements, vectors of 20 and 10: 64, 576, 1000 elements are 1, 9, 16 blocks of 64."""
    with torch.random.fork_rng():
        torch.manual_seed(1)
        return nn.Sequential(nn.Linear(50, 20), nn.Tanh(), nn.Linear(13, 10))


def bytes_are_counted(comm: Comm) -> None:
    """The ledger of a step equals what can be worked out with pencil and paper, whatever is accumulated."""
    n = comm.size
    # order: 4 int64, broadcast; sparse: 4 int32, reduced; hash of initial state; digests of 4 parameters
    # over Gloo each rank sends the few whole numbers that are reduced, and its vote, to all others
    few = {nbytes: nbytes * (n - 1) if comm.wire == "torch" else 2 * nbytes * (n - 1) // n for nbytes in (16, 44)}
    agreement, vote = [4 * 8 * (n - 1) // n, few[16], 32 * (n - 1), 4 * 16 * (n - 1)], few[44]
    whole = (1024 + 64 + 192 + 64) * 4  # float32, every tensor on blocks of 64 elements
    vectors = 2 * 2 * 64 * 4 // 2 * 2 * (n - 1) // n
    cases = {
        "dense": (None, 2 * whole * (n - 1) // n),
        "fp16": (dgcopt.FP16(), whole * (n - 1) // n),
        # 10 + 2 coordinates of 8 bytes to each other rank
        "DGC, vectors dense": (DGC(0.01), 12 * 8 * (n - 1) + vectors),
        # 10 + 2 + 1 + 1 coordinates of 6 bytes are 84, and messages are multiples of 8
        "DGC, fp16": (DGC(0.01, values="fp16", vectors="sparse"), 88 * (n - 1)),
        "DGC at ratio 1": (DGC(1.0, vectors="sparse"), 2 * whole * (n - 1) // n),
    }
    for name, (compression, per_step) in cases.items():
        for passes in (1, 3):
            model = layered()
            optimizer = dgcopt.DistributedOptimizer(
                torch.optim.SGD(model.parameters(), 0.1), model.named_parameters(), compression, passes, comm=comm
            )
            telemetry = optimizer.telemetry  # type: ignore[attr-defined]
            for step in range(3):
                optimizer.zero_grad()
                for _ in range(passes):
                    (model[0](torch.randn(4, 50)).sum() + model[2](torch.randn(4, 13)).sum()).backward()
                optimizer.step()
                expected = sum(agreement) + (step + 1) * (per_step + vote)
                assert telemetry.sent_bytes == expected, f"{name}: {telemetry.sent_bytes} bytes, not {expected}"
                assert telemetry.steps == step + 1, f"{name}: {telemetry.steps} exchanges in {step + 1} steps"
            assert telemetry.dense_bytes == 3 * (2 * 4 * 1160 * (n - 1) // n)
    if comm.wire == "torch":
        with mock.patch("torch.distributed.all_to_all_single", wraps=torch.distributed.all_to_all_single) as library:
            (model[0](torch.randn(4, 50)).sum() + model[2](torch.randn(4, 13)).sum()).backward()
            optimizer.step()
        assert sum(call.args[1].nbytes for call in library.call_args_list) == vote // (n - 1) * n, "one row is its own"


IN_BYTES: dict[str, Callable[[Comm], Any]] = {"overlap: bytes_are_counted": bytes_are_counted}

SCENARIOS: dict[str, Callable[[Comm], Any]] = IN_BYTES | {
    f"overlap: {function.__name__}": function
    for function in (buckets_leave_during_backward, order_is_the_same_on_all_ranks)
}
