"""Two machines lose sight of each other: one half trains on, the other ends with a sentence, and comes back."""

from __future__ import annotations

import json
from itertools import groupby
from typing import Any

import pytest

from tests.distributed.faults.networks import missing as no_namespaces
from tests.support.launching import launch, missing

pytestmark = [pytest.mark.processes, pytest.mark.timeout(660)]


@pytest.fixture(scope="module")
def result(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    if why := missing("torch") or no_namespaces():
        pytest.skip(why)
    path = tmp_path_factory.mktemp("partition") / "result.json"
    outcome = launch("torch", 1, ["-m", "tests.distributed.partition", str(path)], limit=600, bare=True)
    assert outcome.code == 0, f"ended with {outcome.code} after {outcome.seconds:.0f} s:\n{outcome.tail}"
    assert not outcome.orphans, outcome.tail
    assert "terminate called" not in outcome.output, outcome.tail
    return json.loads(path.read_text())


def test_one_half_trains_on_and_the_other_comes_back(result: dict[str, Any]) -> None:
    assert not result["late"], result["errors"]
    assert result["codes"] == [0, 0]


def test_never_two_halves(result: dict[str, Any]) -> None:
    """Each step is made once, by one half or by all, with the same bits."""
    lines = sorted(result["lines"], key=lambda line: line["step"])
    for step, some in groupby(lines, key=lambda line: line["step"]):
        assert len({line["weights"] for line in some}) == 1, f"step {step}"
    apart = [line for line in lines if result["cut"] < line["time"] < result["healed"] and line["size"] == 2]
    assert {line["member"] for line in apart} == {"0.0.0", "0.1.0"}


def test_the_half_without_the_store_ends_with_a_sentence(result: dict[str, Any]) -> None:
    """Within deadlines, although no packet tells it that it is alone."""
    assert {*result["errors"]} == {"1.0.0", "1.1.0"}
    for error in result["errors"].values():
        assert error.startswith("CommError: the store at 10.253.77.1:29411 does not answer")
