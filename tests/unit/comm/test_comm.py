"""Joining, and the simulated wire; the other wires are in tests/distributed."""

import subprocess
import sys
import types
from pathlib import Path

import pytest
import torch

import dgcopt
from dgcopt.collectives import AllGather, AllReduce, AllToAll, Barrier, Broadcast, ReduceScatter, SendRecv, reduce_rows
from dgcopt.comm import LocalComm, launch
from dgcopt.comm.launch import _detect, slurm_meeting_place
from dgcopt.comm.torch import Works
from dgcopt.errors import CommError, ConfigError, TimeoutExceeded
from dgcopt.gradients.synchronised import synchronised
from tests.support.worlds import Ranks

TORCHRUN = {"RANK": "0", "WORLD_SIZE": "2", "MASTER_ADDR": "a", "MASTER_PORT": "1"}


@pytest.mark.parametrize(
    ("env", "wire"),
    [
        ({}, "local"),
        ({"DGCOPT_WIRE": "mpi", "HOROVOD_RANK": "0"}, "mpi"),
        ({"HOROVOD_RANK": "1", "HOROVOD_SIZE": "2"}, "horovod"),
        ({"OMPI_COMM_WORLD_SIZE": "2", "OMPI_MCA_pml": "ob1", "OMPI_MCA_btl": "^openib"}, "horovod"),
        ({"OMPI_COMM_WORLD_SIZE": "2", "SLURM_PROCID": "0", "SLURM_NTASKS": "2"}, "mpi"),
        (TORCHRUN, "torch"),
        ({"SLURM_PROCID": "0", "SLURM_STEP_NUM_TASKS": "4"}, "torch"),
        ({"SLURM_PROCID": "0", "SLURM_NTASKS": "4"}, "local"),  # a batch script, in which no srun was called
        ({"PMI_SIZE": "2"}, "mpi"),
        ({"MV2_COMM_WORLD_SIZE": "2"}, "mpi"),
        # mpirun of MPICH or Intel MPI, whose daemons srun has started, or in a shell that srun has started
        ({"PMI_SIZE": "4", "SLURM_PROCID": "0", "SLURM_STEP_NUM_TASKS": "2"}, "mpi"),
        ({"PMI_SIZE": "4", "SLURM_PROCID": "0", "SLURM_STEP_NUM_TASKS": "4"}, "torch"),  # srun --mpi=pmi2
        # mpirun starts one torchrun on each machine
        ({"OMPI_COMM_WORLD_SIZE": "2", "TORCHELASTIC_RUN_ID": "none"} | TORCHRUN, "torch"),
    ],
)
def test_every_launcher_is_recognised(env, wire):
    chosen, reason = _detect(env)
    assert chosen == wire and reason


def test_half_an_environment_is_refused():
    with pytest.raises(ConfigError, match="WORLD_SIZE, MASTER_ADDR, MASTER_PORT is missing"):
        _detect({"RANK": "0"})


def test_horovods_rank_without_a_size_is_refused(monkeypatch):
    """Horovod would take it for the only rank."""
    monkeypatch.setenv("HOROVOD_RANK", "1")
    monkeypatch.delenv("HOROVOD_SIZE", raising=False)
    with pytest.raises(ConfigError, match="HOROVOD_SIZE is missing beside HOROVOD_RANK: start with horovodrun"):
        dgcopt.init()


def test_a_wire_without_a_launcher_is_refused(monkeypatch):
    for name in (*LAUNCHERS, "RANK", "MASTER_ADDR", "MASTER_PORT", "SLURM_PROCID"):
        monkeypatch.delenv(name, raising=False)
    with pytest.raises(ConfigError, match="RANK, WORLD_SIZE, MASTER_ADDR, MASTER_PORT is missing: start with torchrun"):
        dgcopt.init("torch")


