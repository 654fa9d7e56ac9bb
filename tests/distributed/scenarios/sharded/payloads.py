"""Bytes sent and memory of shards; a replica's reduce-scatter in a code."""

from __future__ import annotations

import functools
from typing import Any
from unittest import mock

import torch
from torch import Tensor, nn
from torch.optim import SGD

import dgcopt
from dgcopt import DGC, Comm, ConfigError, NoCompression
from dgcopt.collectives import AllGather, AllReduce

from ..training import refused
from .setup import Wide, batch, large, local_of, loss_of, memory_of, mesh_of, scenarios_of, sharded, wrap


def memory_and_bytes_are_of_shards(comm: Comm) -> None:
    """A rank's memory and sent bytes are those of whole parameters divided by the size of the shard group."""
    mesh = mesh_of(comm, 2)
    for compressor in (NoCompression(), DGC(0.01), dgcopt.TopK(0.01, "int8", "rice"), dgcopt.EFSignSGD()):
        model = sharded(mesh["shard"], large())
        numel = sum(param.numel() for param in model.parameters())
        mine = sum(local_of(param).numel() for param in model.parameters())
        assert abs(2 * mine / numel - 1) < 0.01
        make = functools.partial(SGD, lr=0.01, momentum=0.9)
        optimizer = dgcopt.DistributedOptimizer(
            make(model.parameters()), model.named_parameters(), compressor, mesh=mesh["replicate"]
        )
        simulated_models = [large(), large()]
        whole_ones: list[Any] = [
            dgcopt.DistributedOptimizer(make(m.parameters()), m.named_parameters(), compressor, comm=c)
            for m, c in zip(simulated_models, dgcopt.simulated_world(2), strict=True)
        ]
        counted = []
        for step in range(4):
            for one, m in ((optimizer, model), *zip(whole_ones, simulated_models, strict=True)):
                one.zero_grad()
                loss_of(m, comm, step).backward()
            for one in (optimizer, *whole_ones):
                one.step()
            counted.append((optimizer.telemetry.sent_bytes, whole_ones[0].telemetry.sent_bytes))
        ours, theirs = (last - first for first, last in zip(counted[0], counted[-1], strict=True))
        assert abs(2 * ours / theirs - 1) < 0.03, (
            f"{compressor!r}: {ours} bytes of shards, {theirs} of whole parameters"
        )
        for kind, by_name in memory_of(optimizer).items():
            of_kind = memory_of(whole_ones[0])[kind]
            kept = sum(tensor.numel() for tensor in by_name.values())
            assert abs(2 * kept / sum(tensor.numel() for tensor in of_kind.values()) - 1) < 0.01, kind
        assert not isinstance(compressor, DGC) or {*memory_of(optimizer)} == {"residual", "momentum"}


def reduces_in_a_code(comm: Comm) -> None:
    """Gradient shards are the replica's mean within the code's rounding; NaN stays NaN; DGC trains on them."""
    mesh = mesh_of(comm, 2)
    for code, of_largest in (("bf16", 2**-8), ("fp16", 2**-11), ("int8", 1 / 127), ("bytegrad", 1 / 255)):
        exact, coded = (sharded(mesh["shard"], Wide()) for _ in range(2))
        dgcopt.sharded.compress_reduce_scatter(coded, code)
        for model in (exact, coded):
            loss_of(model, comm, 0).backward()
        wanted = [local_of(param.grad) for param in exact.parameters()]
        largest = max(float(grad.abs().max()) for grad in wanted if grad.numel())
        largest = float(comm.run(AllReduce(torch.tensor([largest]), op="max", label="largest")))
        apart = [
            float((local_of(param.grad) - grad).abs().max())
            for param, grad in zip(coded.parameters(), wanted, strict=True)
            if grad.numel()
        ]
        assert max(apart) <= 4 * of_largest * largest, f"{code}: {max(apart)} apart, of {largest}"
        assert max(apart) > 0, f"{code} has rounded nothing"
        coded.zero_grad()
        x, y = batch(0, comm.rank)
        nn.functional.mse_loss(coded(x.fill_(torch.nan) if comm.rank == 0 else x), y).backward()
        spoiled = torch.tensor([any(bool(local_of(p.grad).isnan().any()) for p in coded.parameters())])
        assert comm.run(AllGather(spoiled, label="spoiled")).flatten().tolist() == [True, True, False, False], code
        coded.zero_grad()
        optimizer = wrap(coded, SGD(coded.parameters(), lr=0.05, momentum=0.9), mesh, DGC(0.3))
        start = comm.run(AllReduce(loss_of(coded, comm, 0).detach(), label="loss"))
        for _ in range(8):
            optimizer.zero_grad()
            loss_of(coded, comm, 0).backward()
            optimizer.step()
        assert comm.run(AllReduce(loss_of(coded, comm, 0).detach(), label="loss")) < start, code
        assert optimizer.telemetry.skipped == 0
    sizes: list[int] = []
    whole_to_all = torch.distributed.all_to_all_single

    def counted(output: Tensor, given: Tensor, **settings: Any) -> Any:
        sizes.append(given.numel() * given.element_size())
        return whole_to_all(output, given, **settings)

    with mock.patch.object(torch.distributed, "all_to_all_single", counted):
        model = sharded(mesh["shard"], large())
        dgcopt.sharded.compress_reduce_scatter(model, "int8")
        loss_of(model, comm, 0).backward()
    numel = sum(param.numel() for param in model.parameters())
    assert numel <= sum(sizes) < 1.03 * numel, (sizes, numel)
    with refused(comm, ConfigError, "code must be one of fp16, bf16, int8, bytegrad, not 'int4'"):
        dgcopt.sharded.compress_reduce_scatter(model, "int4")
    with refused(comm, ConfigError, "call fully_shard first"):
        dgcopt.sharded.compress_reduce_scatter(Wide())
    with refused(comm, ConfigError, "adds up or averages"):
        scatter = dgcopt.sharded.CompressedReduceScatter("bf16")
        scatter(torch.zeros(1), torch.zeros(2), mesh["shard"].get_group(), torch.distributed.ReduceOp.MAX)


SCENARIOS = scenarios_of(memory_and_bytes_are_of_shards, reduces_in_a_code)
