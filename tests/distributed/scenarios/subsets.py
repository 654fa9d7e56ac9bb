"""Votes beside the exchanges of the world, and comms of some of its ranks."""

from __future__ import annotations

import torch

from dgcopt import Comm, ConfigError, MismatchError, TimeoutExceeded
from dgcopt.collectives import AllGather, AllReduce, AllToAll, Barrier, Broadcast, ReduceScatter, SendRecv
from dgcopt.comm import LocalComm
from tests.support.wires import HOROVOD, only

from .collectives import all_collectives, expect, regrouped
from .training import refused as assert_refused


def votes_in_any_order(comm: Comm) -> None:
    """Every rank casts its votes at another point between the same exchanges of the world, named or not."""
    length = 2**17
    for name in ("", "named"):
        votes, sums = [], []
        for turn in range(2 * comm.size):
            label = name and f"{name} {turn}"
            if turn in (comm.rank, comm.rank + 1):
                number = turn - comm.rank
                votes.append(
                    comm.start(
                        AllGather(torch.tensor([10 * comm.rank + number]), group="control", label=name and str(number))
                    )
                )
            if turn < comm.size:
                sums.append(comm.start(AllReduce(torch.full((length,), float(turn)), op="sum", label=label)))
        for number in (1, 0):
            assert comm.wait(votes[number]).tolist() == [[10 * rank + number] for rank in range(comm.size)]
        for turn, handle in enumerate(sums):
            assert torch.equal(comm.wait(handle), torch.full((length,), float(turn * comm.size)))


def a_vote_while_the_world_is_behind(comm: Comm) -> None:
    """All vote before the last rank comes to the exchange that the others have long started."""
    last = comm.rank == comm.size - 1
    early = None if last else comm.start(AllReduce(torch.ones(1000), op="sum"))
    assert comm.run(AllReduce(torch.tensor([comm.rank]), op="max", group="control")).tolist() == [comm.size - 1]
    comm.run(Barrier(group="control"))
    handle = early or comm.start(AllReduce(torch.ones(1000), op="sum"))
    assert comm.wait(handle).tolist() == [comm.size] * 1000


def a_vote_while_others_compare(comm: Comm) -> None:
    """A rank that compares first and one that votes first: neither takes the other's message for an answer."""
    vote, comparison = (
        AllReduce(torch.tensor([comm.rank] * 11, dtype=torch.int32), op="max", group="control", label="vote"),
        AllGather(torch.full((32,), comm.rank, dtype=torch.uint8), group="agreement", label="hash"),
    )
    order = (vote, comparison) if comm.rank % 2 else (comparison, vote)
    started = {id(collective): comm.start(collective) for collective in order}
    assert comm.wait(started[id(vote)]).tolist() == [comm.size - 1] * 11
    assert comm.wait(started[id(comparison)])[:, 0].tolist() == list(range(comm.size))


def control_has_every_collective(comm: Comm) -> None:
    size, me = comm.size, comm.rank
    for dtype in (torch.float32, torch.bfloat16, torch.uint8):
        rows = torch.arange(2 * size * size).view(size, 2 * size).to(dtype)
        expect(comm, AllReduce(rows[me].clone(), op="sum", group="control"), rows.sum(0).to(dtype))
        expect(comm, ReduceScatter(rows[me].clone(), op="max", group="control"), rows[-1].view(size, 2)[me])
        expect(comm, AllGather(rows[me].clone(), group="control"), rows)
        expect(comm, AllToAll(rows[me].view(size, 2).clone(), group="control"), rows.view(size, size, 2)[:, me])
        expect(comm, Broadcast(rows[me].clone(), root=size - 1, group="control"), rows[-1])
        passed = SendRecv(rows[me].clone(), to=(me + 1) % size, source=(me - 1) % size, group="control")
        expect(comm, passed, rows[me - 1])
    comm.run(Barrier(group="control"))


