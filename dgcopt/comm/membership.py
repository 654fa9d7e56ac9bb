"""Membership: agreement on the ranks that train on after a loss, through a key-value store that outlives them.

An epoch is a period in which the ranks stay the same. When a rank is lost, each survivor announces itself for the next
epoch. One of them, the proposer, collects the announcements and offers a membership by `compare_set`: the first offer
stands. Ranks that are not in it have been voted out. Two halves can never both go on, whatever the network does: both
would need the same key of the same store.

A step ends in a barrier that a rank enters once it has prepared its commit. A rank that passes it knows that all ranks
have prepared. So the announcements tell whether the interrupted step is committed: it is if some rank has passed the
barrier, or all survivors have entered it. Otherwise nobody has committed, and all abort.

The protocol is a generator of store operations and touches no network: `drive` runs it over a real store, tests run it
over a simulated one in virtual time.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Generator
from dataclasses import asdict, dataclass, replace
from typing import Protocol, TypeAlias, TypeVar

from ..errors import QuorumLost, VotedOut

__all__ = [
    "MEMBER",
    "STORE",
    "CompareSet",
    "Epoch",
    "KeyValueStore",
    "Negotiation",
    "Operation",
    "Read",
    "Rules",
    "Status",
    "Wait",
    "Write",
    "agree",
    "ask",
    "called_key",
    "came_key",
    "drive",
    "failed_key",
    "found",
    "gone_key",
    "has_begun",
    "join",
    "next_ask",
    "noticed_key",
    "state_key",
    "trains_key",
]

Result = TypeVar("Result")

STORE, MEMBER = "DGCOPT_STORE", "DGCOPT_MEMBER"
"""Environment variables by which an agent tells a process where the store is, as host:port, and its unique name."""

LATEST = "dgcopt/latest"
POLL = 0.05
"""Seconds between two polls of the store by the proposer."""
STAGGERED = 10
"""Number of ranks that take over one after another if proposers stay silent; all further ones take over together."""


@dataclass(frozen=True)
class Read:
    """Return the value of a key, or None; never blocks."""

    key: str


@dataclass(frozen=True)
class Write:
    """Set a key."""

    key: str
    value: str


@dataclass(frozen=True)
class CompareSet:
    """Set a key that does not exist yet; return its value afterwards."""

    key: str
    value: str


@dataclass(frozen=True)
class Wait:
    """Return the value of a key as soon as it is set, or None after some seconds."""

    key: str
    seconds: float


Operation: TypeAlias = Read | Write | CompareSet | Wait
Negotiation: TypeAlias = Generator[Operation, str | None, Result]


class KeyValueStore(Protocol):
    """A store as the protocol needs it: linearisable, and reachable for as long as any rank trains."""

    def get(self, key: str) -> str | None: ...

    def set(self, key: str, value: str) -> None: ...

    def compare_set(self, key: str, value: str) -> str: ...

    def wait(self, key: str, seconds: float) -> str | None: ...


def drive(negotiation: Negotiation[Result], store: KeyValueStore) -> Result:
    """Run a negotiation over a store; return its result."""
    answer: str | None = None
    while True:
        try:
            operation = negotiation.send(answer)
        except StopIteration as stop:
            result: Result = stop.value
            return result
        match operation:
            case Read(key):
                answer = store.get(key)
            case Write(key, value):
                store.set(key, value)
                answer = None
            case CompareSet(key, value):
                answer = store.compare_set(key, value)
            case Wait(key, seconds):
                answer = store.wait(key, seconds)


@dataclass(frozen=True)
class Status:
    """The announcement of one process.

    Attributes:
        member: unique name of the process; a restarted rank has another one.
        hint: rank that the launcher gave it, by which the first epoch is ordered.
        where: machine and port, for the caller.
        commits: steps that it has committed; -1 if it has no state yet.
        prepared: True if it has entered the barrier of the next commit.
        admits: True where a process that asks to join can begin with this one; all with state must say so.
        returns: how often the process was left behind and has asked to join again.
    """

    member: str
    hint: int
    where: str
    commits: int = -1
    prepared: bool = False
    admits: bool = True
    returns: int = 0

    def text(self) -> str:
        return json.dumps(asdict(self))

    @staticmethod
    def parse(text: str) -> Status:
        return Status(**json.loads(text))


@dataclass(frozen=True)
class Epoch:
    """A membership, the same on all its ranks.

    Attributes:
        number: counts from 0.
        members: names of the processes, in the order of their ranks.
        where: machine and port of each.
        commits: steps that every member with state has committed when the epoch begins.
        newcomers: members without state.
        asked: requests to join that were answered so far.
    """

    number: int
    members: tuple[str, ...]
    where: tuple[str, ...]
    commits: int
    newcomers: tuple[str, ...] = ()
    asked: int = 0

    def text(self) -> str:
        return json.dumps(asdict(self))

    @staticmethod
    def parse(text: str) -> Epoch:
        fields = json.loads(text)
        lists = {name: tuple(fields[name]) for name in ("members", "where", "newcomers")}
        return Epoch(**{**fields, **lists})


@dataclass(frozen=True)
class Rules:
    """Limits of a negotiation.

    Attributes:
        min_ranks: an epoch of fewer members never begins.
        grace: seconds between two looks of a rank at the decision, and from one proposer's turn to the next.
        notice: seconds within which a process that runs notices the failure, even if its training loop is busy.
        deadline: seconds after which a rank that is neither announced nor known to be gone is voted out; also the
            longest wait for a quorum.
    """

    min_ranks: int = 1
    grace: float = 0.2
    notice: float = 2.0
    deadline: float = 300.0


def gone_key(member: str) -> str:
    """Key under which an agent, or the process itself, testifies that a process has ended."""
    return f"dgcopt/gone/{member}"


def noticed_key(number: int, member: str) -> str:
    """Key under which a process that is still busy tells that it has noticed the end of an epoch."""
    return f"dgcopt/noticed/{number}/{member}"


def trains_key(member: str) -> str:
    """Key under which a process tells its agent that it trains, "yes", or is late and has to join again, "no"."""
    return f"dgcopt/trains/{member}"


def state_key(member: str) -> str:
    """Key that exists once a process has the state of training, from the start or from a live rank."""
    return f"dgcopt/state/{member}"


def _epoch_key(number: int) -> str:
    return f"dgcopt/epoch/{number}"


def _alive_key(number: int, member: str) -> str:
    return f"dgcopt/alive/{number}/{member}"


def _ask_key(place: int) -> str:
    return f"dgcopt/ask/{place}"


def agree(
    me: Status,
    last: Epoch,
    rules: Rules,
    now: Callable[[], float],
    patience: float | None = None,
    waits_for_busy: bool = True,
) -> Negotiation[Epoch]:
    """Agree with the other survivors of `last` on the next epoch; call it after this rank has left the old group.

    Args:
        me: this rank's announcement.
        last: the epoch that has ended.
        rules: limits.
        now: the time in seconds, of any origin.
        patience: seconds to wait for a rank that has not noticed the failure; `rules.deadline` if None.
            `rules.notice` is enough where a full deadline has passed for it already. A rank that has noticed it, and
            is busy, has until the deadline.
        waits_for_busy: False to give such a rank no longer than the others.

    Raises VotedOut if the others have gone on without this rank, QuorumLost if too few ranks are left by the deadline.
    """
    patience = rules.deadline if patience is None else max(patience, rules.grace)
    key = _epoch_key(last.number + 1)
    decided = yield Read(key)
    if decided is None:
        yield Write(_alive_key(last.number + 1, me.member), me.text())
    position = last.members.index(me.member)
    start = now()
    census = _Census(last, {me.member: me})
    while decided is None:
        waited = now() - start
        first = yield from census.first_left(position)
        takeover = patience + rules.grace * min(position, STAGGERED)
        if first == position or waited > takeover:
            yield from census.update()
            busy = census.busy if waits_for_busy and waited < rules.deadline else ()
            if not (census.missing if waited < patience else busy):
                yield from census.confirm_left()
                offer = yield from census.offer(rules)
                if offer is not None:
                    decided = yield CompareSet(key, offer.text())
                    yield Write(LATEST, str(last.number + 1))
                    continue
        if waited > patience + rules.deadline:
            raise QuorumLost(
                f"rank {position} of {len(last.members)}: no quorum within {waited:.0f} s after ranks were lost "
                f"({census.tally(rules)}). Restart the job from a checkpoint, with a lower min_ranks to go on with "
                f"fewer ranks."
            )
        decided = yield Wait(key, POLL if first == position else rules.grace)
    epoch = Epoch.parse(decided)
    if me.member not in epoch.members:
        raise VotedOut(
            f"rank {position} of {len(last.members)}: the other ranks have gone on without this one, as epoch "
            f"{epoch.number} with {len(epoch.members)} ranks, because it did not answer in time. Restart it to "
            f"rejoin, or raise dgcopt.init(deadline=...) if ranks may freeze for longer."
        )
    return epoch


class _Census:
    """One rank's knowledge of the members of the last epoch."""

    def __init__(self, last: Epoch, announced: dict[str, Status]) -> None:
        self.last = last
        self.announced = announced
        self.gone: set[str] = set()
        self._noticed: set[str] = set()

    @property
    def busy(self) -> list[str]:
        """Members that have noticed the failure and have not announced themselves."""
        return [name for name in self.missing if name in self._noticed]

    @property
    def missing(self) -> list[str]:
        """Members that have not announced themselves and are not known to be gone."""
        return [name for name in self.last.members if name not in self.announced and name not in self.gone]

    def first_left(self, position: int) -> Negotiation[int]:
        """Return the position of the proposer: the first member that is not known to be gone."""
        for place in range(position):
            member = self.last.members[place]
            if member not in self.gone:
                if (yield Read(gone_key(member))) is None:
                    return place
                self.gone.add(member)
        return position

    def update(self) -> Negotiation[None]:
        """Poll for the announcements and ends of missing members."""
        number = self.last.number + 1
        for member in self.missing:
            text = yield Read(_alive_key(number, member))
            if text is not None:
                self.announced[member] = Status.parse(text)
            elif (yield Read(gone_key(member))) is not None:
                self.gone.add(member)
            elif member not in self._noticed and (yield Read(noticed_key(self.last.number, member))) is not None:
                self._noticed.add(member)

    def confirm_left(self) -> Negotiation[None]:
        """Poll for the ends of announced members."""
        for member in [*self.announced]:
            if (yield Read(gone_key(member))) is not None:
                self.gone.add(member)
                del self.announced[member]

    def offer(self, rules: Rules) -> Negotiation[Epoch | None]:
        """Return the membership to propose; None without a quorum."""
        last = self.last
        there = [self.announced[name] for name in last.members if name in self.announced]
        with_state = [one for one in there if one.commits >= 0]
        if not with_state or 2 * len(there) < len(last.members) - len(self.gone):
            return None
        commits = _decision(with_state)
        keep = [one for one in there if one.commits == commits or (one.prepared and one.commits == commits - 1)]
        asking: list[Status] = []
        asked = last.asked
        if all(one.admits for one in keep):
            keep = [one for one in there if one in keep or one.commits < 0]
            asking, asked = yield from _asking(last.asked)
        known = {one.member for one in keep}
        keep += [one for one in asking if one.member not in known and one.member not in self.gone]
        if len(keep) < rules.min_ranks:
            return None
        return Epoch(
            last.number + 1,
            tuple(one.member for one in keep),
            tuple(one.where for one in keep),
            commits,
            tuple(one.member for one in keep if one.commits < 0),
            asked,
        )

    def tally(self, rules: Rules) -> str:
        """Describe the present and required number of ranks, for an error."""
        return (
            f"{len(self.announced)} of {len(self.last.members)} ranks have answered, {len(self.gone)} are known to "
            f"have ended; it takes half of the others, at least one of them with state, and min_ranks={rules.min_ranks}"
        )


