"""Every promise that needs other ranks, with real processes, on every wire: a launch each, a test per scenario."""

import functools

import pytest
from launching import HERE, WIRES, WORLDS, Outcome, assert_passed, launch_world, missing
from scenarios import SCENARIOS

pytestmark = [pytest.mark.processes, pytest.mark.timeout(600)]

PROGRAM = [str(HERE / "worker.py"), *SCENARIOS]


@functools.cache
def outcome_of(wire: str, size: int) -> Outcome:
    return launch_world(wire, size, PROGRAM, limit=280)


@pytest.fixture(scope="module", params=WORLDS, ids=[f"{wire}-{size}" for wire, size in WORLDS])
def world(request: pytest.FixtureRequest) -> tuple[str, int, Outcome]:
    wire, size = request.param
    return wire, size, outcome_of(wire, size)


@pytest.mark.parametrize("name", SCENARIOS)
def test_scenario(world: tuple[str, int, Outcome], name: str) -> None:
    assert_passed(*world, name)


def test_ends(world: tuple[str, int, Outcome]) -> None:
    """Leaving Python leaves the wire: no hang, no process left behind, no complaint of a library."""
    _, _, outcome = world
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
