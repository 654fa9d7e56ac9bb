"""Costs of sums by owners: bytes and operations as ranks grow, overflow, and the choice of `auto`."""

from __future__ import annotations

import math

import pytest
import torch

import dgcopt
from dgcopt.coding import SparseCode
from dgcopt.collectives import AllGather, AllToAll, Collective, Link, watched
from dgcopt.compressors.reduction import OwnerReduction, reduction
from dgcopt.flat.shard import Sharding
from tests.conformance.owners import FAST, SLOW, Ranks
from tests.support.waits import Operations


def test_bytes_do_not_grow_with_the_ranks() -> None:
    """Twice a rank's own choice, and some room: 4 to 64 ranks."""
    sent = {}
    for size in (4, 16, 64):
        ranks = Ranks(dgcopt.TopK(0.05, "int2", "rice", reduce="owner", granularity="bucket"), size, [(400, 500)])
        told = []
        grads = ranks.gradients(0)
        dgcopt.simulate(
            [
                watched(ranks.compressor.exchange(grad, context), told.append if rank == 0 else lambda _: None)
                for rank, (context, grad) in enumerate(zip(ranks.contexts, grads, strict=True))
            ]
        )
        assert sum(c.nbytes for c in told) == ranks.compressor.payload_bytes(ranks.contexts[0])
        sent[size] = sum(collective.sent(size) for collective in told)
    assert sent[16] < 1.5 * sent[4] and sent[64] < 1.5 * sent[16]
    alone = dgcopt.TopK(0.05, "int2", "rice", granularity="bucket").payload_bytes(ranks.contexts[0])
    assert alone is not None and sent[4] < 2.5 * alone


def test_bytes_of_vectors_do_not_grow_with_the_ranks() -> None:
    """8 bits to the owners, and 8 from them."""
    for size in (4, 16, 64):
        ranks = Ranks(dgcopt.DGC.compact(warmup=None, reduce="owner"), size, [(50_000,)], "vector")
        told: list[Collective] = []
        dgcopt.simulate(
            [
                watched(ranks.compressor.exchange(grad, context), told.append if rank == 0 else lambda _: None)
                for rank, (context, grad) in enumerate(zip(ranks.contexts, ranks.gradients(0), strict=True))
            ]
        )
        assert sum(c.nbytes for c in told) == ranks.compressor.payload_bytes(ranks.contexts[0])
        assert sum(c.sent(size) for c in told) < 2.2 * 50_000


def test_operations_do_not_grow_with_the_messages() -> None:
    """All messages of a step are coded and decoded together: as many operations for 64 ranks as for 8."""
    done = {}
    for size in (8, 64):
        ranks = Ranks(dgcopt.TopK(0.05, "int2", "rice", reduce="owner", granularity="bucket"), size, [(400, 500)])
        exchange = ranks.compressor.exchange(ranks.gradients(0)[0], ranks.contexts[0])
        with Operations() as counted:
            collective = next(exchange)
            assert isinstance(collective, AllToAll)
            collective = exchange.send(collective.tensor)
            assert isinstance(collective, AllGather)
            gathered = collective.tensor.expand(size, -1).contiguous()
            with pytest.raises(StopIteration):
                exchange.send(gathered)
        done[size] = counted.count
    assert done[64] < 1.2 * done[8], done


def test_few_coordinates_overflow() -> None:
    """Columns, rows and regions of large gradients are spread over all owners: less than 1% overflows."""
    size, rows, columns = 16, 256, 64
    compressor = dgcopt.TopK(0.05, "fp64", reduce="owner", granularity="bucket")
    for clustered in (lambda x: x[:, 3], lambda x: x[7], lambda x: x[:64, :16]):
        ranks = Ranks(compressor, size, [(rows, columns)])
        grads = ranks.gradients(0)
        for grad in grads:
            clustered(grad.view(rows, columns)).mul_(1e6)
        ranks.exchange(grads)
        kept = [context.memory["residual"] for context in ranks.contexts]
        sent = [int((grad != left).sum()) for grad, left in zip(grads, kept, strict=True)]
        assert min(sent) > 0.99 * math.ceil(0.05 * rows * columns)


def test_overflow_is_counted() -> None:
    """All selected coordinates belong to owner 0, whose message holds half of them; a void step counts none."""
    numel, size, k = 256, 4, 16
    sharding = Sharding(numel, size)
    mine = (sharding.owners(torch.arange(numel)) == 0).nonzero().squeeze(1)[:k]
    optimizers = []
    for comm in dgcopt.simulated_world(size):
        param = torch.nn.Parameter(torch.zeros(numel))
        inner = torch.optim.SGD([param], lr=0.1)
        compressor = dgcopt.TopK(k / numel, reduce="owner")
        optimizers.append(dgcopt.DistributedOptimizer(inner, [("p", param)], compressor, comm=comm))
    for void in (False, True):
        for optimizer in optimizers:
            (param,) = optimizer.param_groups[0]["params"]
            slopes = torch.zeros(numel)
            slopes[mine] = torch.arange(1.0, k + 1)
            if void:
                slopes[0] = math.nan
            (param * slopes).sum().backward()
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
            telemetry = optimizer.telemetry
            assert (telemetry.selected, telemetry.left_out, telemetry.overflow) == (k, k // 2, 0.5)


@pytest.mark.parametrize("size", [1, 2, 4, 16])
def test_auto_is_the_faster_one(size: int) -> None:
    """An all-gather over a fast link; owners over a slow one, if there are more than two."""
    flats = {}
    for reduce, link in (("gather", FAST), ("owner", FAST), ("auto", FAST), ("auto", SLOW)):
        ranks = Ranks(dgcopt.TopK(0.05, "fp32", "rice", reduce=reduce, granularity="bucket"), size, [(100, 500)])
        ranks.link = link
        ranks.begin()
        flats[reduce, link] = torch.stack([ranks.exchange(ranks.gradients(seed)) for seed in range(3)])
    assert torch.equal(flats["auto", FAST], flats["gather", FAST])
    assert torch.equal(flats["auto", SLOW], flats["owner" if size > 2 else "gather", FAST])
    assert size == 1 or not torch.equal(flats["owner", FAST], flats["gather", FAST])


def test_auto_weighs_ranks_bandwidth_and_latency() -> None:
    """`auto` chooses owners for many ranks and slow links, and an all-gather for high latency."""
    numel, code = 10**6, SparseCode("rice", "int2")

    def chosen(size: int, latency: float, bandwidth: float) -> bool:
        ranks = Ranks(dgcopt.TopK(), size, [(numel,)])
        context = ranks.contexts[0].placed(link=Link(latency, bandwidth))
        return isinstance(reduction("auto", code, 1000, context), OwnerReduction)

    assert [chosen(size, 1e-4, 12.5e6) for size in (2, 4, 16, 64, 256)] == [False, False, True, True, True]
    assert [chosen(16, 1e-4, bandwidth) for bandwidth in (1e6, 12.5e6, 1e9, 1e11)] == [True, True, False, False]
    assert [chosen(16, latency, 12.5e6) for latency in (1e-5, 1e-4, 1e-2)] == [True, True, False]