def disjoint_subsets(comm: Comm) -> None:
    """Even and odd ranks at the same time, under the same labels, while the world's own exchange is in flight."""
    whole = comm.start(AllReduce(torch.full((2**17,), float(comm.rank)), op="max", label="sum"))
    halves = [tuple(range(start, comm.size, 2)) for start in (0, 1)]
    made = [comm.among(half) for half in halves]
    mine, ranks = made[comm.rank % 2], halves[comm.rank % 2]
    outside = made[1 - comm.rank % 2]
    assert type(mine) is (type(comm) if comm.size > 2 else LocalComm) and isinstance(outside, LocalComm)
    assert (mine.rank, mine.size) == (ranks.index(comm.rank), len(ranks)) and mine.deadline == comm.deadline
    started = [
        mine.start(AllReduce(torch.full((2**17,), float(comm.rank)), op="sum", label="sum")),
        mine.start(AllGather(torch.tensor([comm.rank]), label="who")),
        mine.start(AllGather(torch.tensor([comm.rank]), label="who", group="control")),
        outside.start(AllReduce(torch.tensor([float(comm.rank)]), op="sum", label="sum")),
    ]
    results = [mine.wait(handle) for handle in started]
    assert torch.equal(results[0], torch.full((2**17,), float(sum(ranks))))
    assert results[1].flatten().tolist() == results[2].flatten().tolist() == list(ranks)
    assert results[3].tolist() == [comm.rank]
    mine.run(Barrier())
    mine.close()
    outside.close()
    assert torch.equal(comm.wait(whole), torch.full((2**17,), float(comm.size - 1)))


def two_comms_of_the_same_ranks(comm: Comm) -> None:
    """Each has its own order and its own names, whichever is used first on which rank."""
    twins = [comm.among(range(comm.size)) for _ in range(2)]
    for label in ("", "same"):
        order = (0, 1) if comm.rank % 2 else (1, 0)
        handles = {
            (place, group): twins[place].start(
                AllReduce(torch.full((1000,), 1.0 + place), op="sum", label=label, group=group)
            )
            for place in order
            for group in ("world", "control")
        }
        for (place, _), handle in handles.items():
            assert twins[place].wait(handle).tolist() == [comm.size * (1.0 + place)] * 1000
    for twin in twins:
        twin.close()


def every_collective_of_a_subset(comm: Comm) -> None:
    """All ranks but the first, or all if that leaves one; given backwards, twice, and closed in between."""
    members = range(comm.size - 1, 0 if comm.size > 2 else -1, -1)
    if comm.nodes == 2:
        members = range(3, 1, -1)  # three of two and two ranks hang Horovod 0.28.1 with Gloo, unless they are 0, 1, 2
    for first in (True, False):
        subset = comm.among(members)
        assert isinstance(subset, LocalComm) == (comm.rank not in members)
        if not isinstance(subset, LocalComm):
            assert subset.rank == comm.rank - min(members) and subset.nodes == 1
            if first:
                all_collectives(subset)
            control_has_every_collective(subset)
            votes_in_any_order(subset)
        subset.close()
    assert comm.run(AllReduce(torch.ones(3), op="sum")).tolist() == [comm.size] * 3


@only(wires=["mpi"], sizes=[4])
def subset_of_a_subset(comm: Comm) -> None:
    """[1, 2] of [0, 1, 2]; those that are not of it get a comm of their own."""
    outer = comm.among([0, 1, 2])
    inner = outer.among([0] if comm.rank == 3 else [1, 2])
    assert isinstance(outer, LocalComm) == (comm.rank == 3) and isinstance(inner, LocalComm) == (comm.rank in (0, 3))
    assert inner.run(AllReduce(torch.tensor([comm.rank]), op="sum")).tolist() == [
        3 if comm.rank in (1, 2) else comm.rank
    ]


@only(wires=["torch", *HOROVOD], sizes=[4])
def no_subset_of_a_subset(comm: Comm) -> None:
    """Refused, with what to do instead, where the library cannot; a comm of one rank has itself."""
    outer = comm.among([0, 1, 2])
    if comm.rank == 3:
        assert isinstance(outer.among([0]), LocalComm)
    else:
        with assert_refused(comm, ConfigError, "ask the comm of all ranks for ranks [1, 2]"):
            outer.among([1, 2])


def refused(comm: Comm) -> None:
    for bad in ([], [0, comm.size], [-1], [0, 0], ["0"], None, "machine"):
        try:
            comm.among(bad)  # type: ignore[arg-type]
        except ConfigError as error:
            assert "among() needs" in str(error)
        else:
            raise AssertionError(f"{bad} was accepted")


