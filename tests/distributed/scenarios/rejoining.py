"""Ranks that leave the wire and join it again in the same processes."""

from __future__ import annotations

import os
import sys
import threading
import time
from collections.abc import Callable

import pytest
import torch

import dgcopt
from dgcopt import Comm, CommError, hvd
from dgcopt.collectives import AllGather, AllReduce, Barrier, ReduceScatter
from tests.support.wires import only


def _exchanges(comm: Comm) -> None:
    """Every group of a comm works, and those of some of its ranks and of all."""
    for group in ("world", "control", "agreement", "node", "across"):
        ranks = comm.ranks(group)
        rows = comm.run(AllGather(torch.tensor([comm.rank]), group=group, label=f"{group} again"))
        assert rows.flatten().tolist() == [*ranks]
    for subset in (comm.among(range(comm.size)), comm.among("node")):
        assert subset.run(AllReduce(torch.full((2**12,), 1.0), op="sum")).tolist() == [subset.size] * 2**12
        subset.close()


def _is_closed(comm: Comm) -> None:
    """Collectives that the wire has, those that it builds from others, and those of a GPU raise one error."""
    rows = torch.ones(comm.size, 8)
    for collective in (AllReduce(rows), AllReduce(rows.bfloat16()), AllGather(rows), ReduceScatter(rows)):
        with pytest.raises(CommError, match=r"^rank \d+: .*: this wire is closed\. Join by dgcopt\.init\(\)"):
            comm.run(collective)
    comm.supports(ReduceScatter(rows.to("meta")))  # any other device than the CPU


def _steady(count: Callable[[], tuple[int, ...]], most: tuple[int, ...]) -> bool:
    """Return True once no more is open than `most`: some files and threads end a moment after the group."""
    end = time.monotonic() + 5
    while any(now > then for now, then in zip(count(), most, strict=True)):
        if time.monotonic() > end:
            return False
        time.sleep(0.05)
    return True


def _open() -> tuple[int, ...]:
    """Return the numbers of files, threads and MPI communicators, which take the lowest free place."""
    communicators = 0
    if "mpi4py.MPI" in sys.modules:
        probes = [sys.modules["mpi4py.MPI"].COMM_SELF.Dup() for _ in range(8)]  # the first fill gaps
        communicators = probes[-1].py2f()
        for probe in probes:
            probe.Free()
    return len(os.listdir("/proc/self/fd")), len(os.listdir("/proc/self/task")), communicators


def ranks_leave_and_join_again(comm: Comm) -> None:
    """Four of them on two machines, so that the groups of a hierarchy are made again too."""
    wire, deadline, size = comm.wire, comm.deadline, comm.size
    before: tuple[int, ...] = ()
    for turn in range(5):
        earlier = dgcopt.init()
        dgcopt.shutdown()
        _is_closed(earlier)
        with pytest.MonkeyPatch.context() as patch:
            patch.setenv("DGCOPT_NODE", f"machine {comm.rank // 2}")
            again = dgcopt.init(wire, deadline=deadline)
        assert again is not comm and (again.size, again.nodes) == (size, -(-size // 2))
        _exchanges(again)
        if turn == 1:
            before = _open()
            again.run(Barrier())  # connections to a rank that has left are closed here too
    assert _steady(_open, before), f"files, threads and communicators: {before} after two joins, {_open()} after five"


def process_sets_come_and_go(comm: Comm) -> None:
    hvd.init()
    before: tuple[int, ...] = ()
    for turn in range(5):
        made = hvd.add_process_set(range(comm.size))
        assert hvd.allreduce(torch.ones(3), op=hvd.Sum, process_set=made).tolist() == [comm.size] * 3
        hvd.barrier(process_set=made)
        assert hvd.remove_process_set(made)
        if turn == 1:
            before = _open()
    assert _steady(_open, before), f"files, threads and communicators: {before} after two sets, {_open()} after five"
    assert threading.active_count() < 20


@only(wires=["torch"], sizes=[4])
def fewer_ranks_join_again(comm: Comm) -> None:
    """Ranks go on without the last one, as after a loss, and then with it again."""
    deadline, others = comm.deadline, comm.size - 1
    dgcopt.shutdown()
    if comm.rank < others:
        with pytest.MonkeyPatch.context() as patch:
            patch.setenv("WORLD_SIZE", str(others))
            fewer = dgcopt.init(deadline=deadline)
        assert fewer.size == others
        _exchanges(fewer)
        dgcopt.shutdown()
    again = dgcopt.init(deadline=deadline)
    assert again.size == comm.size
    _exchanges(again)


SCENARIOS = {
    f"rejoining: {scenario.__name__}": scenario
    for scenario in (ranks_leave_and_join_again, fewer_ranks_join_again, process_sets_come_and_go)
}
