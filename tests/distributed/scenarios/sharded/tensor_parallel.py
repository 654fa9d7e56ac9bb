"""Tensor parallel layers inside FSDP2's shards."""

from __future__ import annotations

import functools
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.optim import SGD, AdamW

import dgcopt
from dgcopt import DGC, Comm, ConfigError
from dgcopt.collectives import AllGather
from dgcopt.flat.optimizer_state import STATE_KEY
from dgcopt.gradients.synchronised import synchronised

from ..training import refused
from .setup import TOLERANCE, Scenario, assert_close, batch, local_of, sharded, whole, wrap


def in_tensor_parallel(shards: int, comm: Comm) -> None:
    """Split layers and a whole one on a mesh (replicate, shard, tensor) train as with FSDP2 on the whole mesh."""
    tensors = 2
    names = ("replicate", "shard", "tensor")
    mesh = init_device_mesh("cpu", (comm.size // shards // tensors, shards, tensors), mesh_dim_names=names)
    plan: dict[str, Any] = {"0": ColwiseParallel(), "2": RowwiseParallel()}

    def parallel(over: DeviceMesh) -> Any:
        with torch.random.fork_rng():
            torch.manual_seed(5)
            layers = (nn.Linear(6, 20), nn.Tanh(), nn.Linear(20, 30), nn.Tanh(), nn.Linear(30, 1))
        return sharded(over, parallelize_module(nn.Sequential(*layers), mesh["tensor"], plan))

    replica = comm.rank // tensors  # ranks of one tensor group have the same batch
    for make in (functools.partial(SGD, lr=0.05, momentum=0.9), functools.partial(AdamW, lr=0.01, eps=1e-4)):
        native, model, sparse = parallel(mesh["replicate", "shard"]), *(parallel(mesh["shard"]) for _ in range(2))
        theirs = make(native.parameters())
        ours = wrap(model, make(model.parameters()), mesh, DGC(1.0, source="gradient"))
        selecting = wrap(sparse, make(sparse.parameters()), mesh, DGC(0.2))
        for step in range(10):
            x, y = batch(step, replica)
            for one, m in ((theirs, native), (ours, model), (selecting, sparse)):
                one.zero_grad()
                nn.functional.mse_loss(m(x), y).backward()
                one.step()
        assert_close(whole(model), whole(native), TOLERANCE, "tensor parallel")
        assert selecting.residual_norm() > 0
        place = selecting.state_dict()[STATE_KEY]["shard"]["place"]
        assert place["4.weight"]["size"][1] == 30 and place["2.weight"]["size"][1] == 10, place
        steps = synchronised(selecting)
        assert steps is not None
        assert steps.comm.size_of("replica") == shards * tensors
        dgcopt.check_replicas({n: local_of(p) for n, p in sparse.named_parameters()}, comm=steps.comm)
        weights = {n: local_of(p) for n, p in sparse.named_parameters() if n.startswith("4.")}  # in no tensor group
        for weight in weights.values() if shards == 1 else ():
            rows = comm.run(AllGather(weight.clone(), label="whole layer"))
            assert bool((rows == rows[:1]).all()), "ranks of one tensor group hold other bits of a layer that both have"
        nan_in_one_shard(comm, selecting, sparse, batch(11, replica))
    with refused(comm, ConfigError, "several meshes", "DistributedOptimizer(..., mesh=mesh['replicate'])"):
        dgcopt.DistributedOptimizer(SGD(sparse.parameters(), lr=0.1), sparse.named_parameters(), comm=comm)


def nan_in_one_shard(comm: Comm, optimizer: Any, model: Any, given: tuple[Tensor, Tensor]) -> None:
    """The last rank's NaN in the first layer skips the step on all ranks."""
    optimizer.zero_grad()
    nn.functional.mse_loss(model(given[0]), given[1]).backward()
    before, skipped = {n: local_of(p).clone() for n, p in model.named_parameters()}, optimizer.telemetry.skipped
    if comm.rank == comm.size - 1:
        local_of(model[0].weight.grad).fill_(torch.nan)
    optimizer.step()
    assert optimizer.telemetry.skipped == skipped + 1
    assert all(torch.equal(local_of(p), before[n]) for n, p in model.named_parameters())


SCENARIOS: dict[str, Scenario] = {"sharded: tensor parallel, 2 x 1 x 2": functools.partial(in_tensor_parallel, 1)}