def test_srun_meeting_place():
    assert (
        slurm_meeting_place({"SLURM_STEP_NODELIST": "node[003-007,9]", "SLURM_JOB_ID": "12"}) == "tcp://node003:20372"
    )
    assert slurm_meeting_place({"SLURM_NODELIST": "a1,b2", "MASTER_PORT": "99"}) == "tcp://a1:99"
    assert slurm_meeting_place({"SLURM_NODELIST": "r[02-03]n[7,9]x,b2", "MASTER_PORT": "99"}) == "tcp://r02n7x:99"
    assert slurm_meeting_place({"MASTER_ADDR": "fe80::1", "MASTER_PORT": "99"}) == "tcp://[fe80::1]:99"
    with pytest.raises(ConfigError, match="MASTER_ADDR"):
        slurm_meeting_place({})


def test_import_needs_torch_alone():
    """No optional library is imported, no network joined, no rank taken."""
    code = (
        "import sys, dgcopt, torch.distributed as d;"
        "optional = ('horovod', 'mpi4py', 'sklearn', 'jsonargparse', 'matplotlib', 'tensorboard', 'torchvision');"
        "assert not set(optional) & set(sys.modules);"
        "assert not d.is_initialized() and dgcopt.comm.launch._current is None"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=120)


def test_everything_works_without_numpy():
    """Torch does not need it, so neither do digests, checksums and what else looks at bytes."""
    code = (
        "import sys; sys.modules['numpy'] = None\n"
        "import torch, dgcopt\n"
        "comms = dgcopt.simulated_world(2, checksums=True)\n"
        "models = [torch.nn.Linear(3, 2) for _ in comms]\n"
        "models[1].load_state_dict(models[0].state_dict())\n"
        "optimizers = [dgcopt.DistributedOptimizer(torch.optim.SGD(m.parameters(), 0.1, momentum=0.9),\n"
        "    m.named_parameters(), dgcopt.DGC(0.5, values='int8', indices='rice', vectors='int4'), comm=c,\n"
        "    check_replicas_every=1) for m, c in zip(models, comms)]\n"
        "for _ in range(3):\n"
        "    for o, m in zip(optimizers, models): o.zero_grad(); m(torch.randn(4, 3)).sum().backward()\n"
        "    for o in optimizers: o.step()\n"
    )
    subprocess.run([sys.executable, "-W", "ignore", "-c", code], check=True, timeout=120)


def test_init_is_local_without_a_launcher_and_stays(monkeypatch):
    for name in ("RANK", "WORLD_SIZE", "DGCOPT_WIRE", "OMPI_COMM_WORLD_SIZE", "HOROVOD_RANK"):
        monkeypatch.delenv(name, raising=False)
    try:
        comm = dgcopt.init()
        assert (comm.wire, comm.rank, comm.size, comm.local_rank, comm.nodes) == ("local", 0, 1, 0, 1)
        assert dgcopt.init("local") is comm
        with pytest.raises(ConfigError, match="joined without"):
            dgcopt.init(checksums=True)
        with pytest.raises(ConfigError, match="joined with 1"):
            dgcopt.init(streams=2)
        dgcopt.shutdown()
        with pytest.raises(ConfigError, match="streams"):
            dgcopt.init(streams=0)
        assert dgcopt.init(streams=2).size == 1
        dgcopt.shutdown()
        assert not comm.checksums and dgcopt.init(checksums=True).checksums and dgcopt.init().checksums
        with pytest.raises(ConfigError, match="already joined"):
            dgcopt.init("mpi")
    finally:
        dgcopt.shutdown()
    with pytest.raises(ConfigError, match="torch, horovod, mpi, local"):
        dgcopt.init("pigeon")


LAUNCHERS = tuple(launch.SIZES)


