"""What `sync_buffers` refuses, and what it says of ranks that differ; what it does is in the loops of all wires."""

from typing import Literal

import pytest
import torch
from torch import nn

import dgcopt
from dgcopt.exchange.buffers import Buffers


def model(width: int = 3) -> nn.Module:
    return nn.Sequential(nn.Linear(2, width), nn.BatchNorm1d(width))


def wrapped(net: nn.Module, comm: dgcopt.Comm) -> torch.optim.Optimizer:
    return dgcopt.DistributedOptimizer(torch.optim.SGD(net.parameters(), lr=0.1), net.named_parameters(), comm=comm)


def backward(net: nn.Module) -> None:
    net(torch.randn(4, 2)).square().sum().backward()


def test_impossible_requests_are_refused_at_once() -> None:
    net, comm = model(), dgcopt.simulated_world(2)[0]
    optimizer = wrapped(net, comm)
    with pytest.raises(dgcopt.ConfigError, match="has no buffers"):
        dgcopt.sync_buffers(net[0], optimizer)
    with pytest.raises(dgcopt.ConfigError, match='"broadcast" or "mean", not \'max\''):
        dgcopt.sync_buffers(net, optimizer, how="max")  # type: ignore[arg-type]
    with pytest.raises(dgcopt.ConfigError, match="every"):
        dgcopt.sync_buffers(net, optimizer, every=0)
    with pytest.raises(dgcopt.ConfigError, match=r"the model, an nn\.Module, not a OrderedDict"):
        dgcopt.sync_buffers(net.state_dict(), optimizer)  # type: ignore[arg-type]
    with pytest.raises(dgcopt.ConfigError, match="an optimizer from DistributedOptimizer or an averaging algorithm"):
        dgcopt.sync_buffers(net, torch.optim.SGD(net.parameters(), lr=0.1))


def test_a_thread_has_no_step_for_it() -> None:
    net = model()
    optimizer = dgcopt.AsyncAverage(torch.optim.SGD(net.parameters(), lr=0.1), comm=dgcopt.comm.LocalComm())
    with pytest.raises(dgcopt.ConfigError, match="meet in no step"):
        dgcopt.sync_buffers(net, optimizer)


@pytest.mark.parametrize("fault", ["how", "every", "shape"])
def test_ranks_that_differ_are_told(fault: str) -> None:
    nets = [model() for _ in range(2)]
    nets[1].load_state_dict(nets[0].state_dict())
    if fault == "shape":
        nets[1].register_buffer("more", torch.zeros(2))
    optimizers = [wrapped(net, comm) for net, comm in zip(nets, dgcopt.simulated_world(2), strict=True)]
    for rank, (net, optimizer) in enumerate(zip(nets, optimizers, strict=True)):
        settings = {"how": ("mean", "broadcast")[rank]} if fault == "how" else {}
        dgcopt.sync_buffers(net, optimizer, 2 if fault == "every" and rank else 1, **settings)  # type: ignore[arg-type]
        backward(net)
    what = {"how": "broadcast, every 1", "every": "broadcast, every 2", "shape": "buffer more"}[fault]
    with pytest.raises(dgcopt.MismatchError, match=f"ranks disagree.*rank 1 has .*{what}"):
        for optimizer in optimizers:
            optimizer.step()


def test_every_dtype_arrives_and_its_bytes_are_counted() -> None:
    """Half precision is averaged in single, integers and flags are rank 0's; zeros of no element are left out."""
    nets = [model() for _ in range(2)]
    nets[1].load_state_dict(nets[0].state_dict())
    optimizers = [wrapped(net, comm) for net, comm in zip(nets, dgcopt.simulated_world(2), strict=True)]
    for rank, (net, optimizer) in enumerate(zip(nets, optimizers, strict=True)):
        net.register_buffer("narrow", torch.full((3, 2), 1.0 + 2 * rank, dtype=torch.bfloat16).t())
        net.register_buffer("flag", torch.tensor([rank == 0]))
        net.register_buffer("single", torch.tensor([rank, 0])[::2])
        net.register_buffer("empty", torch.zeros(0))
        net.register_buffer("count", torch.tensor(5 + rank), persistent=False)
        dgcopt.sync_buffers(net, optimizer, how="mean")
    for _ in range(2):
        for net in nets:
            backward(net)
        before = optimizers[0].telemetry.payload_bytes  # type: ignore[attr-defined]
        for optimizer in optimizers:
            optimizer.step()
    for net in nets:
        assert torch.equal(net.narrow, torch.full((2, 3), 2.0, dtype=torch.bfloat16))
        assert net.flag.item() is True and net.count.item() == 5 and net.single.item() == 0
        assert torch.equal(net[1].running_var, nets[0][1].running_var)
    told, floats, others = 1, 4 * (3 + 3 + 6), 8 + 1 + 8 + 8
    vote = 44  # gradients left during backward
    sent = optimizers[0].telemetry.payload_bytes - before  # type: ignore[attr-defined]
    assert sent == vote + told + floats + others, sent


@pytest.mark.parametrize(("how", "wanted"), [("broadcast", 0.0), ("mean", 1.5)])
def test_ranks_that_hold_shards_of_one_replica_get_them_too(how: Literal["broadcast", "mean"], wanted: float) -> None:
    """Two replicas of two ranks, each of which has seen other data."""
    comms = [comm.across_replicas([(0, 1), (2, 3)]) for comm in dgcopt.simulated_world(4)]
    nets = [nn.BatchNorm1d(3) for _ in comms]
    for rank, net in enumerate(nets):
        net.running_mean.fill_(rank)  # type: ignore[union-attr, operator]
    exchanges = [Buffers(net, 1, how).exchange(comm, 1, True) for net, comm in zip(nets, comms, strict=True)]
    dgcopt.simulate(exchanges, comms)
    assert all((net.running_mean == wanted).all() for net in nets)  # type: ignore[union-attr]


def test_all_ranks_compare_again_once_one_has_come_back() -> None:
    """It compares for the first time: alone it would wait until the deadline, in every step."""
    comms, nets = dgcopt.simulated_world(2), [nn.BatchNorm1d(3) for _ in range(2)]
    buffers = [Buffers(net, 1, "broadcast") for net in nets]
    for generation in range(2):
        for comm in comms:
            comm.generation = generation
        nets[0].running_mean.fill_(generation + 1)  # type: ignore[union-attr, operator]
        exchanges = [each.exchange(comm, 1, True) for each, comm in zip(buffers, comms, strict=True)]
        dgcopt.simulate(exchanges, comms)
        assert nets[1].running_mean.tolist() == [generation + 1] * 3  # type: ignore[union-attr, operator]
        buffers[1] = Buffers(nets[1], 1, "broadcast")
