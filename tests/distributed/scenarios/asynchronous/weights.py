"""Weights that are evaluated, loaded, frozen or trained anew while exchanges run."""

from __future__ import annotations

import math
import time

import pytest
import torch

import dgcopt
from dgcopt import Comm
from dgcopt.collectives import Barrier

from .registry import Scenario, registered_in
from .replica import INTERVAL, Replica

SCENARIOS: dict[str, Scenario] = {}
scenario = registered_in(SCENARIOS)


@scenario
def weights_to_evaluate(comm: Comm) -> None:
    mine = Replica(comm)
    for _ in range(20):
        mine.step()
    assert math.isfinite(mine.rounds.consensus_distance())
    mine.rounds.abort()
    mine.step()
    own = mine.flat()
    with mine.rounds.averaged():
        dgcopt.check_replicas(mine.model.state_dict(), comm=comm)
    assert torch.equal(mine.flat(), own) and not mine.rounds.background.is_running, "it was stopped before"
    mine.rounds.resume()
    with mine.rounds.averaged():
        dgcopt.check_replicas(mine.model.state_dict(), comm=comm)
        during, seen = mine.flat(), mine.count
        time.sleep(3 * INTERVAL)
        assert torch.equal(mine.flat(), during) and mine.count == seen
    mine.until(lambda: mine.count > seen)
    mine.step()
    mine.rounds.average()
    dgcopt.check_replicas(mine.model.state_dict(), comm=comm)
    with pytest.raises(ZeroDivisionError), mine.rounds.averaged():
        raise ZeroDivisionError
    assert mine.rounds.background.is_running is False


@scenario
def a_checkpoint_is_loaded(comm: Comm) -> None:
    """What was on its way to the weights before does not touch those that were loaded."""
    mine = Replica(comm)
    for _ in range(20):
        mine.step()
    model = {name: tensor.clone() for name, tensor in mine.model.state_dict().items()}
    state, saved = mine.optimizer.state_dict(), mine.flat()
    mine.step(0.1 * comm.rank)
    mine.wait_for_exchanges()
    mine.model.load_state_dict(model)
    mine.optimizer.load_state_dict(state)
    assert torch.equal(mine.flat(), saved) and mine.rounds.background.is_running is False
    mine.rounds.abort()
    mine.step(0.0)
    assert torch.equal(mine.flat(), saved)
    mine.rounds.resume()
    mine.wait_for_exchanges()
    mine.rounds.abort()


@scenario
def other_parameters(comm: Comm) -> None:
    """What is frozen on the way still comes together; what is trained anew is exchanged from `resume()` on."""
    mine = Replica(comm)
    weight, bias = mine.model[0].weight, mine.model[0].bias
    mine.rounds.abort()
    bias.requires_grad_(False)
    mine.rounds.resume()
    mine.step(comm.rank)
    weight.requires_grad_(False)
    comm.run(Barrier())
    mine.wait_for_exchanges(3)  # one that began before, one, and one that begins after it
    mine.step(0.0)
    torch.testing.assert_close(weight.detach(), mine.mean(weight.detach()), rtol=0, atol=1e-12)
    bias.requires_grad_(True)
    with pytest.raises(dgcopt.ConfigError, match=r"the trained parameters changed.*abort\(\)"):
        mine.step()
    mine.rounds.abort()
    mine.rounds.resume()
    mine.step(comm.rank)
    comm.run(Barrier())
    mine.wait_for_exchanges(3)
    mine.rounds.abort()
    torch.testing.assert_close(bias.detach(), mine.mean(bias.detach()), rtol=0, atol=1e-12)
    bias.requires_grad_(False)  # its gradient is kept, so torch steps it on
    mine.rounds.resume()
    mine.step(comm.rank)
    bias.data.add_(comm.rank)
    comm.run(Barrier())
    mine.wait_for_exchanges(3)
    mine.rounds.abort()
    torch.testing.assert_close(bias.detach(), mine.mean(bias.detach()), rtol=0, atol=1e-12)
    if comm.rank == 0:
        bias.grad = None
        mine.rounds.replica.unsynced.clear()
    with pytest.raises(dgcopt.MismatchError, match=r"exchanged: 0\.bias \(frozen"):
        mine.rounds.resume()
    bias.requires_grad_(comm.rank > 0)
    with pytest.raises(dgcopt.MismatchError, match=r"parameter 0\.bias.*frozen"):
        mine.rounds.resume()