@pytest.fixture
def joins(monkeypatch):
    """A function that joins in an environment without launchers but for some variables; every wire finds one rank."""
    for wire in ("torch", "horovod", "mpi"):
        monkeypatch.setitem(launch._makers, wire, LocalComm)
    for name in (*LAUNCHERS, "RANK", "DGCOPT_WIRE", "HOROVOD_RANK", "PMIX_RANK", "SLURM_PROCID", "SLURM_NTASKS"):
        monkeypatch.delenv(name, raising=False)

    def join(wire, **env):
        with monkeypatch.context() as patched:
            for name, value in env.items():
                patched.setenv(name, value)
            return dgcopt.init(wire)

    yield join
    dgcopt.shutdown()


@pytest.mark.parametrize("wire", [None, "torch", "horovod", "mpi"])
@pytest.mark.parametrize("name", LAUNCHERS)
def test_a_launcher_that_announces_more_ranks_than_joined(joins, wire, name):
    there = {"RANK": "0", "MASTER_ADDR": "a", "MASTER_PORT": "1"} if name == "WORLD_SIZE" else {"SLURM_PROCID": "0"}
    with pytest.raises(ConfigError, match=rf"only 1 of 3 ranks joined \({name}=3\): .*unset {name}.*DGCOPT_WIRE=local"):
        joins(wire, **there, **{name: "3"})
    assert launch._current is None
    for value in ("x", "0", "-1", "", "2.0", "\u0662"):
        with pytest.raises(
            ConfigError, match=rf"variable {name} is {value!r}, and must be a whole number of at least 1"
        ):
            joins(wire, **there, **{name: value})
    assert joins(wire, **there, **{name: "1"}).size == 1


def test_alone_on_purpose(joins):
    """On the wire "local", in a shell of an allocation, and on a comm that is given."""
    many = dict.fromkeys(LAUNCHERS, "3")
    optimizer = torch.optim.SGD(torch.nn.Linear(1, 1).parameters(), 0.1)
    assert joins("local", **many).wire == "local"
    steps = synchronised(dgcopt.DistributedOptimizer(optimizer, comm=LocalComm()))
    assert steps is not None and steps.comm.wire == "local"
    dgcopt.shutdown()
    assert joins(None, DGCOPT_WIRE="local", **many).wire == "local"
    dgcopt.shutdown()
    assert joins(None, SLURM_NTASKS="3", SLURM_JOB_ID="7", SLURM_PROCID="0").wire == "local"
    dgcopt.shutdown()
    assert joins(None, SLURM_NTASKS="3", SLURM_STEP_NUM_TASKS="1", SLURM_PROCID="0").size == 1  # salloc's own step
    dgcopt.shutdown()
    assert joins(None, SLURM_STEP_NUM_TASKS="3").wire == "local"
    dgcopt.shutdown()
    daemon = {"SLURM_STEP_NUM_TASKS": "3", "SLURM_PROCID": "0"}  # of mpirun, on one of three machines
    assert joins("mpi", OMPI_COMM_WORLD_SIZE="1", **daemon).size == 1


