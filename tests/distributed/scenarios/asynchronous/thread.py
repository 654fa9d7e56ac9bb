"""The averaging thread: started and stopped, beside other collectives, after a warm-up, its bytes counted."""

from __future__ import annotations

import time

import torch
from torch import nn

import dgcopt
from dgcopt import Comm
from dgcopt.collectives import AllGather, AllReduce

from .registry import Scenario, registered_in
from .replica import INTERVAL, Counted, Replica, threads

SCENARIOS: dict[str, Scenario] = {}
scenario = registered_in(SCENARIOS)


@scenario
def abort_and_resume(comm: Comm) -> None:
    mine = Replica(comm)
    before = threads()
    for turn in range(5):
        mine.step()
        assert threads() == before + 1
        mine.until(lambda seen=mine.count: mine.count > seen)
        mine.rounds.abort()
        if turn == 2:
            mine.rounds.abort()
        assert threads() == before
        own, seen = mine.flat(), mine.count
        mine.step(0.0)
        time.sleep(3 * INTERVAL)
        mine.step(0.0)
        assert torch.equal(mine.flat(), own) and mine.count == seen
        mine.rounds.resume()
        if turn == 2:
            mine.rounds.resume()
    mine.rounds.abort()


@scenario
def bytes_are_counted(comm: Comm) -> None:
    """Each exchange sends four blocks of 64 weights, and every round a byte."""
    mine = Replica(comm)
    mine.rounds.abort()
    before = mine.rounds.telemetry
    mine.rounds.resume()
    mine.until(lambda: mine.count >= 3)
    mine.rounds.abort()
    told, waited = mine.rounds.telemetry, mine.rounds.background.scheduler.telemetry.wait_seconds
    assert told.payload_bytes - before.payload_bytes == mine.count * 4 * 64 * 8 + mine.count + 1
    assert told.sent_bytes - before.sent_bytes >= mine.count * 4 * 64 * 8 and told.steps == mine.rounds.step
    assert waited > 0 and told.wait_seconds == mine.rounds.runner.scheduler.telemetry.wait_seconds, (
        "no step waits for it"
    )


@scenario
def beside_other_collectives(comm: Comm) -> None:
    """Those of the script and those of the thread, of the same kind and size, are not taken for each other."""
    mine = Replica(comm, Counted(interval=1e-3))
    mine.step()
    for turn in range(100):
        x = torch.full((256,), float(turn + comm.rank), dtype=torch.float64)
        assert (comm.run(AllReduce(x)) == turn + (comm.size - 1) / 2).all()
        flag = torch.tensor([turn + comm.rank], dtype=torch.uint8)
        assert comm.run(AllGather(flag, group="control")).flatten().tolist() == [turn + r for r in range(comm.size)]
        assert mine.rounds.consensus_distance() < 1
    mine.wait_for_exchanges(10)
    mine.rounds.abort()


@scenario
def warm_up(comm: Comm) -> None:
    """Dense data-parallel training, bit by bit, and no thread; which then begins with the same weights."""
    mine, dense = Replica(comm, Counted(warmup_steps=6)), Replica.__new__(Replica)
    before = threads()
    torch.manual_seed(1)
    dense.model = nn.Sequential(nn.Linear(6, 5), nn.Tanh(), nn.Linear(5, 3)).double()
    named = dense.model.named_parameters()
    dense.optimizer = dgcopt.DistributedOptimizer(torch.optim.SGD(dense.model.parameters(), lr=0.1), named, comm=comm)
    for step in range(6):
        generator = torch.Generator().manual_seed(100 * step + comm.rank)
        inputs = torch.randn(4, 6, generator=generator, dtype=torch.float64)
        for replica in (mine, dense):
            replica.optimizer.zero_grad()
            replica.model(inputs).square().sum().backward()
            replica.optimizer.step()
        assert torch.equal(mine.flat(), dense.flat())
        assert threads() == before and mine.count == 0
    dgcopt.check_replicas(mine.model.state_dict(), comm=comm)
    mine.step()
    assert threads() == before + 1
    mine.until(lambda: mine.count > 1)
    mine.rounds.abort()
