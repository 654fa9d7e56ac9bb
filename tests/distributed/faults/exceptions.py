"""Exceptions at random lines of dgcopt in the middle of a step, on one of the simulated ranks.

Afterwards every rank is where it was before the step or where it would be after it, entirely: weights, the optimizer's
state and dgcopt's memory; or it refuses to save its state or to go on until a checkpoint is loaded. A loop that goes on
either ends with an error of dgcopt or trains as if nothing had happened.
"""

from __future__ import annotations

import contextlib
import functools
import itertools
import random
from collections.abc import Iterator
from typing import Any

import dgcopt
from dgcopt.gradients.synchronised import synchronised
from tests.distributed.faults.actors import SUBJECTS, TRIES, Absorbed, Actor, calls_of, one_step, subject_name
from tests.distributed.faults.rules import Seen
from tests.distributed.faults.tracing import Lines, raises
from tests.support.library import SETTINGS

KIND = "exception at a line"
COUNT, QUICK = 320, 24
ERRORS = {error.__name__: error for error in (MemoryError, KeyboardInterrupt, OSError, RuntimeError)}
SIZE, WARM = 2, 3


def plan(seed: int, count: int) -> Iterator[dict[str, Any]]:
    for number in range(count):
        rng = random.Random(f"{seed} {KIND} {number}")
        subject = number % SUBJECTS if count >= SUBJECTS else rng.randrange(SUBJECTS)
        yield {
            "subject": subject,
            "error": rng.choice([*ERRORS]),
            "place": rng.random(),
            # where weights are averaged, step() again would be another local step
            "again": rng.random() < 0.5 and subject < len(SETTINGS),
        }


def label(fault: dict[str, Any]) -> str:
    return "an exception at a random line, simulated ranks"


def describe(fault: dict[str, Any]) -> str:
    return f"{fault['error']} in {subject_name(fault['subject'])}, then {'again' if fault['again'] else 'the end'}"


def inject(fault: dict[str, Any]) -> Seen:
    subject, error = fault["subject"], ERRORS[fault["error"]]
    twins, actors = (_trained(subject) for _ in range(2))
    before = [actor.state() for actor in actors]
    assert before == [twin.state() for twin in twins], "the training is not deterministic"
    with Lines().traced() as lines:
        one_step(twins, WARM)
    after = [twin.state() for twin in twins]

    seen = Seen(injected=error.__name__)
    strike = Lines(1 + int(fault["place"] * lines.count), raises(error))
    with strike.traced():
        _step_struck(actors, WARM, seen, fault["again"])
    if not seen.raised and actors[0].averages:
        # a rank that another one moved on until it failed hears of it in its next round
        for step in (WARM + 1, WARM + 2):
            one_step(twins, step)
            _step_struck(actors, step, seen)
        if not seen.raised and [actor.state() for actor in actors] != [twin.state() for twin in twins]:
            seen.lost.append(f"at {strike.place}: went on to another state than undisturbed, without an error")
        return seen
    ours = any(error.is_ours for error in seen.raised)
    if fault["again"] and not ours:
        if not _has_gone_on(actors, after, subject):  # then ranks stand apart, and hear of it
            _step_struck(actors, WARM + 1, seen)
            ended = {error.rank for error in seen.raised if error.is_ours}
            if len(ended) < SIZE:
                seen.lost.append(f"at {strike.place}: went on to another state than undisturbed, without an error")
        return seen
    if seen.raised:
        for actor, *states in zip(actors, before, after, strict=True):
            said = _relation(actor, *states)
            if said not in ENTIRE and not _has_absorbed(actor, states[0]) and not _has_finished(actor):
                seen.lost.append(f"at {strike.place}: rank {actor.comm.rank} is {said}")
    elif [actor.state() for actor in actors] != after:
        seen.lost.append(f"at {strike.place}: went on to another state than undisturbed, without an error")
    return seen