@pytest.mark.parametrize(
    ("env", "words"),
    [
        ({"RANK": "abc"}, "RANK is 'abc', and must be a whole number from 0 to 1"),
        ({"RANK": "2"}, "RANK is '2', and must be a whole number from 0 to 1"),
        ({"WORLD_SIZE": "abc"}, "WORLD_SIZE is 'abc', and must be a whole number of at least 1"),
        ({"MASTER_PORT": "65536"}, "MASTER_PORT is '65536', and must be a whole number from 0 to 65535"),
        ({"LOCAL_RANK": "one"}, "LOCAL_RANK is 'one', and must be a whole number of at least 0"),
        ({"RANK": None, "SLURM_PROCID": "x"}, "SLURM_PROCID is 'x', and must be a whole number from 0 to 1"),
        ({"RANK": None, "SLURM_JOB_ID": "7x"}, "SLURM_JOB_ID is '7x', and must be a whole number of at least 0"),
        ({"DGCOPT_WIRE": "pigeon"}, r"unknown wire 'pigeon' \(DGCOPT_WIRE\); the wires are torch, horovod, mpi, local"),
        ({"DGCOPT_WIRE": "horovod", "HOROVOD_RANK": "-1", "HOROVOD_SIZE": "2"}, "HOROVOD_RANK is '-1', and must be"),
    ],
)
def test_variables_that_are_no_numbers(monkeypatch, env, words):
    """Before anything is joined: the ranks are told, not the library."""
    rank = {"RANK": "0", "WORLD_SIZE": "2", "MASTER_ADDR": "localhost", "MASTER_PORT": "1", "LOCAL_RANK": "0"}
    slurm = {"SLURM_PROCID": "0", "SLURM_STEP_NUM_TASKS": "2", "SLURM_NODELIST": "a", "SLURM_JOB_ID": "7"}
    for name, value in ((slurm if env.get("RANK", "") is None else rank) | env).items():
        if value is None:
            monkeypatch.delenv(name, raising=False)
        else:
            monkeypatch.setenv(name, value)
    if env.get("RANK", "") is None:
        monkeypatch.delenv("WORLD_SIZE", raising=False)
        monkeypatch.delenv("MASTER_PORT", raising=False)
    with pytest.raises(ConfigError, match=words):
        dgcopt.init()
    assert not torch.distributed.is_initialized()


@pytest.mark.skipif(not Path("/proc/self/fd").exists(), reason="counts the files of this process")
def test_a_closed_wire_keeps_no_files_open(tmp_path):
    dgcopt.shutdown()
    torch.distributed.init_process_group("gloo", init_method=f"file://{tmp_path}/store", rank=0, world_size=1)
    try:
        counts = []
        for _ in range(2):
            counts.append(len([*Path("/proc/self/fd").iterdir()]))
            comm = dgcopt.init()
            dgcopt.shutdown()
        assert counts[0] == counts[1] == len([*Path("/proc/self/fd").iterdir()]), f"while {comm} is referenced"
    finally:
        torch.distributed.destroy_process_group()


def test_a_script_that_ends_its_process_groups_and_makes_new_ones(tmp_path):
    """The next optimizer joins the new ones; torch's "Group is not registered" was the error of the old ones."""
    comms = []
    for number in range(3):
        torch.distributed.init_process_group("gloo", init_method=f"file://{tmp_path}/{number}", rank=0, world_size=1)
        try:
            comms.append(dgcopt.init())
            assert [comm.has_ended() for comm in comms] == [True] * number + [False]
            assert dgcopt.comm.current_comm() is comms[-1]
        finally:
            torch.distributed.destroy_process_group()
    assert comms[-1].has_ended()


@pytest.mark.parametrize(("size", "nodes"), [(1, 1), (2, 1), (6, 2), (4, 4), (6, 3)])
def test_every_collective_of_every_group(size, nodes):
    comms = dgcopt.simulated_world(size, nodes)
    for group in ("world", "node", "across", "control", "agreement"):
        ranks = [comm.ranks(group) for comm in comms]
        k = len(ranks[0])
        inputs = [torch.arange(4.0 * k) + 10 * rank for rank in range(size)]
        rows = [torch.stack([inputs[r] for r in ranks[rank]]) for rank in range(size)]
        place = [ranks[rank].index(rank) for rank in range(size)]

        def run(make, comms=comms, inputs=inputs, place=place):
            handles = [c.start(make(x.clone(), p)) for c, x, p in zip(comms, inputs, place, strict=True)]
            return [c.wait(handle) for c, handle in zip(comms, handles, strict=True)]

        for op in ("average", "sum", "min", "max"):
            reduced = run(lambda x, p, op=op, group=group: AllReduce(x, op=op, group=group))
            scattered = run(lambda x, p, op=op, group=group: ReduceScatter(x, op=op, group=group))
            for rank in range(size):
                assert torch.equal(reduced[rank], reduce_rows(rows[rank], op))
                assert torch.equal(scattered[rank], reduce_rows(rows[rank], op).view(k, 4)[place[rank]])
        gathered = run(lambda x, p, group=group: AllGather(x, group=group))
        swapped = run(lambda x, p, group=group, k=k: AllToAll(x.view(k, 4), group=group))
        spread = run(lambda x, p, group=group, k=k: Broadcast(x, root=k - 1, group=group))
        passed = run(lambda x, p, group=group, k=k: SendRecv(x, to=(p + 1) % k, source=(p - 1) % k, group=group))
        run(lambda x, p, group=group: Barrier(group=group))
        for rank in range(size):
            assert torch.equal(gathered[rank], rows[rank])
            assert torch.equal(swapped[rank], rows[rank].view(k, k, 4)[:, place[rank]])
            assert torch.equal(spread[rank], rows[rank][-1])
            assert torch.equal(passed[rank], rows[rank][place[rank] - 1])