def _decision(with_state: list[Status]) -> int:
    """Return the number of valid commits: the interrupted one counts if a rank has made it or all have prepared it."""
    commits = max(one.commits for one in with_state)
    return commits + all(one.prepared and one.commits == commits for one in with_state)


def _asking(start: int) -> Negotiation[tuple[list[Status], int]]:
    """Return the processes that ask to join and have not ended, and how many have asked so far."""
    found: list[Status] = []
    while (text := (yield Read(_ask_key(start)))) is not None:
        start += 1
        one = Status.parse(text)
        if (yield Read(gone_key(one.member))) is None:
            found.append(one)
    return found, start


def next_ask(epoch: Epoch) -> str:
    """Key that exists once another process asks to join."""
    return _ask_key(epoch.asked)


def has_begun() -> Negotiation[bool]:
    """Return True if the first epoch has begun, so that a process can only come back."""
    return (yield Read(_epoch_key(0))) is not None


def ask(me: Status) -> Negotiation[None]:
    """Ask to join, at the first free place of the list."""
    place = 0
    while (yield CompareSet(_ask_key(place), me.text())) != me.text():
        place += 1


def found(me: Status, size: int, rules: Rules, now: Callable[[], float]) -> Negotiation[Epoch]:
    """Begin the first epoch with `size` ranks, all of which call this; the one with hint 0 proposes.

    Raises QuorumLost if they do not all come within the deadline, VotedOut if the epoch has begun without this process.
    """
    yield from ask(me)
    start, decided = now(), None
    key = _epoch_key(0)
    while decided is None:
        if me.hint == 0:
            asking, asked = yield from _asking(0)
            newest = {one.hint: one for one in asking}
            if set(newest) >= set(range(size)):
                first = [newest[hint] for hint in range(size)]
                members, where = tuple(one.member for one in first), tuple(one.where for one in first)
                decided = yield CompareSet(key, Epoch(0, members, where, 0, (), asked).text())
                continue
        if now() - start > rules.deadline:
            raise QuorumLost(
                f"rank {me.hint} of {size}: not all ranks came within {rules.deadline:g} s. Check that every rank was "
                f"started and can reach the store."
            )
        decided = yield Wait(key, POLL if me.hint == 0 else rules.grace)
    epoch = Epoch.parse(decided)
    if me.member not in epoch.members:
        raise VotedOut(f"rank {me.hint} of {size}: the first epoch began without this process. Restart it to join.")
    return epoch


