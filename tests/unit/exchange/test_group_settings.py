"""Settings of parameter groups that differ over ranks, where that is a warning."""

import pytest
import torch

import dgcopt
from dgcopt.exchange.group_settings import GroupSettings


def test_all_ranks_compare_again_once_one_has_come_back(caplog: pytest.LogCaptureFixture) -> None:
    """It has not been warned yet: alone it would wait until the deadline, in every step."""
    comms = dgcopt.simulated_world(2)
    optimizers = [torch.optim.SGD([torch.zeros(1)], lr=lr) for lr in (0.1, 0.2)]
    settings = [GroupSettings(optimizer) for optimizer in optimizers]
    for generation in (0, 0, 1):
        for comm in comms:
            comm.generation = generation
        if generation:
            settings[1] = GroupSettings(optimizers[1])
        told = [each.agree(0, comm, "warn") for each, comm in zip(settings, comms, strict=True)]
        dgcopt.simulate(told, comms)  # type: ignore[arg-type]
    assert len(caplog.records) == 2 + 2
