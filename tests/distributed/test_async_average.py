"""Asynchronous averaging in real processes, on every wire: a launch each, a test per scenario; and how scripts end."""

import re

import pytest
from async_worker import SCENARIOS
from launching import HERE, WIRES, WORLDS, Outcome, assert_passed, launch, launch_world, missing

pytestmark = [pytest.mark.processes, pytest.mark.timeout(600)]

WORKER = str(HERE / "async_worker.py")


@pytest.fixture(scope="module", params=WORLDS, ids=[f"{wire}-{size}" for wire, size in WORLDS])
def world(request: pytest.FixtureRequest) -> tuple[str, int, Outcome]:
    wire, size = request.param
    return wire, size, launch_world(wire, size, [WORKER], limit=240)


@pytest.mark.parametrize("name", SCENARIOS)
def test_scenario(world: tuple[str, int, Outcome], name: str) -> None:
    assert_passed(*world, name)


def test_ends(world: tuple[str, int, Outcome]) -> None:
    """Without abort(), and not all ranks at the same time: those that are ready wait, and nobody complains."""
    _, _, outcome = world
    assert outcome.code == 0 and not outcome.orphans, f"{outcome.code} after {outcome.seconds:.0f} s:\n{outcome.tail}"
    assert "terminate called" not in outcome.output


@pytest.mark.parametrize("wire", WIRES)
def test_exception(wire: str) -> None:
    """That of one rank ends all, long before the deadline, and the others say whose it was if they still can."""
    if missing(wire):
        pytest.skip(missing(wire))
    outcome = launch(wire, 2, [WORKER, "--bare", "raises"], limit=60, env={"DGCOPT_TEST_DEADLINE": "40"})
    assert outcome.code not in (0, None) and not outcome.orphans, outcome.tail
    assert "ZeroDivisionError: the last rank had enough" in outcome.output
    assert "TimeoutExceeded" not in outcome.output and "terminate called" not in outcome.output, outcome.tail
    if wire != "mpi":  # which ends the others at once
        assert re.search(r"since rank 0: an exception has ended the script of rank\(s\) \[1\]", outcome.output), (
            outcome.tail
        )


def test_mpi_without_threads() -> None:
    if missing("mpi"):
        pytest.skip(missing("mpi"))
    program = (
        "import mpi4py; mpi4py.rc.thread_level = 'serialized'\n"
        "import dgcopt, torch; from dgcopt.averaging.asynchronous import AsyncAverage\n"
        "AsyncAverage().attach(torch.optim.SGD(torch.nn.Linear(2, 2).parameters(), 0.1), comm=dgcopt.init('mpi'))"
    )
    outcome = launch("mpi", 2, ["-c", program], limit=60)
    assert outcome.code not in (0, None), outcome.tail
    assert "ConfigError: AsyncAverage needs MPI in two threads at once" in outcome.output, outcome.tail
