"""Every collective, on every group, for every dtype, equals what each rank can work out by itself."""

from __future__ import annotations

import os
import tempfile
import types
import zlib
from collections.abc import Sequence
from pathlib import Path
from typing import Any, TypeAlias
from unittest import mock

import pytest
import torch
from torch import Tensor

import dgcopt
from dgcopt import Comm, ConfigError, MismatchError
from dgcopt.collectives import (
    OPS,
    AllGather,
    AllReduce,
    AllToAll,
    Barrier,
    Broadcast,
    Collective,
    Exchange,
    Group,
    ReduceScatter,
    SendRecv,
    reduce_rows,
)
from dgcopt.comm.base import lowered
from dgcopt.comm.horovod import horovod_torch
from dgcopt.comm.launch import check_alike
from dgcopt.tuning import forecast
from dgcopt.tuning.doctor import diagnose, profile_model
from dgcopt.tuning.probe import probe
from dgcopt.tuning.script import run_script
from dgcopt.tuning.wire import KINDS
from tests.support.wires import only

DTYPES = (
    torch.float32, torch.float64, torch.float16, torch.bfloat16,
    torch.int64, torch.int32, torch.int16, torch.uint8, torch.int8,
)  # fmt: skip
GROUPS: tuple[Group, ...] = ("world", "node", "across")


def regrouped(comm: Comm, node_of: list[int]) -> Comm:
    """Another comm over the same wire, as if the ranks ran on these machines."""
    os.environ["DGCOPT_NODE"] = f"machine {node_of[comm.rank]}"
    try:
        return type(comm)(deadline=comm.deadline)
    finally:
        del os.environ["DGCOPT_NODE"]


Case: TypeAlias = tuple[Collective, Tensor, bool]
"""A collective, its result, and whether that is exact."""


def expect(comm: Comm, collective: Collective, expected: Tensor, exact: bool = True) -> None:
    expect_all(comm, [(collective, expected, exact)])


def expect_all(comm: Comm, cases: Sequence[Case]) -> None:
    """Started together and waited for one after another: Horovod looks for what is started only now and then."""

    def alone(collective: Collective) -> Exchange:
        return (yield collective)

    words = [f"{it.describe()} {getattr(it, 'op', '')} on {it.group}" for it, _, _ in cases]
    exchanges = [lowered(alone(collective), comm) for collective, _, _ in cases]
    handles = [comm.start(next(exchange)) for exchange in exchanges]
    for what, exchange, handle, (_, expected, exact) in zip(words, exchanges, handles, cases, strict=True):
        try:
            while True:  # where the library lacks it, or messages are verified, others follow
                handle = comm.start(exchange.send(comm.wait(handle)))
        except StopIteration as stop:
            actual = stop.value
        found = f"{what}: {actual.shape} {actual.dtype}"
        assert (actual.shape, actual.dtype) == (expected.shape, expected.dtype), found
        if exact:
            assert torch.equal(actual, expected), f"{what}: got {actual.tolist()}, not {expected.tolist()}"
        else:
            torch.testing.assert_close(actual, expected, msg=lambda text, what=what: f"{what}: {text}")


