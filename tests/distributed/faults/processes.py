"""Strikes at random lines of dgcopt in real processes: an exception, SIGKILL, or SIGSTOP for a short or a long while.

Ranks that are left go on to the bits of an undisturbed training, or end in time with an error of dgcopt, entirely
before or after a step.
"""

from __future__ import annotations

import contextlib
import functools
import os
import random
import signal
import time
from collections.abc import Callable, Iterator
from typing import Any

import dgcopt
from tests.distributed.faults import forked
from tests.distributed.faults.actors import Absorbed, Actor, one_step, subject_name
from tests.distributed.faults.rules import Seen
from tests.distributed.faults.tracing import Lines, raises
from tests.support.library import SETTINGS

KIND = "strike in a process"
COUNT, QUICK = 140, 4
ERRORS = {error.__name__: error for error in (MemoryError, KeyboardInterrupt, OSError, RuntimeError)}
STRIKES = ("exception", "exception", "kill", "stop briefly", "stop", "sleep")
LABELS = {
    "exception": "an exception at a random line, processes",
    "kill": "SIGKILL at a random line",
    "stop briefly": "SIGSTOP for less than the deadline",
    "stop": "SIGSTOP for longer than the deadline",
    "sleep": "a rank that sleeps longer than the deadline",
}
SIZE, STEPS, STRUCK = 2, 5, 3
DEADLINE, BRIEF, LONG, SLACK = 6.0, 0.5, 9.0, 150.0
"""Seconds: of waiting for a rank, of a stop that is shorter, of one that is longer, and more until all must have ended.
"""


def plan(seed: int, count: int) -> Iterator[dict[str, Any]]:
    for number in range(count):
        rng = random.Random(f"{seed} {KIND} {number}")
        strike = STRIKES[number % len(STRIKES)]
        yield {
            "strike": strike,
            "error": rng.choice([*ERRORS]) if strike == "exception" else "",
            "subject": rng.randrange(len(SETTINGS)),
            "rank": rng.randrange(SIZE),
            "place": rng.random(),
        }


def label(fault: dict[str, Any]) -> str:
    return LABELS[fault["strike"]]


def describe(fault: dict[str, Any]) -> str:
    return f"{fault['strike']} {fault['error']} on rank {fault['rank']} with {subject_name(fault['subject'])}"


def inject(fault: dict[str, Any]) -> Seen:
    stopped: dict[int, float] = {}

    def wake(pids: dict[int, int]) -> None:
        """Continue a stopped rank after its time."""
        pid = pids.get(fault["rank"])
        if pid is None or not is_stopped(pid):
            return
        since = stopped.setdefault(pid, time.monotonic())
        if time.monotonic() - since > (BRIEF if fault["strike"] == "stop briefly" else LONG):
            os.kill(pid, signal.SIGCONT)

    def strike() -> None:
        if fault["strike"] == "exception":
            raises(ERRORS[fault["error"]])()
        elif fault["strike"] == "sleep":
            time.sleep(LONG)
        else:
            os.kill(os.getpid(), signal.SIGKILL if fault["strike"] == "kill" else signal.SIGSTOP)

    lasts = {"stop briefly": BRIEF, "stop": LONG, "sleep": LONG}.get(fault["strike"], 0)
    limit = DEADLINE + lasts + SLACK
    reports = forked.run(SIZE, training(fault, strike, DEADLINE), limit, wake)
    must_finish = fault["strike"] == "stop briefly"
    return judge(fault, reports, limit, must_finish, fault["error"])


def is_stopped(pid: int) -> bool:
    try:
        with open(f"/proc/{pid}/stat") as file:
            return file.read().rpartition(")")[2].split()[0] == "T"
    except OSError:
        return False


def training(fault: dict[str, Any], strike: Callable[[], None], deadline: float) -> forked.Body:
    """A few steps with a strike in one of them, on one rank; each rank tells its state after each step."""

    def body(rank: int, tell: forked.Tell) -> None:
        actor = Actor(dgcopt.init(deadline=deadline), fault["subject"])
        states, lines = [actor.state()], 0
        try:
            for step in range(STEPS):
                mine = rank == fault["rank"] and step == STRUCK
                struck = Lines(1 + int(fault["place"] * lines), strike if mine else lambda: None)
                traced = mine or (rank == fault["rank"] and step == STRUCK - 1)
                if mine:
                    tell(states=states, struck=True)
                if traced:
                    with struck.traced():
                        one_step([actor], step)
                    lines = struck.count
                else:
                    one_step([actor], step)
                states.append(actor.state())
                tell(states=states)
        except BaseException:
            tell(states=states, place=struck.place)
            with contextlib.suppress(dgcopt.DGCError):  # a rank may refuse to save a state between two steps
                tell(last=actor.state(), held=actor.held())
            raise
        dgcopt.shutdown()

    return body


def judge(fault: dict[str, Any], reports: list[forked.Report], limit: float, must_finish: bool, injected: str) -> Seen:
    """What the ranks' reports show, beside the undisturbed training of simulated ranks."""
    twins = [Actor(comm, fault["subject"]) for comm in dgcopt.simulated_world(SIZE)]
    expected = [[twin.state() for twin in twins]]
    for step in range(STEPS):
        one_step(twins, step)
        expected.append([twin.state() for twin in twins])
    seen = Seen(injected=injected, struck="struck" in reports[fault["rank"]].told)
    for report in reports:
        rank, states = report.rank, [tuple(state) for state in report.told.get("states", [])]
        at = f"after the strike at {reports[fault['rank']].told.get('place', '?')}"
        seen.raised += report.raised
        if report.code is None:
            seen.late = f"rank {rank} had not ended {limit:g} s after the start"
        wrong = [step for step, state in enumerate(states) if state != expected[step][rank]]
        if wrong:
            seen.lost.append(f"rank {rank} differs from an undisturbed training after step {wrong[0]}, {at}")
        elif "last" in report.told and not _is_entire(fault, report, expected, len(states)):
            seen.lost.append(f"rank {rank} ended between two states {at}")
        if must_finish and (report.code != 0 or len(states) <= STEPS):
            seen.unsaid.append(f"rank {rank} did not go on although the fault was short: {report.raised}")
    return seen


def _is_entire(fault: dict[str, Any], report: forked.Report, expected: list[list[Any]], made: int) -> bool:
    """True if the rank ended before or after the step that failed, or in between.

    That is: averaged and not stepped, or with the gradient taken into its memory.
    """
    rank, last = report.rank, tuple(report.told["last"])
    before, after = expected[made - 1][rank], expected[min(made, STEPS)][rank]
    if last in (before, after, (before[0], before[1], after[2])):
        return True
    return last[:2] == before[:2] and _absorbed(fault["subject"], made - 1).has(rank, report.told["held"])


@functools.cache
def _absorbed(subject: int, steps: int) -> Absorbed:
    def trained() -> list[Actor]:
        actors = [Actor(comm, subject) for comm in dgcopt.simulated_world(SIZE)]
        for step in range(steps):
            one_step(actors, step)
        return actors

    return Absorbed(trained, steps)