def test_control_collectives_are_in_no_order_with_others():
    """Every rank casts its votes at another point between the same exchanges of the world."""
    size = 4
    comms = dgcopt.simulated_world(size, nodes=2)
    assert all(comm.ranks("control") == (0, 1, 2, 3) and comm.size_of("control") == 4 for comm in comms)
    votes, sums = [[] for _ in comms], [[] for _ in comms]
    for rank, comm in enumerate(comms):
        for turn in range(2 * size):
            if turn in (rank, rank + 1):
                votes[rank].append(comm.start(AllGather(torch.tensor([10 * rank + turn - rank]), group="control")))
            if turn < size:
                sums[rank].append(comm.start(AllReduce(torch.tensor([float(turn)]), op="sum")))
    for number in range(2):
        expected = [[10 * rank + number] for rank in range(size)]
        assert all(comm.wait(mine[number]).tolist() == expected for comm, mine in zip(comms, votes, strict=True))
    assert [float(comms[1].wait(handle)) for handle in sums[1]] == [0, 4, 8, 12]


def test_a_vote_is_awaited_while_the_world_is_behind():
    comms = dgcopt.simulated_world(2)
    behind = comms[0].start(AllReduce(torch.ones(1), op="sum"))
    started = [comm.start(AllReduce(torch.tensor([comm.rank]), op="max", group="control")) for comm in comms]
    assert [int(comm.wait(handle)) for comm, handle in zip(comms, started, strict=True)] == [1, 1]
    assert not behind.done()
    comms[1].start(AllReduce(torch.ones(1), op="sum"))
    assert float(comms[0].wait(behind)) == 2


def test_an_error_of_a_rank_on_which_another_waits_is_raised_unchanged():
    comms = dgcopt.simulated_world(2)

    def fails():
        raise ZeroDivisionError("in rank 1's compressor")

    comms[1].attend(fails)
    with pytest.raises(ZeroDivisionError, match="rank 1's compressor"):
        comms[0].run(AllReduce(torch.ones(1)))


def test_a_missing_rank_may_wait_for_one_that_is_behind_elsewhere():
    """Rank 0 waits for rank 1's vote, and rank 1 for a sum that rank 2 starts after its own vote."""
    comms = dgcopt.simulated_world(3)
    mine = comms[0].start(AllGather(torch.tensor([0]), group="control"))
    comms[2].start(AllGather(torch.tensor([2]), group="control"))
    sums = [comms[rank].start(AllReduce(torch.ones(1), op="sum")) for rank in (0, 1)]
    late, vote = [], []

    def of_rank_1():
        if sums[1].done() and not vote:
            vote.append(comms[1].start(AllGather(torch.tensor([1]), group="control")))

    def of_rank_2():
        if not late:
            late.append(comms[2].start(AllReduce(torch.ones(1), op="sum")))

    comms[1].attend(of_rank_1)
    comms[2].attend(of_rank_2)
    assert comms[0].wait(mine).tolist() == [[0], [1], [2]]


