"""Ranks are killed at every place of a step, come back, stand still: survivors train on with the same bits."""

from __future__ import annotations

import json
from itertools import groupby, pairwise
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.distributed.survive import SCENARIOS
from tests.support.launching import PROGRAMS, launch, missing

LIMIT = 600.0
"""Seconds for all scenarios: beside other tests on 2 cores they take a quarter of it."""

pytestmark = [pytest.mark.processes, pytest.mark.timeout(LIMIT + 60)]

KILLED = [name for name, scenario in SCENARIOS.items() if not any(kill.stop for kill in scenario.kills)]
TRAINED_ON = [name for name in SCENARIOS if name != "too few"]
WEIGHTED = ("slowmo", "diloco", "quorum")
"""Averaging with momentum or weights."""


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """All scenarios, one after the other in one launch."""
    if missing("torch"):
        pytest.skip(missing("torch"))
    path = tmp_path_factory.mktemp("survive") / "results.jsonl"
    outcome = launch("torch", 1, [str(PROGRAMS / "survive.py"), str(path), *SCENARIOS], limit=LIMIT, bare=True)
    assert outcome.code == 0, f"ended with {outcome.code} after {outcome.seconds:.0f} s:\n{outcome.tail}"
    assert not outcome.orphans, f"left {len(outcome.orphans)} process(es) behind:\n{outcome.tail}"
    assert "terminate called" not in outcome.output, outcome.tail
    found = [json.loads(line) for line in Path(path).read_text().splitlines()]
    return {one["scenario"]: one for one in found}


def in_round(result: dict[str, Any]) -> list[dict[str, Any]]:
    """The lines of ranks that were in the round of their step."""
    return [line for line in result["lines"] if not line["is_late"]]


def by_step(result: dict[str, Any]) -> dict[int, list[dict[str, Any]]]:
    lines = sorted(result["lines"], key=lambda line: line["step"])
    return {step: [*some] for step, some in groupby(lines, key=lambda line: line["step"])}


@pytest.mark.parametrize("name", TRAINED_ON)
def test_survivors_train_on(results: dict[str, Any], name: str) -> None:
    """Every kill comes, nobody hangs or fails otherwise, and after every step all weights are the same bits."""
    result, scenario = results[name], SCENARIOS[name]
    assert not result["hung"], f"{result['hung']} hung, ends {result['ends']}, errors {result['errors']}"
    assert len(result["kills"]) == len(scenario.kills)
    if name in KILLED:
        assert not result["errors"]
        assert sum(code == -9 for code in result["ends"].values()) == len(scenario.kills)
        left = scenario.size - (1 if scenario.restart else len(scenario.kills))
        assert sum(code == 0 for code in result["ends"].values()) == left
    steps = by_step({"lines": in_round(result)})
    assert [*steps] == [*range(result["kills"][-1] + scenario.more)]
    for step, lines in steps.items():
        assert len({line["weights"] for line in lines}) == 1, f"step {step}: replicas differ"


@pytest.mark.parametrize("name", TRAINED_ON)
def test_no_rank_is_started_anew_but_the_lost(results: dict[str, Any], name: str) -> None:
    """A process goes on with the next step, and with the residual that it had, through all losses of others."""
    lines = sorted(results[name]["lines"], key=lambda line: line["member"])
    for member, own in groupby(lines, key=lambda line: line["member"]):
        for one, other in pairwise(own):
            assert other["step"] == one["step"] + 1 or other["is_late"], member
            assert other["before"] == one["after"], f"{member}: its residual changed between two steps"


@pytest.mark.parametrize(
    "name",
    [name for name in TRAINED_ON if SCENARIOS[name].optimizer == "sgd" and SCENARIOS[name].averaging not in WEIGHTED],
)
def test_sums_are_preserved(results: dict[str, Any], name: str) -> None:
    """In every step all gradients and residuals of those who made it are applied or held back; averages are
    divided by those who are there. With copies the residual of a lost rank counts too, in the first step without it.
    Not looked at: steps to which a rank has sent its part and did not live to tell; a copy is older than that part."""
    looked, copied, sizes, steps = 0, 0, set(), by_step(results[name])
    has_copies, last_told = SCENARIOS[name].residuals == "buddy", dict[str, list[float]]()
    for step, lines in steps.items():
        size = max(line["size"] for line in lines)
        if len(lines) < size:
            continue
        looked += 1
        sizes.add(size)
        told = {key: torch.tensor([line[key] for line in lines]) for key in ("gradient", "before", "after", "applied")}
        sent = (told["gradient"] + told["before"] - told["after"]).double().sum(0)
        if has_copies:
            for lost in last_told.keys() - {line["member"] for line in lines}:
                copied += 1
                sent += torch.tensor(last_told.pop(lost)).double()
            last_told |= {line["member"]: line["after"] for line in lines}
        assert torch.allclose(sent, size * told["applied"][0].double(), atol=1e-3), f"step {step} of {size} ranks"
    assert looked > 10
    assert len(sizes) > 1
    assert (copied > 1) == has_copies  # a rank may die before its first step