def join(me: Status, rules: Rules, now: Callable[[], float], first: int = 0) -> Negotiation[Epoch]:
    """Ask the ranks that train to take this process in; return the first epoch, from number `first` on, that has it.

    Raises QuorumLost if none of them does so within the deadline.
    """
    me = replace(me, commits=-1, prepared=False)
    hint = yield Read(LATEST)
    number = first if hint is None else max(first, int(hint))
    yield from ask(me)
    start = now()
    while True:
        text = yield Wait(_epoch_key(number), rules.grace)
        if text is not None:
            epoch, number = Epoch.parse(text), number + 1
            if me.member in epoch.members:
                return epoch
        elif now() - start > rules.deadline:
            raise QuorumLost(
                f"{me.member}: no training rank has admitted this process within {rules.deadline:g} s. Check that they "
                f"take steps; dgcopt.init(deadline=...) allows more time."
            )


def failed_key(epoch: Epoch) -> str:
    """Key that exists once a rank has left the group of an epoch, so that all others leave it too."""
    return f"dgcopt/failed/{epoch.number}"


def called_key(number: int, commits: int) -> str:
    """Key that exists once a rank has come to the round after these commits, which others may then join early."""
    return f"dgcopt/called/{number}/{commits}"


def came_key(number: int, commits: int, member: str) -> str:
    """Key that exists once a process has come to the round after these commits."""
    return f"dgcopt/came/{number}/{commits}/{member}"