def test_failures_of_horovod_are_horovods_own_too():
    """`hvd.elastic.run` starts anew after a HorovodInternalError, and after no other exception."""
    exceptions = pytest.importorskip("horovod.common.exceptions")
    from dgcopt.comm.horovod import HorovodComm

    for kind in (CommError, TimeoutExceeded):
        error = HorovodComm._error(None, kind, "rank 0 waited")
        assert isinstance(error, kind) and isinstance(error, exceptions.HorovodInternalError)
        assert (type(error).__name__, str(error)) == (kind.__name__, "rank 0 waited")


def test_groups_of_some_ranks_are_refused_where_they_would_abort_all():
    pytest.importorskip("horovod")
    from dgcopt.comm.horovod import HorovodComm

    comm = object.__new__(HorovodComm)
    comm.rank, comm.size, comm._hvd, comm.elastic = 0, 3, types.SimpleNamespace(size=lambda: 3), True
    with pytest.raises(ConfigError, match="no group of some ranks under Horovod Elastic"):
        comm.among([0, 1])
    for group in ("node", "across"):
        with pytest.raises(ConfigError, match=f"only the group of all ranks, not '{group}'"):
            comm.run(AllReduce(torch.ones(1), group=group))


def test_emulated_collectives_equal_the_real_ones():
    """What a library lacks is said in terms of what it has, at the same cost in bytes."""
    for size, numel in ((2, 8), (3, 12), (4, 20), (3, 10)):
        comms = dgcopt.simulated_world(size)
        inputs = [torch.randn(numel).bfloat16() for _ in range(size)]
        make = [lambda x: AllReduce(x.clone(), op="average")]
        if numel % size == 0:
            make.append(lambda x: ReduceScatter(x.clone(), op="sum"))
        for build in make:
            direct = [comm.start(build(x)) for comm, x in zip(comms, inputs, strict=True)]
            expected = [comm.wait(handle) for comm, handle in zip(comms, direct, strict=True)]
            emulated = dgcopt.simulate([comm.emulate(build(x)) for comm, x in zip(comms, inputs, strict=True)], comms)
            for ours, theirs in zip(emulated, expected, strict=True):
                assert torch.equal(ours, theirs)


def test_a_thousand_ranks():
    def mean_of_ranks(rank):
        total = yield AllReduce(torch.tensor([float(rank)]), op="sum")
        rows = yield AllGather(torch.tensor([rank]))
        return total / len(rows)

    results = dgcopt.simulate([mean_of_ranks(rank) for rank in range(1024)])
    assert len(results) == 1024 and all(float(r) == 511.5 for r in results)


def test_a_local_comm_answers_by_itself():
    comm = LocalComm()
    x = torch.arange(4.0)
    assert torch.equal(comm.run(AllGather(x.clone(), group="control")), x[None])
    assert torch.equal(comm.run(AllReduce(x.clone())), x)
    assert torch.equal(comm.run(AllGather(x.clone())), x[None])
    with pytest.raises(ConfigError, match="deadline"):
        LocalComm(deadline=-1)


def test_rounds_of_all_buckets_are_in_flight_together():
    """Round one of every bucket starts before round two of any, in bucket order, on every rank."""

    class TwoRounds(dgcopt.Compressor):
        def exchange(self, grad, ctx):
            total = yield AllReduce(grad, op="sum")
            return (yield AllReduce(total / ctx.size, op="max"))

    started = []
    ranks = Ranks(
        2, lambda p: torch.optim.SGD(p, lr=0.1), compression=TwoRounds(), bucket_mb=0.001, first_bucket_mb=0.001
    )
    comm = ranks.comms[0]
    start = comm.start

    def watched(collective):
        if collective.group == "world":  # not the vote
            started.append(collective.label)
        return start(collective)

    comm.start = watched
    ranks.step(0)
    started.clear()
    for optimizer in ranks.optimizers:
        optimizer.zero_grad()
    ranks.backward(1)
    in_backward = list(started)
    assert len(in_backward) == 2 and all(label.endswith("round 0") for label in in_backward)
    for optimizer in ranks.optimizers:
        optimizer.step()
    buckets = [label.split(" round")[0] for label in in_backward]
    assert [label.split(" round")[0] for label in started] == buckets * 2
    assert [label[-1] for label in started] == ["0"] * len(buckets) + ["1"] * len(buckets)
    assert [label.split()[3] for label in in_backward] == [str(i) for i in range(len(buckets))]


