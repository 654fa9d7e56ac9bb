"""The account of one optimizer's exchanges."""

from __future__ import annotations

import pytest

from dgcopt.exchange.telemetry import Telemetry


def test_goodput_is_the_time_that_lost_ranks_did_not_cost() -> None:
    telemetry = Telemetry()
    assert telemetry.goodput(0.0) == telemetry.goodput(10.0) == 1.0
    telemetry.count_lost(0.5, aborted=True)
    telemetry.count_lost(1.5, aborted=False)  # the step was committed all the same
    assert telemetry.lost_steps == 1
    assert telemetry.goodput(10.0) == pytest.approx(0.8)
    assert telemetry.goodput(1.0) == 0.0
