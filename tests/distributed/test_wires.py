"""Every promise that needs other ranks, with real processes, on every wire: a launch each, a test per scenario."""

import functools

import pytest
from launching import HERE, WIRES, WORLDS, Outcome, assert_passed, launch_world, missing
from scenarios import SCENARIOS, names_of

pytestmark = [pytest.mark.processes, pytest.mark.timeout(800)]

LIMIT = 380
"""Seconds for all scenarios of a wire: 160 of them took 201 over Horovod with 4 ranks on 2 quiet cores."""


@functools.cache
def outcome_of(wire: str, size: int) -> Outcome:
    return launch_world(wire, size, [str(HERE / "worker.py"), *names_of(wire, size)], limit=LIMIT)


@pytest.mark.parametrize(
    ("wire", "size", "name"), [(wire, size, name) for wire, size in WORLDS for name in names_of(wire, size)]
)
def test_scenario(wire: str, size: int, name: str) -> None:
    assert_passed(wire, size, outcome_of(wire, size), name)


@pytest.mark.parametrize(("wire", "size"), WORLDS)
def test_ends(wire: str, size: int) -> None:
    """Leaving Python leaves the wire: no hang, no process left behind, no complaint of a library."""
    outcome = outcome_of(wire, size)
    assert outcome.code is not None, f"had to be killed after {outcome.seconds:.0f} s:\n{outcome.tail}"
    assert not outcome.orphans, f"left {len(outcome.orphans)} process(es) behind"
    assert outcome.failed or outcome.code == 0, outcome.tail


@pytest.mark.parametrize("size", sorted({size for _, size in WORLDS}))
@pytest.mark.parametrize("name", [name for name in SCENARIOS if name.startswith("simulated: DGC")])
def test_same_bits_on_every_wire(name: str, size: int) -> None:
    """Where dgcopt does the sum, the wire that carries it makes no difference."""
    there = [wire for wire in WIRES if not missing(wire)]
    if len(there) < 2:
        pytest.skip(f"only {there} can be used here; {missing('horovod-gloo')}")
    results = {wire: outcome_of(wire, size).records[name][0].get("result") for wire in there}
    assert results[there[0]] and all(result == results[there[0]] for result in results.values()), results
