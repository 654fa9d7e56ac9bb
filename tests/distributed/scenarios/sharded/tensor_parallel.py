"""Tensor parallel layers inside FSDP2's shards."""

from __future__ import annotations

import functools
from collections.abc import Mapping
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import Shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, SequenceParallel, parallelize_module
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


class Sequences(nn.Module):
    """Norms of split sequences around split layers; the rest of torch's sequence parallelism is in `plan`."""

    plan: Mapping[str, Any] = {
        "norm": SequenceParallel(sequence_dim=0),
        "up": ColwiseParallel(input_layouts=Shard(0)),
        "down": RowwiseParallel(output_layouts=Shard(0)),
        "last": SequenceParallel(sequence_dim=0),
    }

    def __init__(self) -> None:
        super().__init__()
        with torch.random.fork_rng():
            torch.manual_seed(5)
            self.norm, self.up = nn.LayerNorm(6), nn.Linear(6, 20)
            self.down, self.last = nn.Linear(20, 30), nn.LayerNorm(30)

    def forward(self, x: Tensor) -> Tensor:
        return cast(Tensor, self.last(self.down(torch.tanh(self.up(self.norm(x))))))


def sequence_parallel(comm: Comm) -> None:
    """Without FSDP2 a norm's gradient comes as a sum to be made, of which updates took each rank's addend."""
    mesh = init_device_mesh("cpu", (comm.size // 2, 2), mesh_dim_names=("replicate", "tensor"))
    replica, half = divmod(comm.rank, 2)
    make = functools.partial(AdamW, lr=0.01, eps=0.1)

    def loss_of(outputs: Tensor, inputs: Tensor) -> Tensor:
        return (outputs - inputs.sum(1, keepdim=True)).square().sum() / 30

    for passes in (1, 2):  # the second one adds to a gradient that is complete
        model = parallelize_module(Sequences(), mesh["tensor"], dict(Sequences.plan))
        optimizer = wrap(model, make(model.parameters()), mesh, dgcopt.TopK(1.0), backward_passes_per_step=passes)
        alone = []
        for other in range(comm.size // 2):
            whole_model = Sequences()
            theirs = make(whole_model.parameters())
            for step in range(passes):
                loss_of(whole_model(batch(step, other)[0]), batch(step, other)[0]).div(passes).backward()
            theirs.step()
            alone.append([param.detach() for param in whole_model.parameters()])
        for step in range(passes):
            x = batch(step, replica)[0].chunk(2)[half]
            outputs = model(x)
            loss = loss_of(outputs.to_local() if hasattr(outputs, "to_local") else outputs, x)
            (loss / passes).backward()
        optimizer.step()
        mean = [torch.stack(each).mean(0) for each in zip(*alone, strict=True)]
        names = [name for name, _ in model.named_parameters()]
        assert_close(whole(model), dict(zip(names, mean, strict=True)), TOLERANCE, f"{passes} passes")


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


SCENARIOS: dict[str, Scenario] = {
    "sharded: tensor parallel, 2 x 1 x 2": functools.partial(in_tensor_parallel, 1),
    "sharded: sequence parallel": sequence_parallel,
}
