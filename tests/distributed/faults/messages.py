"""Messages that are damaged on their way between simulated ranks: of every codec, and of every control message.

Damaged by the sender, a message is the same for all ranks: replicas stay equal and finite, or the step ends with an
error of dgcopt. Damaged at one receiver, it is found by checksums, or by comparing replicas after the step.
"""

from __future__ import annotations

import functools
import random
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

import dgcopt
from dgcopt import Comm
from dgcopt.collectives import AllGather, AllToAll, Barrier, Broadcast, SendRecv
from tests.distributed.faults.actors import SUBJECTS, Actor, one_step, subject_name
from tests.distributed.faults.rules import Seen
from tests.support.library import SETTINGS

KIND = "damaged message"
COUNT, QUICK = 300, 24
SIZE = 2
DAMAGES = ("flip", "cut", "nan", "ones")
GUARDS = ("sent", "received, checksums", "received, replicas compared")


def plan(seed: int, count: int) -> Iterator[dict[str, Any]]:
    for number in range(count):
        rng = random.Random(f"{seed} {KIND} {number}")
        subject = number % SUBJECTS if count >= SUBJECTS else rng.randrange(SUBJECTS)
        guards = GUARDS if subject < len(SETTINGS) else GUARDS[:2]  # weights that are averaged seldom are apart
        yield {
            "subject": subject,
            "damage": rng.choice(DAMAGES),
            "guard": rng.choice(guards),
            "control": rng.random() < 0.4,
            "step": rng.choice([0, 2, 3]),
            "rank": rng.randrange(SIZE),
            "place": rng.random(),
            "byte": rng.random(),
            "bit": rng.randrange(8),
        }


def label(fault: dict[str, Any]) -> str:
    return "a damaged control message" if fault["control"] else "a damaged message of a codec"


def describe(fault: dict[str, Any]) -> str:
    what = "a control message" if fault["control"] else "a message"
    return f"{fault['damage']} in {what} of {subject_name(fault['subject'])}, {fault['guard']}"


def inject(fault: dict[str, Any]) -> Seen:
    step, twins, actors = fault["step"], _made(fault), _made(fault)
    for earlier in range(step):
        one_step(twins, earlier)
        one_step(actors, earlier)
    before = [actor.state() for actor in actors]
    with Tap([twin.comm for twin in twins], fault).tapped() as tap:
        one_step(twins, step)
    if not tap.seen:  # the step has no control messages: one of the others, then
        fault = {**fault, "control": False}
        twins = _made(fault)
        for earlier in range(step):
            one_step(twins, earlier)
        with Tap([twin.comm for twin in twins], fault).tapped() as tap:
            one_step(twins, step)
    seen = Seen(struck=bool(tap.seen))
    if not tap.seen:
        return seen
    with Tap([actor.comm for actor in actors], fault, int(fault["place"] * tap.seen)).tapped() as tap:
        _step_until_errors(actors, step, seen)
    what = f"{fault['damage']} in {tap.struck}"
    seen.struck = bool(tap.struck)
    after = [twin.state() for twin in twins]
    one_step(twins, step + 1)
    if seen.raised:
        for actor, *states in zip(actors, before, after, strict=True):
            if actor.averages or "checksums" not in fault["guard"]:
                continue  # a local step is done by then, or the damage was applied by all
            if actor.weights() not in (states[0][0], states[1][0]):
                seen.lost.append(f"{what}: rank {actor.comm.rank} raised and has other weights than before or after")
        return seen
    params = [param for actor in actors for param in actor.model.parameters()]
    if not all(bool(torch.isfinite(param).all()) for param in params):
        seen.lost.append(f"{what}: weights are not finite, and nobody said so")
    expected = len({twin.weights() for twin in twins})
    if len({actor.weights() for actor in actors}) > expected:
        seen.lost.append(f"{what}: replicas apart, and nobody said so")
    if "checksums" in fault["guard"] and [a.state() for a in actors] != [twin.state() for twin in twins]:
        seen.lost.append(f"{what}: another state than undisturbed, although checksums were on")
    return seen