def test_ranks_that_machines_share_out_in_any_order():
    class Machines(LocalComm):
        def __init__(self, rank):
            super().__init__()
            self._set_ranks(rank, 4)
            self._set_nodes([0, 1, 1, 0])

    ranks = [Machines(rank) for rank in range(4)]
    assert [rank.local_rank for rank in ranks] == [0, 0, 1, 1]
    assert [rank.cross_rank for rank in ranks] == [0, 1, 0, 1], "in the order of ranks, not of machines"


def test_works_of_one_collective_share_its_deadline(monkeypatch):
    limits, now = [], [0.0]
    monkeypatch.setattr("dgcopt.comm.torch.time.monotonic", lambda: now[0])

    class Late:
        def wait(self, limit):
            limits.append(limit.total_seconds())
            now[0] += 0.02

    Works(Barrier(), [Late() for _ in range(3)], torch.zeros(1), 1, False).wait(0.03)
    assert limits == [0.03, 0.01, 0.001], "Gloo takes 0 for no limit"


def test_a_wait_after_a_failed_one_fails_too():
    """The memory of a sum that has not arrived is no result."""

    class Late:
        def wait(self, limit):
            raise RuntimeError("timed out")

        def is_completed(self):
            return False

    works = Works(Barrier(), [Late()], torch.zeros(1), 1, False)
    for _ in range(2):
        with pytest.raises(RuntimeError, match="timed out"):
            works.wait(0.01)
        assert not works.done()


def test_survival_cannot_be_asked_for_later(joins):
    joins("torch")
    launch._current.wire = "torch"
    with pytest.raises(ConfigError, match=r"survive=True.*joined without"):
        dgcopt.init(survive=True)


def test_lazy_conjugates_and_negations_are_sent_as_they_read():
    """A wire sends the memory, in which they have not happened."""
    wave = torch.tensor([1 + 2j, 3j])
    for lazy in (wave.conj(), wave.conj().imag, torch.tensor(2j).conj().imag):
        sent = AllGather(lazy)
        dgcopt.simulated_world(2)[0].start(sent)
        assert not sent.tensor.is_conj() and not sent.tensor.is_neg() and torch.equal(sent.tensor, lazy)


def test_simulated_ranks_that_name_other_roots():
    comms = dgcopt.simulated_world(2)
    comms[0].start(Broadcast(torch.zeros(2), root=0))
    with pytest.raises(dgcopt.MismatchError, match="rank 1 and rank 0 name different roots of Broadcast"):
        comms[1].start(Broadcast(torch.zeros(2), root=1))


def test_a_wire_that_cannot_be_joined_again_at_once_keeps_its_settings(joins, monkeypatch):
    joins("torch")
    dgcopt.shutdown()
    before = dgcopt.init("torch", deadline=7.0, checksums=True)
    before.close()

    def fail(deadline):
        raise CommError("not all ranks came")

    with monkeypatch.context() as patched:
        before.wire = "torch"
        patched.setitem(launch._makers, "torch", fail)
        with pytest.raises(CommError, match="not all ranks came"):
            dgcopt.init()
    again = dgcopt.init()
    assert again is not before and (again.deadline, again.checksums) == (7.0, True)
