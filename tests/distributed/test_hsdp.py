"""Sharded parameters in real processes over Gloo: a launch of four ranks and one of six, a test per scenario."""

import functools

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


def test_the_example_learns() -> None:
    if missing("torch"):
        pytest.skip(missing("torch"))
    outcome = launch("torch", 4, [str(ROOT / "examples" / "hsdp_digits.py")], limit=200, compiler=True)
    (told,) = outcome.told("example")
    assert told["accuracy"] > 0.85
