"""Every promise that needs other ranks, with real processes, on every wire: a launch each, a test per scenario."""

import functools

import pytest

from tests.distributed.scenarios.algorithms import OPTIMIZERS, SPARSE, bits_of_simulated_ranks
from tests.distributed.scenarios.catalogue import names_of
from tests.support.launching import PROGRAMS, WORLDS, Outcome, assert_ended, assert_passed, launch_world

LIMIT = 600
"""Seconds for all scenarios of a wire: on 2 quiet cores they take a sixth of it."""


pytestmark = [pytest.mark.processes, pytest.mark.timeout(2 * LIMIT + 40)]


@functools.cache
def outcome_of(wire: str, size: int) -> Outcome:
    return launch_world(wire, size, [str(PROGRAMS / "worker.py"), *names_of(wire, size)], limit=LIMIT)


@pytest.mark.parametrize(
    ("wire", "size", "name"),
    [(wire, size, name) for wire, size in WORLDS for name in names_of(wire, size)],
)
def test_scenario(wire: str, size: int, name: str) -> None:
    assert_passed(wire, size, outcome_of(wire, size), name)


@functools.cache
def simulated(name: str, size: int) -> dict[str, list[list[str]]]:
    return {each: [*bits_of_simulated_ranks(SPARSE[name], each, size)] for each in OPTIMIZERS}


@pytest.mark.parametrize(
    ("wire", "size", "name"),
    [(wire, size, name) for wire, size in WORLDS for name in SPARSE],
)
def test_same_bits_on_every_wire(wire: str, size: int, name: str) -> None:
    """Where dgcopt does the sum, the wire makes no difference: real ranks have the bits of simulated ones."""
    records = outcome_of(wire, size).records[f"simulated: {name}"]
    assert [record["result"] for record in records.values()] == [simulated(name, size)] * size


@pytest.mark.parametrize(("wire", "size"), WORLDS)
def test_ends(wire: str, size: int) -> None:
    """Though ranks still average weights in a thread, and do not all end at the same time."""
    assert_ended(outcome_of(wire, size))
