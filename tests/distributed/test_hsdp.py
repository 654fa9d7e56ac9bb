"""Sharded parameters in real processes over Gloo: a launch of four ranks and one of six, a test per scenario."""

import functools
from pathlib import Path

import pytest

from tests.distributed.scenarios.in_shards import IN_SHARDS, IN_SHARDS_OF_SIX
from tests.support.launching import PROGRAMS, Outcome, assert_ended, assert_passed, launch, missing

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


def test_the_examples_learn(tmp_path: Path) -> None:
    """The GPT's second run goes on from the checkpoint of its first."""
    if missing("torch"):
        pytest.skip(missing("torch"))
    gpt = f"hsdp_gpt,--checkpoint={tmp_path / 'checkpoint'},--steps="
    words = [str(PROGRAMS / "run_examples.py"), "hsdp_digits", f"{gpt}30", f"{gpt}40"]
    outcome = launch("torch", 4, words, limit=300, compiler=True)
    digits, first, second = outcome.told("example")
    assert digits["accuracy"] > 0.85
    assert (first["first_step"], second["first_step"]) == (0, 30)
    assert len(first["losses"]) == 30 and len(second["losses"]) == 10
    assert first["losses"][0] > 5.4 and first["losses"][-1] < 4
    assert max(second["losses"]) < min(first["losses"][:10])
