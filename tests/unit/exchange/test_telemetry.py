"""The account of one optimizer's exchanges."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

import dgcopt
from dgcopt.exchange.telemetry import Telemetry
from tests.support.worlds import Ranks


def test_a_trace_has_the_collectives_that_end_while_another_rank_waits(tmp_path: Path) -> None:
    ranks = Ranks(2, lambda params: torch.optim.SGD(params, lr=0.1), compression=dgcopt.DGC(0.1))
    with dgcopt.trace(ranks.optimizers[0], tmp_path / "0"), dgcopt.trace(ranks.optimizers[1], tmp_path / "1"):
        for step in range(3):
            ranks.step(step)
    names = [[line.split('"')[3] for line in (tmp_path / which).open() if '"kind"' in line] for which in "01"]
    assert sorted(names[1]) == sorted(names[0]) and len(names[0]) > 6


def test_a_trace_goes_on_over_another_wire_and_ends_there(tmp_path: Path) -> None:
    ranks = Ranks(2, lambda params: torch.optim.SGD(params, lr=0.1), compression=dgcopt.DGC(0.1))
    counts = []

    def go_on() -> None:
        alone = [dgcopt.simulated_world(1)[0] for _ in range(2)]
        for comms in (alone, dgcopt.simulated_world(2)):
            for optimizer, comm in zip(ranks.optimizers, comms, strict=True):
                optimizer.rejoin(comm)
        ranks.step()

    with dgcopt.trace(ranks.optimizers[0], tmp_path / "trace"):
        ranks.step()
        go_on()
        ranks.step()
    for _ in range(2):
        counts.append(sum("vote" in line and '"kind"' in line for line in (tmp_path / "trace").open()))
        go_on()
    assert counts == [3, 3]


def test_goodput_is_the_time_that_lost_ranks_did_not_cost() -> None:
    telemetry = Telemetry()
    assert telemetry.goodput(0.0) == telemetry.goodput(10.0) == 1.0
    telemetry.count_lost(0.5, aborted=True)
    telemetry.count_lost(1.5, aborted=False)  # the step was committed all the same
    assert telemetry.lost_steps == 1
    assert telemetry.goodput(10.0) == pytest.approx(0.8)
    assert telemetry.goodput(1.0) == 0.0
