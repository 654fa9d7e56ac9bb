"""Collectives as values: shapes that fit no group, order, and the bytes that each accounts for."""

import pytest
import torch

import dgcopt
from dgcopt.collectives import AllReduce, AllToAll, Broadcast, ReduceScatter, SendRecv
from dgcopt.errors import CommError, ConfigError, MismatchError
from tests.support.worlds import Ranks


def test_shapes_that_do_not_fit_the_group():
    comm = dgcopt.simulated_world(3)[0]
    for bad in (
        ReduceScatter(torch.zeros(4)),
        AllToAll(torch.zeros(4, 2)),
        Broadcast(torch.zeros(1), root=3),
        SendRecv(torch.zeros(1), to=5),
        AllReduce(torch.zeros(1), op="product"),
    ):
        with pytest.raises(CommError, match="rank 0"):
            comm.start(bad)
    with pytest.raises(ConfigError, match="evenly"):
        dgcopt.simulated_world(5, nodes=2)


@pytest.mark.parametrize("kind", [AllReduce, ReduceScatter])
def test_reductions_that_a_dtype_lacks_are_refused_before_they_are_sent(kind) -> None:
    for dtype, op in ((torch.bool, "average"), (torch.complex64, "max"), (torch.uint16, "sum")):
        with pytest.raises(ConfigError, match=rf"\[4 \w+\]: there is no {op} of {str(dtype)[6:]}\. Use"):
            kind(torch.zeros(4).to(dtype), op=op)
    for dtype, op in ((torch.bool, "max"), (torch.bool, "sum"), (torch.complex64, "average"), (torch.int16, "average")):
        kind(torch.zeros(4).to(dtype), op=op)


def test_ranks_that_yield_different_collectives():
    def exchange(shape):
        return (yield AllReduce(torch.zeros(shape)))

    with pytest.raises(MismatchError, match=r"rank 1.*rank 0"):
        dgcopt.simulate([exchange(3), exchange(4)])

    def nothing():
        yield from ()
        return torch.zeros(1)

    with pytest.raises(MismatchError, match="ended"):
        dgcopt.simulate([exchange(3), nothing()])


def test_the_byte_ledger_equals_the_collectives_own_account():
    ranks = Ranks(4, lambda p: torch.optim.SGD(p, lr=0.1), compression=dgcopt.DGC(0.1, vectors="sparse"))
    ranks.step(0)
    sent = ranks.optimizers[0].telemetry.sent_bytes
    ranks.step(1)
    telemetry = ranks.optimizers[0].telemetry
    k = sum(-(-p.numel() // 10) for p in ranks.models[0].parameters())
    padded = -(-k * 4 // 8) * 8  # indices and values, each padded to a multiple of 8
    vote = 2 * 44 * 3 // 4
    assert telemetry.sent_bytes - sent == 3 * 2 * padded + vote
    assert telemetry.dense_bytes == 2 * (2 * 4 * sum(p.numel() for p in ranks.models[0].parameters()) * 3 // 4)