def all_collectives(comm: Comm, groups: tuple[Group, ...] = GROUPS) -> None:
    for group in groups:
        ranks = comm.ranks(group)
        size, me = len(ranks), ranks.index(comm.rank)
        before, after = (me - 1) % size, (me + 1) % size
        cases: list[Case] = []
        for dtype in DTYPES:
            low = 0 if dtype == torch.uint8 else -3
            rows = torch.stack([(torch.arange(2 * size) + low + 2 * rank).to(dtype) for rank in ranks])

            def mine(shape: tuple[int, ...] = (-1,), rows: Tensor = rows, me: int = me) -> Tensor:
                return rows[me].view(shape).clone()

            for op in OPS:
                # small whole numbers: every order of adding up is exact, and so is a division by two or four
                exact = size != 3 or op != "average" or not dtype.is_floating_point
                reduced = reduce_rows(rows, op)
                cases.append((AllReduce(mine(), op=op, group=group), reduced, exact))
                cases.append((ReduceScatter(mine(), op=op, group=group), reduced.view(size, -1)[me], exact))
            cases.append((AllGather(mine(), group=group), rows, True))
            cases.append((AllToAll(mine((size, 2)), group=group), rows.view(size, size, 2)[:, me], True))
            for root in range(size):
                cases.append((Broadcast(mine((size, 2)), root=root, group=group), rows[root].view(size, 2), True))
            cases.append((SendRecv(mine(), to=after, source=before, group=group), rows[before], True))
            if size > 1:  # from the first to the last, and the others sit it out
                to, source = (size - 1 if me == 0 else None), (0 if me == size - 1 else None)
                received = rows[0] if me == size - 1 else rows[me]
                cases.append((SendRecv(mine(), to=to, source=source, group=group), received, True))
        # more bytes than a wire may send to all others at once, where that takes less time than its library does
        many, long = torch.arange(2**10) % 97, torch.arange(2**19, dtype=torch.int32)
        cases.append((AllReduce(many + me, op="max", group=group), many + size - 1, True))
        cases.append((AllGather(long + me, group=group), torch.stack([long + rank for rank in range(size)]), True))
        expect_all(comm, cases)
        comm.run(Barrier(group=group))


def real_machines(comm: Comm) -> None:
    """All ranks run on one machine, and are told so by its name; horovodrun was given two of its names for four."""
    nodes = 2 if comm.size == 4 and "HOROVOD_HOSTNAME" in os.environ else 1
    share = comm.size // nodes
    node, place = divmod(comm.rank, share)
    assert (comm.nodes, comm.node, comm.local_rank, comm.local_size) == (nodes, node, place, share)
    assert comm.ranks("node") == tuple(range(node * share, (node + 1) * share))
    assert comm.ranks("across") == tuple(range(place, comm.size, share))
    if comm.wire == "horovod":
        hvd = horovod_torch()
        assert (hvd.local_rank(), hvd.local_size(), hvd.cross_rank(), hvd.cross_size()) == (place, share, node, nodes)
    all_collectives(comm)


