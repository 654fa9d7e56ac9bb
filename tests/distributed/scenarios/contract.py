"""What scripts written for Horovod count on: its names, its functions on our optimizer, and its process sets."""

from __future__ import annotations

import functools
import math
import re
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import dgcopt
import dgcopt.hvd as hvd
from dgcopt import Comm
from dgcopt.collectives import AllGather
from dgcopt.errors import ConfigError, MismatchError
from tests.support.wires import only

from .optimizers import STEPS, Branches, recipe_of
from .training import (
    TINY,
    Recipe,
    Replica,
    assert_close,
    assert_same_on_all_ranks,
    batch,
    make_model,
    tensors_in,
    train,
)

SGD = functools.partial(recipe_of, torch.optim.SGD)


def horovods() -> Any:
    """Horovod's own module, which says nothing of its types."""
    import horovod.torch

    return horovod.torch


def names(comm: Comm) -> None:
    """Each of Horovod's names, on tensors that differ from rank to rank."""
    hvd.init()
    size, me = comm.size, comm.rank
    assert hvd.is_initialized() and (hvd.rank(), hvd.size()) == (me, size)
    assert (hvd.local_rank(), hvd.local_size()) == (comm.local_rank, comm.local_size)
    assert (hvd.cross_rank(), hvd.cross_size()) == (comm.node, comm.nodes)
    for dtype in (torch.float32, torch.int64, torch.bfloat16):
        for shape in ((), (3,), (2, 3)):
            mine = torch.full(shape, 2 * me, dtype=dtype)
            total = size * (size - 1)
            ops = {hvd.Average: total // size, hvd.Sum: total, hvd.Min: 0, hvd.Max: 2 * size - 2, None: total // size}
            for op, value in ops.items():
                assert torch.equal(hvd.allreduce(mine, op=op, name="x"), torch.full(shape, value, dtype=dtype))
            assert torch.equal(mine, torch.full(shape, 2 * me, dtype=dtype))
            assert hvd.allreduce_(mine, average=False) is mine and torch.equal(mine, torch.full_like(mine, total))
            assert torch.equal(hvd.broadcast(torch.full_like(mine, me), size - 1), torch.full_like(mine, size - 1))
    whole = torch.full((2 * size,), me)  # of which the mean is not; Horovod rounds once, after it has multiplied
    for scaled in (
        hvd.allreduce(whole, postscale_factor=2),
        hvd.allreduce_(whole.clone(), op=hvd.Average, postscale_factor=2),
        hvd.reducescatter(whole, postscale_factor=2),
    ):
        assert scaled.unique().tolist() == [size - 1], scaled
    for refused in (hvd.allreduce, hvd.reducescatter):
        with pytest.raises(ConfigError, match="no average of bool"):
            refused(torch.ones(size, dtype=torch.bool))
    turned = torch.full((2, 3), float(me)).T
    assert hvd.broadcast_(turned, 0) is turned and torch.equal(turned, torch.zeros(3, 2))
    assert hvd.allgather_object({"rank": me, "text": "x" * me}) == [{"rank": r, "text": "x" * r} for r in range(size)]
    assert hvd.broadcast_object([me], size - 1) == [size - 1]
    weights = [torch.full((2,), float(me)), torch.full((1,), float(me))]
    hvd.broadcast_parameters(weights, root_rank=size - 1)
    assert torch.cat(weights).tolist() == [size - 1] * 3
    with torch.inference_mode():
        weights[0] += me
        hvd.broadcast_parameters(weights, root_rank=size - 1)
        assert weights[0].tolist() == [2 * size - 2] * 2
        assert hvd.allgather(torch.tensor(me)).tolist() == hvd.alltoall(torch.arange(size) * 0 + me).tolist()
        assert (
            hvd.reducescatter(torch.ones(size), op=hvd.Sum).tolist()
            == hvd.allreduce(torch.ones(1), op=hvd.Sum).tolist()
        )
    hvd.barrier()


def gathering(comm: Comm) -> None:
    """Ranks have other numbers of rows, none on rank 0; rows that differ in anything else are refused on all ranks."""
    hvd.init()
    size, me = comm.size, comm.rank
    for dtype in (torch.float32, torch.int64, torch.bool):
        gathered = hvd.allgather(torch.full((me, 2, 3), me, dtype=dtype), name="rows")
        expected = torch.cat([torch.full((rank, 2, 3), rank, dtype=dtype) for rank in range(size)])
        assert gathered.dtype == dtype and torch.equal(gathered, expected)
    assert hvd.allgather(torch.tensor(me)).tolist() == list(range(size))
    assert hvd.allgather(torch.ones(0, 2)).shape == (0, 2) and hvd.allgather(torch.ones(1, 0)).shape == (size, 0)
    last = me == size - 1
    for odd in (torch.ones(2, 3, 2 if last else 3), torch.ones(2, dtype=torch.float64 if last else torch.float32)):
        try:
            hvd.allgather(odd)
        except MismatchError as error:
            assert f"rank {size - 1} has [hvd.allgather" in str(error), error
        else:
            raise AssertionError("ranks gathered what does not fit together")


def handles(comm: Comm) -> None:
    """Several collectives on their way at once; results are fetched in another order on every rank."""
    hvd.init()
    size, me = comm.size, comm.rank
    mine, total = torch.full((4,), float(me + 1)), size * (size + 1) / 2
    again = mine.clone()
    started = {
        "sum": hvd.allreduce_async(mine, op=hvd.Sum, postscale_factor=0.5),
        "product": hvd.allreduce_async(mine, op=hvd.Product),
        "in place": hvd.allreduce_async_(again, average=False),
        "rows": hvd.allgather_async(mine[:me]),
        "last": hvd.broadcast_async(mine, size - 1),
        "several": hvd.grouped_allreduce_async([mine, mine.long()], op=hvd.Sum),
        "parts": hvd.reducescatter_async(torch.arange(size + 1.0), op=hvd.Sum),
    }
    sparse = hvd.sparse_allreduce_async(torch.sparse_coo_tensor([[0]], [float(me)], (2,)), "sparse", hvd.Sum)
    names = list(started)
    results = {name: hvd.synchronize(started[name]) for name in names[me % len(names) :] + names[: me % len(names)]}
    assert results["sum"].tolist() == [total / 2] * 4 and results["product"].tolist() == [math.factorial(size)] * 4
    assert results["in place"] is again and again.tolist() == [total] * 4
    assert results["rows"].tolist() == [1.0 + rank for rank in range(size) for _ in range(min(rank, 4))]
    assert results["last"].tolist() == [size] * 4
    assert [(t.dtype, t.tolist()) for t in results["several"]] == [(t.dtype, [total] * 4) for t in (mine, mine.long())]
    # rank 0 has a row more than the others
    assert results["parts"].tolist() == ([0, size] if me == 0 else [(me + 1) * size])
    assert sparse().to_dense().tolist() == [size * (size - 1) / 2, 0] and all(map(hvd.poll, started.values()))


def lists_of_other_lengths(comm: Comm) -> None:
    """The next collective, of the same shape, is not taken for the tensor that one rank lacks."""
    hvd.init()
    last = comm.rank == comm.size - 1
    operations = [hvd.grouped_allreduce, hvd.grouped_allgather, hvd.grouped_reducescatter]
    operations += [hvd.grouped_allreduce_] if comm.wire != "horovod" else []  # which compares by itself
    for grouped in operations:
        with pytest.raises(MismatchError, match=r"of [23] tensors"):
            grouped([torch.ones(comm.size)] * (3 if last else 2))
        assert hvd.allreduce(torch.ones(comm.size), op=hvd.Sum).tolist() == [comm.size] * comm.size
        assert len(grouped([torch.ones(comm.size)] * 2)) == 2 and grouped([]) == []
    scaled = hvd.allreduce(torch.ones(2), op=hvd.Sum, prescale_factor=3 if last else 3.0, postscale_factor=0.5)
    assert scaled.tolist() == [1.5 * comm.size] * 2


def one_name_twice(comm: Comm) -> None:
    """Over Horovod, which matches by name, it is refused where it is: a restart by hvd.elastic would not help."""
    hvd.init()
    if comm.wire != "horovod":
        return
    if comm.rank:
        hvd.barrier()
    handle = hvd.allreduce_async(torch.ones(3), name="same")
    if not comm.rank:
        try:
            hvd.allreduce_async(torch.ones(3), name="same")
            raise AssertionError("two of one name were under way")
        except ValueError as error:
            assert not isinstance(error, hvd.HorovodInternalError) and "another of the same name" in str(error), error
        hvd.barrier()
    assert hvd.synchronize(handle).tolist() == [1, 1, 1]


def rows_to_others(comm: Comm) -> None:
    """Rank s sends s + r rows to rank r. Splits that fit nothing on one rank are refused on all."""
    hvd.init()
    size, me = comm.size, comm.rank
    splits = [me + rank for rank in range(size)]
    for dtype in (torch.float32, torch.int64):
        rows = torch.full((sum(splits), 2), me, dtype=dtype)
        received, counts = hvd.alltoall(rows, torch.tensor(splits), name="rows")
        assert counts.tolist() == splits and received.dtype == dtype
        assert received[:, 1].tolist() == [rank for rank in range(size) for _ in range(rank + me)]
    rows = torch.arange(size)
    with torch.device("meta"):  # a default device is not followed
        assert hvd.alltoall(rows).tolist() == [me] * size
        hvd.barrier()
    for splits in ([1] * size if me else [0] * size), [1] * (size + 1):
        with pytest.raises(ConfigError, match=rf"rank {me} has {size} row\(s\) and splits {re.escape(str(splits))}"):
            hvd.alltoall(torch.ones(size), splits)


def gradients_flow_through(comm: Comm) -> None:
    """What Horovod gives back: reductions are reduced again, rows return to where they came from."""
    hvd.init()
    size, me = comm.size, comm.rank
    weights = torch.arange(1.0, size + 1)  # rank r multiplies what it gets by r + 1

    def back(collective: Callable[[Tensor], Tensor], length: int = size) -> list[float]:
        mine = torch.ones(length, requires_grad=True)
        (collective(mine).sum() * (me + 1)).backward()
        assert mine.grad is not None
        return mine.grad.tolist()

    mean, total = float(weights.mean()), float(weights.sum())
    assert back(hvd.allreduce) == [mean] * size
    assert back(lambda t: hvd.allreduce(t, op=hvd.Sum)) == [total] * size
    assert back(hvd.allgather, me + 1) == [mean] * (me + 1)
    assert back(lambda t: hvd.broadcast(t, size - 1)) == [mean if me == size - 1 else 0] * size
    assert back(hvd.alltoall) == weights.tolist()
    assert back(hvd.reducescatter) == weights.tolist()
    assert back(lambda t: hvd.reducescatter(t, op=hvd.Sum)) == (size * weights).tolist()
    (one,) = hvd.grouped_allreduce([torch.ones(1, requires_grad=True)])
    assert one.requires_grad


def which_library_carries_messages(comm: Comm) -> None:
    hvd.init()
    enabled = (hvd.gloo_enabled(), hvd.mpi_enabled())
    if comm.wire == "horovod":
        assert enabled == (horovods().gloo_enabled(), horovods().mpi_enabled()) and any(enabled)
    else:
        assert enabled == (comm.wire == "torch", comm.wire == "mpi")
    if hvd.mpi_enabled():
        assert isinstance(hvd.mpi_threads_supported(), bool)


def a_logged_loss_meets_no_gradients(comm: Comm) -> None:
    """Between backward and step, when every rank has other buckets on their way."""
    hvd.init()
    sgd = functools.partial(torch.optim.SGD, lr=0.1, momentum=0.9)
    recipe = Recipe(lambda named: sgd([param for _, param in named]), buckets=(*TINY.items(),))
    whole = Replica(replace(recipe, model=lambda: Branches(comm.size, None)))
    mine = Replica(replace(recipe, model=lambda: Branches(comm.size, comm.rank)), comm)
    for step in range(2 * STEPS):
        losses = [replica.backward(step) for replica in (whole, mine)]
        assert_close([hvd.allreduce(losses[1], name="loss")], [losses[0]], 1e-9, f"loss of step {step}")
        for replica in (whole, mine):
            replica.step(step)
    assert_close(mine.parameters, whole.parameters, 1e-9, "trained while losses were averaged")


def state_of_one_rank_for_all(comm: Comm) -> None:
    """Only rank 0 has taken a step, so only it has state. Gradients are not sent meanwhile, and training goes on."""
    hvd.init()
    ways: list[Callable[..., None]] = [dgcopt.broadcast_optimizer_state, hvd.broadcast_optimizer_state]
    if comm.wire == "horovod":
        ways.append(horovods().broadcast_optimizer_state)
    for way in ways:
        for make in (functools.partial(torch.optim.SGD, momentum=0.9), torch.optim.Adam):
            for compression in (None, dgcopt.DGC(0.1)):
                what = f"{way.__module__}, {make}, {compression}"
                model = make_model()
                optimizer: Any = make(model.parameters(), lr=0.03)
                if comm.rank == 0:
                    nn.functional.mse_loss(*moved(model, batch(0, 0, comm))).backward()
                    optimizer.step()
                    optimizer.zero_grad()
                    optimizer.param_groups[0]["lr"] = 0.07
                optimizer = dgcopt.DistributedOptimizer(optimizer, model.named_parameters(), compression, comm=comm)
                sent = optimizer.telemetry.payload_bytes
                way(optimizer, root_rank=0)
                assert optimizer.telemetry.payload_bytes == sent, what
                dgcopt.broadcast_parameters(model.state_dict(), comm=comm)
                state = tensors_in(optimizer.state_dict()["state"])
                assert state and optimizer.param_groups[0]["lr"] == 0.07, what
                assert_same_on_all_ranks(comm, state, f"state by {what}")
                for step in range(2):
                    optimizer.zero_grad()
                    nn.functional.mse_loss(*moved(model, batch(step, 0, comm))).backward()
                    optimizer.step()
                assert_same_on_all_ranks(comm, list(model.parameters()), f"trained after {what}")
                assert optimizer.telemetry.payload_bytes > sent, what


def moved(model: nn.Module, pair: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
    return model(pair[0]), pair[1]


def process_sets(comm: Comm) -> None:
    """Inside, gradients are averaged over the set; outside, a step is the rank's own."""
    hvd.init()
    members = [0, comm.size - 1] if comm.size > 2 else [1]
    added = hvd.add_process_set(members)
    given: list[Any] = [members, added]
    if comm.wire == "horovod":
        given.append(horovods().ProcessSet(members))
    inside = comm.rank in members
    for process_set in given:
        alone, mine = Replica(SGD({}), comm=None), Replica(SGD({}), comm=None)
        dgcopt.DistributedOptimizer(mine.optimizer, mine.model.named_parameters(), comm=comm, process_set=process_set)
        for step in range(2):
            local = torch.autograd.grad(
                nn.functional.mse_loss(*moved(alone.model, batch(step, 0, comm))), alone.parameters
            )
            nn.functional.mse_loss(*moved(mine.model, batch(step, 0, comm))).backward()
            mine.optimizer.step()
            mine.optimizer.zero_grad()
            for param, grad in zip(alone.parameters, local, strict=True):
                everyone = comm.run(AllGather(grad.clone()))
                param.grad = everyone[members].mean(0) if inside else grad
            alone.optimizer.step()
        assert_close(mine.parameters, alone.parameters, 1e-12, f"process set {process_set}")
    if inside:
        assert added.rank() == members.index(comm.rank)
        assert int(hvd.allreduce(torch.tensor(comm.rank), op=hvd.Sum, process_set=added)) == sum(members)
        assert int(hvd.broadcast(torch.tensor(comm.rank), members[-1], process_set=added)) == members[-1]
        assert hvd.allgather(torch.tensor([comm.rank]), process_set=added).tolist() == members
        hvd.barrier(process_set=added)
    else:
        try:
            hvd.allreduce(torch.ones(1), process_set=added)
        except ConfigError as error:
            assert f"rank {comm.rank} is not in ProcessSet({members})" in str(error)
        else:
            raise AssertionError("a rank outside took part")


def reductions(comm: Comm) -> None:
    """Horovod's numbers as `op`, on real ranks as on simulated ones: the bits where dgcopt itself does the sum."""
    numbers = horovods() if comm.wire == "horovod" else hvd
    for op in (numbers.Average, numbers.Sum, numbers.Adasum):
        recipe = replace(SGD({"momentum": 0.9}), buckets=(*TINY.items(), ("op", op)))
        real = Replica(recipe, comm)
        simulated = [Replica(recipe, one) for one in dgcopt.simulated_world(comm.size)]
        train([real], range(STEPS))
        train(simulated, range(STEPS))
        tolerance = 0 if op == numbers.Adasum else 1e-9
        assert_close(real.parameters, simulated[0].parameters, tolerance, f"op {op}")
        assert_same_on_all_ranks(comm, real.parameters, f"op {op}")


@only(wires=["horovod-mpi"])
def adasum_of_horovod(comm: Comm) -> None:
    """A step of Horovod's own, which has it where its controller is MPI."""
    stock = horovods()
    ours = Replica(replace(SGD({}), buckets=(("op", stock.Adasum),)), comm)
    theirs = Replica(SGD({}))
    theirs.comm = comm
    theirs.optimizer = stock.DistributedOptimizer(
        theirs.optimizer,
        theirs.model.named_parameters(),
        op=stock.Adasum,
    )
    nn.functional.mse_loss(*moved(ours.model, batch(0, 0, comm))).backward()
    nn.functional.mse_loss(*moved(theirs.model, batch(0, 0, comm))).backward()
    for replica in (ours, theirs):
        replica.optimizer.step()
    assert_close(ours.parameters, theirs.parameters, 1e-12, "Adasum")


SCENARIOS: dict[str, Callable[[Comm], Any]] = {
    f"contract: {function.__name__}": function
    for function in (
        names,
        gathering,
        handles,
        lists_of_other_lengths,
        one_name_twice,
        rows_to_others,
        gradients_flow_through,
        which_library_carries_messages,
        a_logged_loss_meets_no_gradients,
        state_of_one_rank_for_all,
        process_sets,
        reductions,
        adasum_of_horovod,
    )
}
