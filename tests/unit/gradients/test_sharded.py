"""Sharded parameters where nothing can average them: refused when they are given, in one sentence."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.optim import SGD

import dgcopt
from dgcopt import simulated_world

pytestmark = pytest.mark.skipif(not dist.is_available(), reason="torch is built without torch.distributed")


@pytest.fixture(scope="module", autouse=True)
def one_process() -> Iterator[None]:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


def plain() -> nn.Module:
    return nn.Sequential(nn.Linear(4, 3), nn.Linear(3, 2))


def fsdp1(use_orig_params: bool) -> nn.Module:
    from torch.distributed.fsdp import FullyShardedDataParallel

    return FullyShardedDataParallel(plain(), use_orig_params=use_orig_params, device_id=torch.device("cpu"))


def fsdp2() -> nn.Module:
    try:
        from torch.distributed.fsdp import fully_shard
    except ImportError:  # before torch 2.6
        from torch.distributed._composable.fsdp import fully_shard
    model = plain()
    fully_shard(model, mesh=init_device_mesh("cpu", (1,)))
    return model


def on_a_mesh() -> nn.Module:
    """Replicated over a mesh, over which nobody averages."""
    try:
        from torch.distributed.tensor import distribute_module
    except ImportError:  # before torch 2.5
        from torch.distributed._tensor import distribute_module
    return distribute_module(plain(), init_device_mesh("cpu", (1,)))


WAYS: dict[str, Callable[[nn.Module, Any], object]] = {
    "DistributedOptimizer": lambda model, comm: dgcopt.DistributedOptimizer(
        SGD(model.parameters(), lr=0.1), model.named_parameters(), dgcopt.DGC(0.1), comm=comm
    ),
    "a parameter group that comes later": lambda model, comm: dgcopt.DistributedOptimizer(
        SGD(plain().parameters(), lr=0.1), comm=comm
    ).add_param_group({"params": list(model.parameters())}),
    "ddp_hook": lambda model, comm: dgcopt.ddp_hook(dgcopt.DGC(0.1), SGD(model.parameters(), lr=0.1), comm=comm),
    "averaging": lambda model, comm: dgcopt.LocalSGD(SGD(model.parameters(), lr=0.1), every=2, comm=comm),
}


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("use_orig_params", [False, True])
def test_fsdp1_is_refused_with_the_lines_that_migrate(use_orig_params: bool, way: str) -> None:
    with pytest.raises(dgcopt.ConfigError, match=r"parameter '.*FullyShardedDataParallel module.*Two lines migrate"):
        WAYS[way](fsdp1(use_orig_params), simulated_world(2)[0])


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("make", [fsdp2, on_a_mesh], ids=["fully_shard", "replicated on a mesh"])
def test_tensors_on_a_mesh_are_refused_but_by_the_wrapper_over_torch(make: Callable[[], nn.Module], way: str) -> None:
    needs = "over torch.distributed" if way == "DistributedOptimizer" else "only DistributedOptimizer takes it"
    with pytest.raises(dgcopt.ConfigError, match=rf"parameter '.*' is a DTensor.*{needs}"):
        WAYS[way](make(), simulated_world(2)[0])


def test_a_hook_of_fsdp_is_refused_in_backward() -> None:
    state, hook = dgcopt.ddp_hook(dgcopt.DGC(0.1), comm=simulated_world(2)[0])
    with pytest.raises(dgcopt.ConfigError, match="ddp_hook is for DistributedDataParallel"):
        hook(state, torch.zeros(23), torch.zeros(12))  # as FSDP calls it where parameters are sharded
    model = fsdp1(True)
    model.register_comm_hook(state, hook)
    with pytest.raises(dgcopt.ConfigError, match="ddp_hook is for DistributedDataParallel"):
        model(torch.ones(2, 4)).sum().backward()