def even_machines(comm: Comm) -> None:
    node_of = [2 * rank // comm.size for rank in range(comm.size)]
    grouped = regrouped(comm, node_of)
    half = comm.size // 2
    first = comm.rank // half * half
    assert grouped.ranks("node") == tuple(range(first, first + half)) and grouped.nodes == 2
    assert grouped.ranks("across") == (comm.rank % half, comm.rank % half + half)
    all_collectives(grouped, ("node", "across"))  # the world is that of real_machines


def uneven_machines(comm: Comm) -> None:
    """One rank alone on the last machine, whose name sorts first: most ranks have nobody across."""
    grouped = regrouped(comm, [9] * (comm.size - 1) + [1])
    alone = comm.rank == comm.size - 1
    assert grouped.ranks("node") == ((comm.rank,) if alone else tuple(range(comm.size - 1)))
    assert grouped.ranks("across") == ((0, comm.size - 1) if comm.rank in (0, comm.size - 1) else (comm.rank,))
    all_collectives(grouped, ("node", "across"))  # the world is that of real_machines


def odd_shapes(comm: Comm) -> None:
    """Scalars, empty tensors, and memory that is not contiguous."""
    size, me = comm.size, comm.rank
    for make in (
        lambda rank: torch.tensor(float(rank)),
        lambda rank: torch.zeros(0),
        lambda rank: torch.zeros(3, 0, dtype=torch.int64),
        lambda rank: torch.zeros(3, 0, dtype=torch.int16),
        lambda rank: torch.full((2,), float(rank), dtype=torch.bfloat16)[::2],
        lambda rank: torch.full((2, 3, 4, 5), float(rank)).contiguous(memory_format=torch.channels_last),
    ):
        rows = torch.stack([make(rank) for rank in range(size)])
        expect(comm, AllReduce(make(me), op="sum"), rows.sum(0, dtype=rows.dtype))
        expect(comm, AllGather(make(me)), rows)
        expect(comm, Broadcast(make(me), root=size - 1), rows[-1])
        expect(comm, SendRecv(make(me), to=(me + 1) % size, source=(me - 1) % size), rows[me - 1])
    for dtype in (torch.bool, torch.complex64, torch.uint16, torch.float8_e5m2):  # which few libraries know
        rows = (torch.arange(size * 6) % 2).view(size, 2, 3).to(dtype)
        expect(comm, AllGather(rows[me].clone()), rows)
        expect(comm, Broadcast(rows[me].clone(), root=size - 1), rows[-1])
        expect(comm, SendRecv(rows[me].clone(), to=(me + 1) % size, source=(me - 1) % size), rows[me - 1])
        expect(
            comm,
            AllToAll(rows.clone() if me == 0 else torch.zeros_like(rows)),
            torch.cat([rows[me:][:1], torch.zeros_like(rows[1:])]),
        )
    rows = torch.tensor([1 + 2j, -4j]) * torch.arange(1, size + 1).view(size, 1)
    expect(comm, AllReduce(rows[me].clone(), op="average"), rows.sum(0) / size)
    expect(comm, ReduceScatter(rows[me].repeat(size, 1), op="average"), rows.sum(0)[None] / size)
    expect(comm, AllReduce(torch.ones(400, dtype=torch.bool), op="sum"), torch.ones(400, dtype=torch.bool))
    table = torch.arange(3 * size * size).view(3, size, size) + 100 * me
    tables = torch.stack([torch.arange(3 * size * size).view(3, size, size) + 100 * rank for rank in range(size)])
    expect(comm, AllToAll(table.permute(2, 0, 1)), tables[:, :, :, me])
    expect(comm, ReduceScatter(table.permute(2, 0, 1), op="sum"), tables.sum(0)[None, :, :, me])
    expect(comm, AllReduce(table.transpose(0, 2)[:, 1], op="max"), tables[-1].transpose(0, 2)[:, 1])


def many_in_flight(comm: Comm) -> None:
    """64 kB each, several at a time, on two groups, waited for in another order than they were started."""
    grouped = regrouped(comm, [rank % 2 for rank in range(comm.size)])
    length = 2**14

    def part(number: int, rank: int) -> Tensor:
        return torch.arange(length, dtype=torch.float32) % 1000 + number + rank

    for _ in range(3):
        handles = []
        for number in range(4):
            handles.append(grouped.start(AllReduce(part(number, comm.rank), op="max")))
            handles.append(grouped.start(AllGather(part(number, comm.rank), group="node")))
        order = [5, 0, 7, 2, 1, 6, 3, 4]
        results = {place: grouped.wait(handles[place]) for place in order}
        for number in range(4):
            assert torch.equal(results[2 * number], part(number, comm.size - 1))
            for row, rank in zip(results[2 * number + 1], grouped.ranks("node"), strict=True):
                assert torch.equal(row, part(number, rank))


@only(wires=["mpi"], sizes=[2])
def counts_of_large_messages(comm: Comm) -> None:
    """MPI counts to 2^31 - 1: a parameter of 2 GiB has as many elements, not bytes. Nothing is sent here."""
    world, request = mock.Mock(), mock.Mock(**{"Test.return_value": True})
    world.Ibcast.return_value = request
    with mock.patch.dict(comm._communicators, {comm.ranks(): world}):  # type: ignore[attr-defined]
        for dtype in (torch.float32, torch.bfloat16, torch.float64):
            large = torch.empty(2**31 // dtype.itemsize + 1, dtype=dtype)
            comm.wait(comm.start(Broadcast(large)))
            memory, count, kind = world.Ibcast.call_args[0][0]
            assert (count, count * kind.Get_size()) == (large.numel(), memory.nbytes), (count, kind)


def several_connections(comm: Comm) -> None:
    """Where there can be several to each rank, every collective is what it was, cut in pieces or not."""
    spread = regrouped(comm, [0] * comm.size)
    if comm.wire != "torch":
        with pytest.raises(ConfigError, match="for the wire torch"):
            spread.spread(3)
        return
    spread.spread(3)
    all_collectives(spread)
    for length in (2**16 - 1, 2**17, 2**18 + 5):  # in one piece, in two, in three that are not alike
        rows = torch.stack([torch.arange(length, dtype=torch.float32) % 1000 + rank for rank in range(comm.size)])
        started = [
            spread.start(make(rows[comm.rank].clone()))
            for make in (AllGather, AllReduce, lambda tensor: AllReduce(tensor, op="max"), AllGather)
        ]
        for handle, result in zip(started[::-1], (rows, rows[-1], rows.mean(0), rows), strict=True):
            assert torch.equal(spread.wait(handle), result)


def ranks_start_with_different_settings(comm: Comm) -> None:
    for checksums, streams, said in ((comm.rank == 0, 1, r"only rank\(s\) \[0\]"), (True, 1 + comm.rank, r"\[1, 2")):
        joining = regrouped(comm, [0] * comm.size)
        joining.close = lambda: None  # type: ignore[method-assign]  # which would end the wire of all other scenarios
        with pytest.raises(MismatchError, match=said):
            check_alike(joining, checksums, streams)


def ranks_share_a_device(comm: Comm) -> None:
    """NCCL would refuse it at the first bucket: CUDA tensors go by Gloo, unless each rank has a device of its own."""
    if comm.wire != "torch":
        return
    from dgcopt.comm.torch import TorchComm

    for device, by_gloo in (("GPU-1", True), (f"GPU-{comm.rank}", False)):
        properties = types.SimpleNamespace(uuid=device)
        pretended = {"is_available": True, "current_device": 0, "get_device_properties": properties}
        with mock.patch.multiple(torch.cuda, **{name: mock.Mock(return_value=of) for name, of in pretended.items()}):
            made = TorchComm(deadline=comm.deadline)
        assert vars(made)["_backend"] == ("cpu:gloo,cuda:gloo" if by_gloo else None)
        if by_gloo:
            assert torch.distributed.get_backend_config(vars(made)["_groups"][made.ranks()]) == "cpu:gloo,cuda:gloo"
        mine = torch.tensor([float(comm.rank)])
        assert made.run(AllGather(mine)).flatten().tolist() == list(range(comm.size))


def measured_link(comm: Comm) -> dict[str, Any]:
    """Every kind of collective has a fit with time in it, the same on all ranks."""
    found = probe(comm, seconds=0.3)
    assert {kind for kind, group in found.fits if group == "world"} == {*KINDS}
    for (_, group), one in found.fits.items():
        assert one.size == comm.size_of(group) and len(one.sizes) >= 2
        assert one.alpha + one.beta > 0
    mine = torch.tensor([second for one in found.fits.values() for second in one.seconds], dtype=torch.float64)
    rows = comm.run(AllGather(mine, label="measured seconds"))
    assert all(row.equal(mine) for row in rows)
    return {}


def diagnosed(comm: Comm) -> dict[str, Any]:
    """All ranks predict alike from a model's step; ranks that were given different candidates are told so."""
    model = torch.nn.Sequential(torch.nn.Linear(64, 256), torch.nn.Linear(256, 10))
    profile = profile_model(model, [torch.randn(8, 64)])
    if comm.size < 2:
        return {}
    found = diagnose(comm, "toy", profile, names=["BF16()"], seconds=0.3)
    assert {one.name for one in found.predictions} == {"DDP fp32", "DDP bf16", "BF16()"}
    assert found.model.numel == 64 * 256 + 256 + 2560 + 10
    assert all(one.seconds > found.model.seconds > 0 for one in found.predictions)
    mine = torch.tensor([one.seconds for one in sorted(found.predictions, key=lambda one: one.name)])
    assert all(row.equal(mine) for row in comm.run(AllGather(mine, label="predictions")))
    names = ["BF16()"] if comm.rank else ["ByteGrad()"]
    with pytest.raises(MismatchError, match=f"rank {comm.rank}: ranks 0 and 1 were given different candidates"):
        diagnose(comm, "toy", profile, names=names, seconds=0.3)
    return {}


SCRIPT = """
import sys

import torch
from torch.nn.parallel import DistributedDataParallel

import dgcopt

torch.manual_seed(0)
model = torch.nn.Sequential(torch.nn.Linear(64, 256), torch.nn.Linear(256, 10))
optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)
if sys.argv[1] == "DDP":
    run = DistributedDataParallel(model)
else:
    run, optimizer = model, dgcopt.DistributedOptimizer(optimizer, model.named_parameters(), dgcopt.DGC(ratio=0.1))
for _ in range(20):
    optimizer.zero_grad()
    run(torch.randn(8, 64)).square().mean().backward()
    optimizer.step()
"""


def diagnosed_in_script(comm: Comm, method: str = "dgcopt") -> dict[str, Any]:
    """A script of DDP or of DistributedOptimizer takes some steps, and all ranks predict alike before it ends."""
    if comm.size < 2:
        return {}
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "script.py")
        path.write_text(SCRIPT)
        found = run_script(
            *(path, [method], lambda profile, device: diagnose(comm, "toy", profile, names=["BF16()"], seconds=0.2))
        )
    assert found.model.numel == 64 * 256 + 256 + 2560 + 10
    mine = torch.tensor([one.seconds for one in sorted(found.predictions, key=lambda one: one.name)])
    assert all(row.equal(mine) for row in comm.run(AllGather(mine, label="predictions")))
    return {}


def chosen(comm: Comm) -> dict[str, Any]:
    """All ranks choose alike and at the same step, and replicas stay equal through the changes."""
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(32, 64), torch.nn.Linear(64, 10))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(forecast, "PROBE_SECONDS", 0.1)
        optimizer: Any = dgcopt.DistributedOptimizer(
            torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9),
            model.named_parameters(),
            dgcopt.Auto(allow=("exact", "rounded", "sparse")),
            comm=comm,
        )
        used: list[str] = []
        # 66 steps, and as many again each time that the link seems to have changed
        while len(used) < 100 or (" uses " not in optimizer.compressor.reason and comm.size > 1 and len(used) < 300):
            step = len(used)
            optimizer.zero_grad()
            model(torch.full((4, 32), 0.01 * (step + comm.rank))).square().mean().backward()
            optimizer.step()
            used.append(optimizer.compressor.choice.name)
    if comm.size > 1:
        assert " uses " in optimizer.compressor.reason, optimizer.compressor.reason
        assert used[-1] in optimizer.compressor.reason
    codes = torch.tensor([zlib.crc32(name.encode()) for name in used])
    assert all(row.equal(codes) for row in comm.run(AllGather(codes, label="choices")))
    dgcopt.check_replicas(model.state_dict(), comm=comm)
    return {}


SCENARIOS = {
    f"collectives: {function.__name__}": function
    for function in (
        *(real_machines, even_machines, uneven_machines, odd_shapes, many_in_flight, several_connections),
        ranks_start_with_different_settings,
        ranks_share_a_device,
        measured_link,
        chosen,
        counts_of_large_messages,
    )
}

DIAGNOSED = {f"collectives: {function.__name__}": function for function in (diagnosed, diagnosed_in_script)}
"""Decisions from the measured link, which all ranks make alike."""
