"""How scripts end that average weights in a thread, when something goes wrong in one of them or at the start."""

import re

import pytest

from tests.support.launching import PROGRAMS, WIRES, launch, missing

pytestmark = [pytest.mark.processes, pytest.mark.timeout(200)]

WORKER = str(PROGRAMS / "worker.py")


@pytest.mark.parametrize("wire", WIRES)
def test_exception(wire: str) -> None:
    """That of one rank ends all, long before the deadline, and the others say whose it was if they still can."""
    if missing(wire):
        pytest.skip(missing(wire))
    outcome = launch(
        wire, 2, [WORKER, "--bare", "raises_while_weights_are_averaged"], limit=60, env={"DGCOPT_TEST_DEADLINE": "40"}
    )
    assert outcome.code not in (0, None) and not outcome.orphans, outcome.tail
    assert "ZeroDivisionError: the last rank had enough" in outcome.output
    assert "TimeoutExceeded" not in outcome.output and "terminate called" not in outcome.output, outcome.tail
    if wire != "mpi":  # which ends the others at once
        assert re.search(r": rank 0: an exception has ended the script of rank\(s\) \[1\]", outcome.output), (
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
    assert (
        "ConfigError: AsyncAverage averages in a background thread, and MPI was not initialised for two threads"
        in outcome.output
    ), outcome.tail