def sets_of_machines(comm: Comm) -> None:
    """Each rank gets the one that it is in; with machines of several sizes, those that have this local rank."""
    for node_of in ([2 * rank // comm.size for rank in range(comm.size)], [9] * (comm.size - 1) + [1], [0] * comm.size):
        grouped = regrouped(comm, node_of)
        for name in ("node", "across"):
            members = grouped.ranks(name)  # type: ignore[arg-type]
            part = grouped.among(name)  # type: ignore[arg-type]
            assert (part.rank, part.size) == (members.index(comm.rank), len(members)), f"{name} of {node_of}: {part}"
            assert isinstance(part, LocalComm) == (len(members) == 1) and part.deadline == comm.deadline
            for group in ("world", "control"):
                gathered = part.run(AllGather(torch.tensor([comm.rank]), group=group))  # type: ignore[arg-type]
                assert gathered.flatten().tolist() == list(members)
            part.close()


def different_sets_are_refused(comm: Comm) -> None:
    """Which is what one gets who names the ranks of this machine on each: an error on all ranks at once, no hang."""
    half = max(1, comm.size // 2)
    try:
        comm.among(range(half) if comm.rank < half else range(half, comm.size))
    except MismatchError as error:
        theirs = list(range(half, comm.size))
        assert f"set of ranks {list(range(half))}, rank {half} for {theirs}" in str(error), error
        assert "process_set='node'" in str(error)
    else:
        raise AssertionError("each rank has named its own half")


@only(wires=HOROVOD, sizes=[4])
def process_sets_of_horovod(comm: Comm) -> None:
    """Process sets that the script has registered, or only made, are taken as they are."""
    import horovod.torch as hvd

    registered = hvd.add_process_set([1, 2])  # type: ignore[attr-defined]
    made = hvd.ProcessSet([0, 1, 2] if comm.nodes == 2 else [0, 2, 3])  # type: ignore[attr-defined]
    for given in (registered, made, hvd.global_process_set):  # type: ignore[attr-defined]
        members = list(given.ranks)
        subset = comm.among(given)
        assert isinstance(subset, LocalComm) == (comm.rank not in members)
        if comm.rank in members:
            assert subset.run(AllGather(torch.tensor([comm.rank]))).flatten().tolist() == members
            root = Broadcast(torch.tensor([comm.rank]), root=len(members) - 1)
            assert subset.run(root).tolist() == members[-1:]
    assert hvd.remove_process_set(registered)
    anew = comm.among([1, 2])
    assert anew.run(AllGather(torch.tensor([7]))).flatten().tolist() == [7] * anew.size


@only(wires=HOROVOD)
def failures_of_horovod(comm: Comm) -> None:
    """They are caught like Horovod's own: a rank that is late, and a name that is in flight twice."""
    from horovod.common.exceptions import HorovodInternalError

    last = comm.rank == comm.size - 1
    if last:  # it comes when the others have met both
        comm.run(Barrier(group="control"))
    handle = comm.start(AllReduce(torch.ones(2), op="sum", label="late"))
    if not last:
        try:
            comm.wait(handle, deadline=0.2)
        except HorovodInternalError as error:
            assert isinstance(error, TimeoutExceeded) and "waited 0.2 s" in str(error)
        else:
            raise AssertionError("the deadline passed unnoticed")
        try:
            comm.run(AllReduce(torch.ones(2), op="sum", label="late"))
        except ValueError as error:  # Horovod's own: its elastic loop must not try again
            assert isinstance(error, ConfigError) and f"rank {comm.rank}" in str(error)
            assert not isinstance(error, HorovodInternalError)
        else:
            raise AssertionError("Horovod took the same name twice")
        comm.run(Barrier(group="control"))
    assert comm.wait(handle).tolist() == [comm.size] * 2


SCENARIOS = {
    f"subsets: {function.__name__}": function
    for function in (
        votes_in_any_order,
        a_vote_while_the_world_is_behind,
        a_vote_while_others_compare,
        control_has_every_collective,
        disjoint_subsets,
        two_comms_of_the_same_ranks,
        every_collective_of_a_subset,
        subset_of_a_subset,
        no_subset_of_a_subset,
        refused,
        sets_of_machines,
        different_sets_are_refused,
        process_sets_of_horovod,
        failures_of_horovod,
    )
}
