"""No update is lost, whenever an exchange falls between or within optimizer steps."""

from __future__ import annotations

import math
import threading
import time

import pytest
import torch

from dgcopt import Comm
from dgcopt.collectives import AllGather

from .registry import Scenario, registered_in
from .replica import INTERVAL, OPEN, Replica

SCENARIOS: dict[str, Scenario] = {}
scenario = registered_in(SCENARIOS)


@scenario
def no_update_is_lost(comm: Comm) -> None:
    """However steps and exchanges fall: the mean of all weights is where the mean of all updates has moved it."""
    mine = Replica(comm)
    start = mine.flat()
    steps = 0
    while steps < 200 or mine.count <= 5:
        assert steps < 100_000, "weights are not exchanged"
        mine.step()
        time.sleep(0.001 * (1 + comm.rank))
        steps += 1
    mine.rounds.abort()
    assert comm.run(AllGather(torch.tensor([mine.count]))).unique().numel() == 1
    assert (mine.flat() - start - mine.updates).norm() > 1e-3, "nothing came from other ranks"
    expected = start + mine.mean(mine.updates)
    torch.testing.assert_close(mine.mean(mine.flat()), expected, rtol=1e-12, atol=1e-12)

    # apart once more, they stand still and so come together
    mine.step()
    assert mine.rounds.consensus_distance() > 1e-3
    expected = start + mine.mean(mine.updates)
    mine.rounds.resume()
    seen = mine.count
    mine.until(lambda: mine.count > seen + 1)
    mine.rounds.abort()
    assert mine.rounds.consensus_distance() < 1e-12
    torch.testing.assert_close(mine.flat(), expected, rtol=1e-12, atol=1e-12)


@scenario
def the_thread_uses_the_device_of_the_weights(comm: Comm) -> None:
    """A thread begins on device 0, and NCCL's groups are of the device that is current."""
    entered, device_of = [], torch.cuda.device_of
    torch.cuda.device_of = lambda x: entered.append((threading.current_thread().name, x)) or device_of(x)
    try:
        mine = Replica(comm)
        mine.until(lambda: mine.count > 0)
        mine.rounds.abort()
    finally:
        torch.cuda.device_of = device_of
    params = set(mine.model.parameters())
    assert [x in params for name, x in entered if name == "dgcopt AsyncAverage"] == [True], entered


@scenario
def updates_made_meanwhile(comm: Comm) -> None:
    """Weights and updates that binary fractions hold exactly, and an exchange held until some steps have been made."""
    mine, me, size = Replica(comm, lr=1.0), comm.rank + 1, comm.size
    for param in mine.model.parameters():
        param.data.zero_()
    mine.rounds.abort()
    mine.step(me)
    OPEN[0] = 0
    mine.rounds.resume()
    mine.until(lambda: mine.count == 1)
    assert (mine.rounds.rule._copies[0] == 0).logical_or(mine.rounds.rule._copies[0] == me).all()
    mine.step(8 * me)
    mine.step(12 * me)
    assert (mine.flat() == 21 * me).all(), "something came before the exchange was over"
    OPEN[0] = 1
    mine.until(lambda: bool((mine.flat() != 21 * me).all()) or 2 * me == size + 1)
    if 2 * me != size + 1:
        assert (mine.flat() == 21 * me + (size + 1) / 2 - me).all()
    OPEN[0] = math.inf
    mine.until(lambda: bool((mine.flat() == 21 * (size + 1) / 2).all()))
    mine.rounds.abort()
    assert (mine.flat() == 21 * (size + 1) / 2).all()


@scenario
def between_two_steps(comm: Comm) -> None:
    """Weights stand still, however many exchanges there are; and all of these together make the mean."""
    mine, size = Replica(comm, lr=1.0), comm.size
    for param in mine.model.parameters():
        param.data.zero_()
    mine.rounds.abort()
    mine.step(comm.rank + 1)
    mine.rounds.resume()
    loss = mine.model(torch.ones(1, 6, dtype=torch.float64)).sum()
    mine.wait_for_exchanges(4)
    assert (mine.flat() == comm.rank + 1).all()
    loss.backward()
    mine.step(0.0)
    assert (mine.flat() == (size + 1) / 2).all()
    mine.rounds.abort()


@scenario
def within_a_step(comm: Comm) -> None:
    """What an optimizer only tries is seen by nobody, and a step that fails does not keep the others waiting."""
    mine = Replica(comm)
    far = 1e6

    def closure() -> float:
        for sign in (1, -1):
            for param in mine.model.parameters():
                param.data.add_(sign * far)
            time.sleep(5 * INTERVAL * (sign == 1))
        return 0.0

    for _ in range(3):
        mine.optimizer.step(closure)
        mine.wait_for_exchanges()
    assert max(float(x.abs().max()) for x in mine.rounds.rule._copies) < far / 2
    with pytest.raises(ZeroDivisionError):
        mine.optimizer.step(lambda: 1 / 0)
    mine.rounds.abort()
