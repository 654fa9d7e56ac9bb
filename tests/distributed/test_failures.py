"""Whatever goes wrong on one rank ends the whole job, in bounded time, with an error that says who waited for what."""

import re

import pytest

from tests.support.launching import PROGRAMS, WIRES, Outcome, launch, missing

pytestmark = pytest.mark.processes

SIZE = 2
DEADLINE = 5
START = 60
"""Seconds that two processes may take to start on a busy machine."""

BUCKET = r"bucket \d+ \(.*(weight|bias)"
BUCKETS = rf"(In flight|Not sent yet): .*{BUCKET}"
TIMED_OUT = rf"TimeoutExceeded: rank 0 waited {DEADLINE} s for \w+\[.*\] of optimizer 0 .*rank\(s\) 1\..*{BUCKETS}"
LOST = rf"(CommError|TimeoutExceeded): rank 0.* of optimizer 0 ({BUCKET}|vote.*{BUCKETS})"


def fail(wire: str, what: str, limit: float, size: int = SIZE, deadline: int = DEADLINE) -> Outcome:
    if missing(wire):
        pytest.skip(missing(wire))
    program = [str(PROGRAMS / "worker.py"), "--bare", what]
    env = {"DGCOPT_TEST_DEADLINE": str(deadline)}
    outcome = launch(wire, size, program, limit=limit + START, env=env)
    assert outcome.code is not None, f"did not end within {limit + START:g} s:\n{outcome.tail}"
    assert outcome.code != 0, f"ended as if nothing had happened:\n{outcome.tail}"
    assert not outcome.orphans, f"left {len(outcome.orphans)} process(es) behind:\n{outcome.tail}"
    return outcome


def assert_says(outcome: Outcome, pattern: str) -> None:
    assert re.search(pattern, outcome.output), f"no line like {pattern}:\n{outcome.tail}"


@pytest.mark.parametrize("wire", WIRES)
def test_other_shapes(wire: str) -> None:
    """Long before any deadline; that every rank says so is tested by the scenario "disagreement"."""
    outcome = fail(wire, "other_shape", limit=0)
    assert_says(outcome, r"MismatchError: .*parameter 0\.weight: float32 \(3, 2\).*rank 1 has .*\(4, 2\)")


@pytest.mark.parametrize("wire", WIRES)
def test_exception(wire: str) -> None:
    """The exception itself is the first thing to read, not other ranks' errors about it."""
    outcome = fail(wire, "raises", limit=0, deadline=START + 30)
    assert_says(outcome, "ZeroDivisionError: the last rank had enough")
    assert "TimeoutExceeded" not in outcome.output, f"other ranks waited for the deadline:\n{outcome.tail}"


def test_a_probe_on_some_ranks_only() -> None:
    """An error of its own deadline, which names the rank that does not take part."""
    outcome = fail("torch", "probes_alone", limit=30, deadline=40)
    assert_says(outcome, r"TimeoutExceeded: rank 0 waited 3 s for .*start of dgcopt probe.*rank\(s\) 1")


@pytest.mark.parametrize("wire", ["torch", "mpi"])
def test_another_path(wire: str) -> None:
    """Each says what it waits for, where its messages could be taken for one another: Horovod goes by names."""
    outcome = fail(wire, "takes_another_path", limit=2 * DEADLINE)
    assert_says(
        outcome, rf"{TIMED_OUT}|TimeoutExceeded: rank 1 waited {DEADLINE} s for .* names of tensors .*rank\(s\) 0"
    )


def test_factors_of_horovods_operations_that_differ() -> None:
    """Horovod compares operations itself, and knows nothing of their factors: they never meet, and say why."""
    outcome = fail("horovod-gloo", "scales_otherwise", limit=2 * DEADLINE)
    assert_says(outcome, r"TimeoutExceeded: rank [01] .*hvd\.allreduce loss")  # whose end may come before the other's
    assert_says(outcome, r"(TimeoutExceeded|CommError): rank 0.*hvd\.allreduce loss with factors 2, 1\b")


def test_groups_of_horovods_operations_that_differ() -> None:
    """Nor does it know how many tensors belong together: one more met the next operation."""
    outcome = fail("horovod-gloo", "reduces_another_number", limit=2 * DEADLINE)
    assert_says(outcome, r"TimeoutExceeded: rank [01] .*hvd\.allreduce group \d+ of [23] tensors\.0")
    assert_says(outcome, r"(TimeoutExceeded|CommError): rank 0.*hvd\.allreduce group \d+ of 2 tensors\.0")


@pytest.mark.parametrize("wire", WIRES)
def test_sleeping_rank(wire: str) -> None:
    if wire == "torch":  # it is told from those that wait too
        outcome = fail(wire, "sleeps", limit=2 * DEADLINE, size=3)
        assert_says(outcome, r"TimeoutExceeded: rank 0 waited .*also needs rank\(s\) 2\. Rank\(s\) 1 wait for it too\.")
        assert_says(outcome, r"TimeoutExceeded: rank 1 waited .*also needs rank\(s\) 2\. Rank\(s\) 0 wait for it too\.")
    else:
        assert_says(fail(wire, "sleeps", limit=2 * DEADLINE), TIMED_OUT)


