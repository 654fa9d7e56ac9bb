"""Every promise that needs other ranks, with real processes, on every wire: a launch each, a test per scenario."""

import functools
import warnings

import pytest
from launching import HERE, WIRES, Outcome, launch, missing
from scenarios import SCENARIOS

pytestmark = [pytest.mark.processes, pytest.mark.timeout(600)]

LIMIT = 280
WORLDS = [(wire, size) for size in (2, 4) for wire in WIRES]


@functools.cache
def outcome_of(wire: str, size: int) -> Outcome:
    # among two, the script has joined the library before dgcopt does; among four, dgcopt does it
    env = {"DGCOPT_TEST_JOIN_FIRST": wire} if size == 2 else {}
    program = [str(HERE / "worker.py"), *SCENARIOS]
    outcome = launch(wire, size, program, limit=LIMIT, env=env)
    failed = any("error" in record for by_rank in outcome.records.values() for record in by_rank.values())
    if not failed and "Horovod background loop uncaught exception" in outcome.output:
        # Horovod 0.28.1 now and then stands still by itself, between two of its own threads, until Gloo gives up
        warnings.warn(f"Horovod aborted, trying once more:\n{outcome.tail}", stacklevel=1)
        outcome = launch(wire, size, program, limit=LIMIT, env=env)
    return outcome


@pytest.fixture(scope="module", params=WORLDS, ids=[f"{wire}-{size}" for wire, size in WORLDS])
def world(request: pytest.FixtureRequest) -> tuple[str, int, Outcome]:
    wire, size = request.param
    if missing(wire):
        pytest.skip(missing(wire))
    return wire, size, outcome_of(wire, size)


@pytest.mark.parametrize("name", SCENARIOS)
def test_scenario(world: tuple[str, int, Outcome], name: str) -> None:
    wire, size, outcome = world
    records = outcome.records.get(name, {})
    errors = [f"rank {rank}: {record['error']}" for rank, record in sorted(records.items()) if "error" in record]
    assert not errors, f"{len(errors)} of {size} ranks failed over {wire}:\n" + "\n".join(errors[:2])
    lost = set(range(size)) - set(records)
    assert not lost, f"rank(s) {sorted(lost)} never got through it over {wire}:\n{outcome.tail}"
    assert {record["wire"] for record in records.values()} == {wire.split("-")[0]}


def test_ends(world: tuple[str, int, Outcome]) -> None:
    """Leaving Python leaves the wire: no hang, no process left behind, no complaint of a library."""
    _, _, outcome = world
    assert outcome.code is not None, f"had to be killed after {outcome.seconds:.0f} s:\n{outcome.tail}"
    assert not outcome.orphans, f"left {len(outcome.orphans)} process(es) behind"
    failed = any("error" in record for by_rank in outcome.records.values() for record in by_rank.values())
    assert failed or outcome.code == 0, outcome.tail


@pytest.mark.parametrize("size", sorted({size for _, size in WORLDS}))
@pytest.mark.parametrize("name", [name for name in SCENARIOS if name.startswith("simulated: DGC")])
def test_same_bits_on_every_wire(name: str, size: int) -> None:
    """Where dgcopt does the sum, the wire that carries it makes no difference."""
    there = [wire for wire in WIRES if not missing(wire)]
    if len(there) < 2:
        pytest.skip(f"only {there} can be used here; {missing('horovod-gloo')}")
    results = {wire: outcome_of(wire, size).records[name][0].get("result") for wire in there}
    assert results[there[0]] and all(result == results[there[0]] for result in results.values()), results