def _made(fault: dict[str, Any]) -> list[Actor]:
    settings = {"check_replicas_every": 1} if "compared" in fault["guard"] else {}
    comms = dgcopt.simulated_world(SIZE, checksums="checksums" in fault["guard"])
    return [Actor(comm, fault["subject"], **settings) for comm in comms]


def _step_until_errors(actors: Sequence[Actor], step: int, seen: Seen) -> None:
    """A step of all ranks, and one more, in which ranks that stand apart find out."""
    gone: set[int] = set()
    for at in (step, step + 1):
        for name in ("backward", "step"):
            for actor in actors:
                if actor.comm.rank not in gone:
                    try:
                        getattr(actor, name)(at)
                    except Exception as error:
                        seen.add(actor.comm.rank, error)
                        gone.add(actor.comm.rank)
                        actor.comm.close()


class Tap:
    """Counts the messages of one rank, and damages one of them.

    Attributes: `seen`, messages so far; `struck`, description of the damaged one.
    """

    def __init__(self, comms: Sequence[Comm], fault: dict[str, Any], target: int = -1) -> None:
        self.comms, self.fault, self.target = comms, fault, target
        self.seen, self.struck = 0, ""

    @contextmanager
    def tapped(self) -> Iterator[Tap]:
        (comm,) = (comm for comm in self.comms if comm.rank == self.fault["rank"])
        methods = (self._start, self._wait) if self.fault["guard"] == "sent" else (None, self._wait)
        if methods[0] is not None:
            comm.start = functools.partial(self._start, comm.start)  # type: ignore[method-assign]
        else:
            comm.wait = functools.partial(self._wait, comm, comm.wait)  # type: ignore[method-assign]
        try:
            yield self
        finally:
            vars(comm).pop("start", None)
            vars(comm).pop("wait", None)

    def _counts(self, collective: Any) -> bool:
        """True if this message is the one to be damaged."""
        is_control = collective.group in ("control", "agreement")
        if isinstance(collective, Barrier) or not collective.tensor.numel():
            return False
        if self.fault["control"] is not None and is_control != self.fault["control"]:
            return False
        self.seen += 1
        return self.seen - 1 == self.target

    def _start(self, original: Any, collective: Any) -> Any:
        if self._counts(collective):
            self.struck = collective.describe()
            collective.tensor = damaged(collective.tensor, self.fault)
        return original(collective)

    def _wait(self, comm: Comm, original: Any, handle: Any, deadline: float | None = None) -> Tensor:
        result = original(handle, deadline)
        if not self._counts(handle.collective):
            return result
        self.struck = handle.collective.describe()
        if isinstance(handle.collective, AllGather | AllToAll):
            other = (comm.rank + 1) % len(result)
            result[other].copy_(damaged(result[other], self.fault))
        elif isinstance(handle.collective, Broadcast | SendRecv):
            result = damaged(result, self.fault)
        else:
            result.copy_(damaged(result, self.fault))
        return result


def damaged(tensor: Tensor, fault: dict[str, Any]) -> Tensor:
    """A copy with a bit flipped, its end cut off (zeros), or a number of it NaN or all ones."""
    copy = tensor.detach().clone().contiguous()
    raw = copy.view(-1).view(torch.uint8)
    place = int(fault["byte"] * len(raw))
    if fault["damage"] == "flip":
        raw[place] ^= 1 << fault["bit"]
    elif fault["damage"] == "cut":
        raw[place:] = 0
    elif fault["damage"] == "nan" and copy.is_floating_point():
        copy.view(-1)[int(fault["byte"] * copy.numel())] = torch.nan
    else:
        word = 4 * (place // 4)
        value = [255] * 4 if fault["damage"] == "ones" else [0, 0, 192, 127]
        raw[word : word + 4] = torch.tensor(value, dtype=torch.uint8)[: len(raw) - word]
    return copy