def test_rounds_of_a_quorum_wait_for_no_straggler(results: dict[str, Any]) -> None:
    """The slow rank comes in with fewer local steps; the frozen one misses rounds, and its progress counts once it has
    joined again, in its process. Each counts by its local steps."""
    result = results["quorum"]
    assert not result["errors"] and {*result["ends"]} == {"0.0", "1.0", "2.0"}
    sizes = {step: len(lines) for step, lines in by_step({"lines": in_round(result)}).items()}
    assert min(sizes.values()) == 2, "no round went on without the frozen rank"
    assert sizes[max(sizes)] == 3, "the frozen rank did not join again"
    assert sum(line["is_late"] for line in result["lines"]) == 1
    for step, lines in by_step({"lines": in_round(result)}).items():
        steps = torch.tensor([line["local_steps"] for line in lines], dtype=torch.double)
        gradients = torch.tensor([line["gradient"] for line in lines], dtype=torch.double)
        applied = next(line["applied"] for line in lines if line["member"] == "0.0")
        mean = (steps[:, None] * gradients).sum(0) / steps.sum()
        assert torch.allclose(mean, torch.tensor(applied, dtype=torch.double), atol=1e-3), f"step {step}"
    fast, slow = (
        sum(line["local_steps"] for line in in_round(result) if line["member"] == member) for member in ("0.0", "2.0")
    )
    assert slow < fast == 3 * len(sizes)


def test_nan_and_a_full_disk_are_met_by_all_ranks_alike(results: dict[str, Any]) -> None:
    """All skip the step, all learn that no checkpoint was written, and all train on."""
    steps = by_step(results["spoilt"])
    assert len(steps[2]) == len(steps[3]) == 3
    assert not any(any(line["applied"]) for line in steps[2])
    assert all(any(line["applied"]) for line in steps[1] + steps[3])
    assert all("cannot write a checkpoint" in line["saved"] for line in steps[3])
    assert not results["spoilt"]["errors"]


def test_lost_steps_are_counted(results: dict[str, Any]) -> None:
    """Each process counts the deaths that have aborted a step of its own, and the seconds of these."""
    lines, kills = sorted(results["buddy"]["lines"], key=lambda line: line["step"]), results["buddy"]["kills"]
    ends = {line["member"]: line["lost"] for line in lines}
    assert max(steps for steps, _ in ends.values()) > len(kills) / 4
    for member, (steps, seconds) in ends.items():
        lived = [line["step"] for line in lines if line["member"] == member]
        assert steps <= sum(lived[0] <= kill <= lived[-1] + 1 for kill in kills), member
        assert (seconds > 0) >= (steps > 0), member


def test_a_death_while_groups_are_built_is_noticed(results: dict[str, Any]) -> None:
    """Gloo itself would wait for 20 s or more."""
    times = [min(line["time"] for line in lines) for lines in by_step(results["built"]).values()]
    assert max(later - sooner for sooner, later in pairwise(times)) < 15


def test_a_rank_that_comes_back_has_nothing_to_send(results: dict[str, Any]) -> None:
    """Its residual is empty; weights and step are those of the others, else a step would fail above."""
    lines = sorted(results["four"]["lines"], key=lambda line: line["member"])
    firsts = [next(own) for member, own in groupby(lines, key=lambda line: line["member"]) if not member.endswith(".0")]
    assert len(firsts) > 10
    for line in firsts:
        assert line["step"] > 0
        assert not any(line["before"]), line["member"]


def test_a_frozen_rank_is_voted_out_and_comes_back(results: dict[str, Any]) -> None:
    """It ends with a sentence, not with steps of its own; started anew it joins the others again."""
    result = results["frozen"]
    assert {*result["errors"]} == {"1.0"}
    assert result["errors"]["1.0"].startswith("VotedOut: rank 1 of 3: the other ranks have gone on without this one")
    assert max(line["step"] for line in result["lines"] if line["member"] == "1.0") < result["kills"][0]
    assert len(by_step(result)[result["kills"][0] + 1]) == 2
    assert len(by_step(result)[max(by_step(result))]) == 3


def test_too_few_ranks_end_with_a_sentence(results: dict[str, Any]) -> None:
    result = results["too few"]
    assert not result["hung"]
    assert {*result["errors"]} == {"0.0", "2.0"}
    for error in result["errors"].values():
        assert error.startswith("QuorumLost: ")
        assert "min_ranks=3" in error