@pytest.mark.parametrize("wire", WIRES)
def test_killed_rank(wire: str) -> None:
    """Without a chance to say goodbye."""
    outcome = fail(wire, "dies", limit=2 * DEADLINE, size=3 if wire == "torch" else SIZE)
    if wire in ("torch", "horovod-gloo"):  # mpirun ends the others before they can speak, and says why itself
        assert_says(outcome, LOST)
    if wire == "torch":  # whose library knows addresses only; the other launchers name the process themselves
        assert_says(outcome, r"CommError: rank 0: .*Rank\(s\) (1, )?2 closed the connection")
    assert_says(outcome, r"(?i)signal|killed")


@pytest.mark.parametrize("wire", WIRES)
def test_uneven_data(wire: str) -> None:
    """A rank that has finished is missed by those that go on, and they are told what to do about it."""
    outcome = fail(wire, "has_fewer_batches", limit=2 * DEADLINE)
    assert_says(outcome, LOST)
    if not wire.startswith("horovod"):  # which has been shut down before the vote
        assert_says(
            outcome, rf"(CommError|TimeoutExceeded): rank 0.* of optimizer 0 vote.*dgcopt\.join\(optimizer\).*{BUCKETS}"
        )


ENQUEUES = """
import sys, threading, time, torch
import horovod.torch as hvd
hvd.init()
if hvd.rank() == 1:
    time.sleep(0.3)
    sys.exit()
handles = []

def enqueue(first, step):
    for number in range(first, 10**9, step):
        handles.append(hvd.allreduce_async_(torch.ones(8), name=str(number)))
        time.sleep(0.001)

threads = [threading.Thread(target=enqueue, args=(first, 16)) for first in range(16)]
for thread in threads:
    thread.start()
for thread in threads:
    thread.join()
end = time.monotonic() + 10
while not all(map(hvd.poll, handles)) and time.monotonic() < end:
    time.sleep(0.01)
print("of", len(handles), "handles", sum(not hvd.poll(handle) for handle in handles), "are lost", flush=True)
"""


@pytest.mark.parametrize("wire", ["horovod-gloo", "horovod-mpi"])
def test_horovod_leaves_amid_enqueueing(wire: str) -> None:
    """Horovod itself, for which it is patched: it kept the GIL for locks whose holder waited for the GIL, for ever.

    And who enqueued in the very moment in which it was shut down waited for ever. The log makes that moment longer.
    """
    if missing(wire):
        pytest.skip(missing(wire))
    outcome = launch(wire, SIZE, ["-c", ENQUEUES], limit=START, env={"HOROVOD_LOG_LEVEL": "trace"})
    assert outcome.code is not None, f"stood still:\n{outcome.tail}"
    assert_says(outcome, "Horovod has been shut down")
    assert_says(outcome, r"of \d+ handles 0 are lost")


@pytest.mark.parametrize("wire", WIRES)
def test_frozen_machine(wire: str) -> None:
    """A rank whose very threads stand still, as when a machine hangs: the others leave without its help."""
    if wire == "horovod-mpi":
        pytest.xfail("Horovod's MPI controller holds its lock while it waits for a dead rank, also at exit")
    outcome = fail(wire, "freezes", limit=4 * DEADLINE)
    assert_says(outcome, LOST)
    if wire != "torch":  # torchrun waits 30 s for a process that does not react to SIGTERM
        assert "was still frozen" not in outcome.records, f"waited for the frozen rank:\n{outcome.tail}"


INIT = ["-c", f"import dgcopt; dgcopt.init(deadline={DEADLINE})"]


def test_lone_rank() -> None:
    """One of two ranks is started: an error of one line, at the deadline."""
    env = {"RANK": "0", "WORLD_SIZE": "2", "LOCAL_RANK": "0", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "0"}
    outcome = launch("torch", 1, INIT, limit=3 * DEADLINE + START, env=env, bare=True)
    assert outcome.code == 1, outcome.tail
    assert_says(outcome, r"\n(dgcopt\.errors\.)?CommError: rank 0 of 2: not all ranks came to 127.0.0.1.*\n$")


def test_half_an_environment() -> None:
    outcome = launch("torch", 1, INIT, limit=START, env={"RANK": "0"}, bare=True)
    assert outcome.code == 1, outcome.tail
    assert_says(outcome, r"\n(dgcopt\.errors\.)?ConfigError: .*WORLD_SIZE, MASTER_ADDR, MASTER_PORT is missing.*\n$")


@pytest.mark.parametrize(("name", "wire"), [("OMPI_COMM_WORLD_SIZE", "mpi"), ("HOROVOD_SIZE", "local")])
def test_ranks_apart(name: str, wire: str) -> None:
    """As of an mpirun of another MPI library than mpi4py's: each rank is alone, to that library."""
    if missing("mpi"):
        pytest.skip(missing("mpi"))
    outcome = launch("torch", 1, INIT, limit=START, env={name: "2"}, bare=True)
    assert outcome.code, outcome.tail
    assert_says(outcome, rf"ConfigError: over {wire} .*only 1 of 2 ranks joined \({name}=2\).*DGCOPT_WIRE=local.*\n")
