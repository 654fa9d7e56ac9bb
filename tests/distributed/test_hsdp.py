"""Sharded parameters in real processes over Gloo: two launches of four ranks and one of six, a test per scenario."""

import functools
from pathlib import Path
from typing import Any

import pytest

from tests.distributed.scenarios.in_shards import IN_SHARDS, IN_SHARDS_OF_SIX, KEPT_IN_SHARDS
from tests.support.launching import PROGRAMS, ROOT, Outcome, assert_ended, assert_passed, launch, missing

pytestmark = [pytest.mark.processes, pytest.mark.timeout(500)]

LAUNCHES = {"gradients": (4, IN_SHARDS), "kept": (4, KEPT_IN_SHARDS), "six": (6, IN_SHARDS_OF_SIX)}
CASES = [(launched, name) for launched, (_, names) in LAUNCHES.items() for name in names]


@functools.cache
def outcome_of(launched: str) -> Outcome:
    if missing("torch"):
        pytest.skip(missing("torch"))
    size, names = LAUNCHES[launched]
    return launch("torch", size, [str(PROGRAMS / "worker.py"), *names], limit=400, compiler=True)


@pytest.mark.parametrize(("launched", "name"), CASES)
def test_scenario(launched: str, name: str) -> None:
    assert_passed("torch", LAUNCHES[launched][0], outcome_of(launched), name)


@pytest.mark.parametrize("launched", LAUNCHES)
def test_ends(launched: str) -> None:
    assert_ended(outcome_of(launched))


def ran(example: str, *arguments: str) -> dict[str, Any]:
    """What an example has told in a launch of its own, as it ends its process group."""
    if missing("torch"):
        pytest.skip(missing("torch"))
    words = [str(ROOT / "examples" / f"{example}.py"), *arguments]
    (told,) = launch("torch", 4, words, limit=200, compiler=True).told("example")
    return told


def test_the_digits_learn() -> None:
    assert ran("hsdp_digits")["accuracy"] > 0.85


def test_the_gpt_learns_and_resumes(tmp_path: Path) -> None:
    folder = f"--checkpoint={tmp_path / 'checkpoint'}"
    first, second = ran("hsdp_gpt", folder, "--steps=30"), ran("hsdp_gpt", folder, "--steps=40")
    assert (first["first_step"], second["first_step"]) == (0, 30)
    assert len(first["losses"]) == 30 and len(second["losses"]) == 10
    assert first["losses"][0] > 5.4 and first["losses"][-1] < 4
    assert max(second["losses"]) < min(first["losses"][:10])
