"""Sharded parameters in real processes over Gloo: a launch of four ranks and one of six, a test per scenario."""

import functools
from pathlib import Path
from typing import Any

import pytest

from tests.distributed.scenarios.in_shards import IN_SHARDS, IN_SHARDS_OF_SIX
from tests.support.launching import PROGRAMS, ROOT, Outcome, assert_ended, assert_passed, launch, missing

pytestmark = [pytest.mark.processes, pytest.mark.timeout(500)]

CASES = [(4, name) for name in IN_SHARDS] + [(6, name) for name in IN_SHARDS_OF_SIX]


@functools.cache
def outcome_of(size: int) -> Outcome:
    if missing("torch"):
        pytest.skip(missing("torch"))
    names = IN_SHARDS if size == 4 else IN_SHARDS_OF_SIX
    return launch("torch", size, [str(PROGRAMS / "worker.py"), *names], limit=400, compiler=True)


@pytest.mark.parametrize(("size", "name"), CASES)
def test_scenario(size: int, name: str) -> None:
    assert_passed("torch", size, outcome_of(size), name)


@pytest.mark.parametrize("size", [4, 6])
def test_ends(size: int) -> None:
    assert_ended(outcome_of(size))


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
