"""Sharded parameters in one process: memory that torch replaces, and refusals where nothing can average them."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.optim import SGD, AdamW

import dgcopt
from dgcopt import simulated_world
from dgcopt.flat.local_shard import local
from dgcopt.gradients.replicas import comm_of_replicas
from dgcopt.sharded.reduce_scatter import CODES

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
    needs = "over torch.distributed" if way in ("DistributedOptimizer", "averaging") else "only DistributedOptimizer"
    with pytest.raises(dgcopt.ConfigError, match=rf"parameter '.*' is a DTensor.*{needs}"):
        WAYS[way](make(), simulated_world(2)[0])


@pytest.mark.parametrize("call", [dgcopt.check_replicas, dgcopt.broadcast_parameters, dgcopt.broadcast_object])
def test_shards_are_not_taken_for_whole_tensors(call: Callable[..., Any]) -> None:
    """A hash of their memory would read at no address."""
    with pytest.raises(dgcopt.ConfigError, match=r"is a DTensor.*full_tensor\(\).*broadcast_from_rank0=True"):
        call(fsdp2().state_dict(), comm=simulated_world(1)[0])


def test_a_hook_of_fsdp_is_refused_in_backward() -> None:
    state, hook = dgcopt.ddp_hook(dgcopt.DGC(0.1), comm=simulated_world(2)[0])
    with pytest.raises(dgcopt.ConfigError, match="ddp_hook is for DistributedDataParallel"):
        hook(state, torch.zeros(23), torch.zeros(12))  # as FSDP calls it where parameters are sharded
    model = fsdp1(True)
    model.register_comm_hook(state, hook)
    with pytest.raises(dgcopt.ConfigError, match="ddp_hook is for DistributedDataParallel"):
        model(torch.ones(2, 4)).sum().backward()


@pytest.mark.parametrize("when", ["before the first step", "between two steps"])
def test_shards_are_followed_to_memory_that_torch_has_replaced(when: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """As fully_shard replaces shards that it pads, before the first forward pass: AdamW's update is of the new ones.

    The other rank has a plain model, as simulated ranks that are moved on by another one do not look at their shards.
    """
    monkeypatch.setattr("dgcopt.gradients.optimizer.comm_of_replicas", lambda comm, *_: comm)

    def trained(replaced_at: int) -> list[torch.Tensor]:
        torch.manual_seed(2)
        models = [fsdp2(), plain()]
        for ours, theirs in zip(models[0].parameters(), models[1].parameters(), strict=True):
            theirs.data.copy_(ours.to_local())
        optimizers = [
            dgcopt.DistributedOptimizer(AdamW(m.parameters(), lr=0.1), m.named_parameters(), dgcopt.DGC(0.5), comm=comm)
            for m, comm in zip(models, simulated_world(2), strict=True)
        ]
        for step in range(4):
            if step == replaced_at:
                for param in models[0].parameters():
                    param._local_tensor = param._local_tensor.clone()  # as torch's reset_sharded_param does
                models[0].float()  # after which fully_shard gathers from there
            for rank, model in enumerate(models):
                model.zero_grad()
                model(torch.ones(2, 4) * (rank + step)).square().sum().backward()
            for optimizer in optimizers:
                optimizer.step()
        weights = [local(param.detach()).clone() for param in models[0].parameters()]
        assert all(map(torch.equal, weights, models[1].parameters()))
        return weights

    replaced_at = 0 if when == "before the first step" else 2
    assert all(map(torch.equal, trained(replaced_at), trained(-1)))


class Told:
    """Rank 0 of four over torch, to whom all ranks have told their meshes."""

    wire, is_part, joins_replicas, rank, size = "torch", False, False, 0, 4

    def __init__(self, shards: list[tuple[int, int]]) -> None:
        self.shards = shards

    def to_wire(self, tensor: torch.Tensor) -> torch.Tensor:
        return tensor

    def run(self, collective: Any) -> torch.Tensor:
        rows = collective.tensor.repeat(self.size, 1)
        rows[:, :2] = torch.tensor(self.shards)
        return rows

    def across_replicas(self, replicas: list[tuple[int, ...]]) -> Any:
        mine = next(replica for replica in replicas if self.rank in replica)
        return SimpleNamespace(ranks=lambda group: mine)


def test_a_parameter_on_the_mesh_of_another_replica_is_refused() -> None:
    """Groups divide all ranks, and each is of the ranks of the other."""
    param = nn.Parameter(torch.ones(3))
    param.device_mesh = SimpleNamespace(mesh=torch.tensor([0, 1]))  # type: ignore[attr-defined]
    comm_of_replicas(Told([(0, 1), (0, 1), (2, 3), (2, 3)]), {param: "w"}, dgcopt.DGC(0.1), None, False)
    param.device_mesh.mesh = torch.tensor([2, 3])  # type: ignore[attr-defined]
    message = r"parameter 'w' is sharded over ranks \[2, 3\], but this replica of the model is ranks \[0, 1\]"
    with pytest.raises(dgcopt.ConfigError, match=message):
        comm_of_replicas(Told([(2, 3), (2, 3), (0, 1), (0, 1)]), {param: "w"}, dgcopt.DGC(0.1), None, False)


def test_the_reduce_scatter_in_int8_is_unbiased():
    """The mean of many messages is the gradient: nothing is lost on average, however small beside its neighbours."""
    row = torch.randn(700, generator=torch.Generator().manual_seed(3)) ** 3
    drawn = torch.stack([_decoded(row, key) for key in range(1, 1500)])
    largest = torch.stack([block.abs().max() for block in row.split(256)])
    steps = largest.repeat_interleave(256)[: len(row)] / 127
    assert ((drawn - row).abs() <= steps * (1 + 1e-5)).all()
    assert ((drawn.mean(0) - row).abs() <= 5 * steps / 2 / len(drawn) ** 0.5).all()
    assert ((drawn[0] - row).abs() > steps / 2).any(), "it rounds to the nearest"


def _decoded(row: torch.Tensor, number: int) -> torch.Tensor:
    key = number * 0x9E3779B97F4A7C15 % 2**64
    return CODES["int8"].decode(CODES["int8"].encode(row, key), len(row), 0)


def test_a_coded_reduce_scatter_repeats_its_random_numbers(monkeypatch: pytest.MonkeyPatch) -> None:
    """They follow from gradient and rank, so that a resumed run gets the same bits; others draw others."""
    scatter, group = dgcopt.sharded.CompressedReduceScatter("int8"), dist.group.WORLD
    grad, out = torch.randn(300, generator=torch.Generator().manual_seed(3)), torch.empty(4, 300)
    for place, given in enumerate((grad, grad, grad * 2, grad)):
        if place == 3:
            monkeypatch.setattr(dist, "get_rank", lambda: 1)
        scatter(out[place], given.clone(), group, dist.ReduceOp.AVG)
    assert torch.equal(out[0], out[1])
    assert not torch.equal(out[2], out[0] * 2)
    assert not torch.equal(out[3], out[0])


def test_a_coded_reduce_scatter_adds_up_in_float32(monkeypatch: pytest.MonkeyPatch) -> None:
    """Sums and means of three ranks' rows in bfloat16, in which 256 + 1 is 256."""
    scatter, group = dgcopt.sharded.CompressedReduceScatter("bf16"), SimpleNamespace(size=lambda: 3)
    monkeypatch.setattr(dist, "all_to_all_single", lambda arrived, sent, group: arrived.copy_(sent))
    rows, out = torch.tensor([[256.0], [1.0], [1.0]], dtype=torch.bfloat16), torch.empty(1, dtype=torch.bfloat16)
    for op, wanted in ((dist.ReduceOp.SUM, 258.0), (dist.ReduceOp.AVG, 86.0)):
        scatter(out, rows.flatten(), group, op)
        assert out.item() == wanted


def test_a_damaged_row_skips_the_step_and_names_the_rank_that_sent_it(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """An exception would leave the other ranks waiting, each in its backward pass."""

    def damage(arrived: torch.Tensor, sent: torch.Tensor, group: Any) -> None:
        arrived.copy_(sent)[2, 1:] = 255

    monkeypatch.setattr(dist, "all_to_all_single", damage)
    out, scatter = torch.empty(1), dgcopt.sharded.CompressedReduceScatter("bytegrad")
    scatter(out, torch.ones(3), SimpleNamespace(size=lambda: 3), dist.ReduceOp.SUM)
    (record,) = caplog.records
    assert out.isnan().all() and "rank 2" in record.getMessage()


def test_a_gradient_divide_factor_is_refused_by_its_name() -> None:
    scatter = dgcopt.sharded.CompressedReduceScatter("bf16")
    with pytest.raises(dgcopt.ConfigError, match=r"set_gradient_divide_factor\(\)"):
        scatter(torch.zeros(1), torch.zeros(1), SimpleNamespace(size=lambda: 1), dist._make_nccl_premul_sum(0.5))