ENTIRE = ("before", "after", "after the local step", "before the optimizer's own step", "refused")


def _trained(subject: int) -> list[Actor]:
    actors = [Actor(comm, subject) for comm in dgcopt.simulated_world(SIZE)]
    for step in range(WARM):
        one_step(actors, step)
    return actors


@functools.cache
def _absorbed(subject: int) -> Absorbed:
    return Absorbed(functools.partial(_trained, subject), WARM)


def _has_absorbed(actor: Actor, before: Any) -> bool:
    """Whether nothing has happened to a rank but that its memory has taken the gradient in."""
    subject = actor.subject
    return (
        not actor.averages and actor.state()[:2] == before[:2] and _absorbed(subject).has(actor.comm.rank, actor.held())
    )


def _has_finished(actor: Actor) -> bool:
    """True if the round that was under way is applied, and nothing else has happened to a rank."""
    return actor.averages and actor.state() == _finished(actor.subject)[actor.comm.rank]


@functools.cache
def _finished(subject: int) -> list[tuple[str, str, str]]:
    actors = _trained(subject)
    for actor in actors:
        actor.optimizer.averaging.finish_round()
    return [actor.state() for actor in actors]


def _has_gone_on(actors: list[Actor], after: Any, subject: int) -> bool:
    """Whether ranks have made the step at last, some with a gradient that memory had taken in when it was aborted."""
    if [actor.state() for actor in actors] == after:
        return True
    for tries in itertools.product(range(TRIES + 1), repeat=SIZE):
        there = _absorbed(subject).gone_on(tries)
        said = {_relation(actor, ("", "", ""), state) for actor, state in zip(actors, there, strict=True)}
        if said <= {"after", "before the optimizer's own step"}:
            return True
    return False


def _step_struck(actors: list[Actor], step: int, seen: Seen, again: bool = False) -> None:
    """One step of all ranks. A rank whose call raises calls `again`, or is gone; the others go on until they notice.

    One that has called again in vain is there in the next step.
    """
    gone: set[int] = set()
    for actor, call in calls_of(actors, step):
        if actor.comm.rank in gone:
            continue
        for attempt in range(2):
            try:
                call()
                break
            except BaseException as error:
                seen.add(actor.comm.rank, error)
                if not again or attempt:
                    gone.add(actor.comm.rank)
                    if not again:
                        actor.comm.close()
                        _end_of_moved_on(actor)
                    break


def _end_of_moved_on(actor: Actor) -> None:
    """End a step that another rank's call has moved on, as only simulated ranks do to each other."""
    part = None if actor.averages else synchronised(actor.optimizer)
    if part is not None and part.engine is not None and part.engine.in_flight and part.engine.pending:
        with contextlib.suppress(dgcopt.DGCError):
            actor.optimizer.synchronize()


def _relation(actor: Actor, before: Any, after: Any) -> str:
    """Where a rank is between two states, if it is entirely in one; else how it is torn."""
    try:
        state = actor.state()
    except dgcopt.DGCError:
        return "refused"
    places = [
        "either" if here == there == now else "before" if now == here else "after" if now == there else "torn"
        for now, here, there in zip(state, before, after, strict=True)
    ]
    for one in ("before", "after"):
        if {*places} <= {one, "either"}:
            return one
    weights, inner, ours = places
    if actor.averages and ours in ("before", "either"):
        return "after the local step" if state[0] == actor.stepped else f"torn: {places}"
    # an update is made by the optimizer before it is sent, and so its state is ahead of the weights
    ahead = "after" if not actor.averages and actor.optimizer.compressor.sends == "update" else "before"
    if weights == "before" and inner in (ahead, "either") and ours in ("after", "either"):
        with contextlib.suppress(dgcopt.DGCError):
            actor.step(WARM)  # which has only the optimizer's own step left to do
        if actor.state() == after:
            return "before the optimizer's own step"
    return f"torn: weights {weights}, optimizer's state {inner}, dgcopt's {ours}"
