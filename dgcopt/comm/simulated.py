"""N ranks driven in lockstep inside one process, without threads: for tests, and research up to N = 1024.

    comms = simulated_world(4)                      # one Comm per rank; hand each to its DistributedOptimizer
    results = simulate([algorithm(g) for g in grads])   # or drive bare exchanges, one per rank

Ranks take their turns in the user's loop: every rank's backward first, then every rank's step. When a rank waits for
another, the other's exchanges are advanced; if that does not help, the error names the missing ranks.
Code that changes gradients or settings before the step (`scaler.unscale_(optimizer)`, clipping, learning rates) runs on
all ranks before the first of them steps, because that one sends the gradients of all. Real
processes may leave `scaler.unscale_(optimizer)` out; here `scaler.step(optimizer)` is a ConfigError without it.
"""

from __future__ import annotations

import itertools
import weakref
from collections.abc import Callable, Iterable, Sequence

import torch
from torch import Tensor

from ..collectives import (
    AllGather,
    AllReduce,
    AllToAll,
    Barrier,
    Broadcast,
    Collective,
    Exchange,
    Link,
    ReduceScatter,
    SendRecv,
    reduce_rows,
)
from ..errors import CommError, ConfigError, MismatchError
from ..errors.checks import check_whole
from .base import DEADLINE, Channel, Comm, RankSet, lowered
from .handles import Handle

__all__ = ["SimulatedComm", "simulate", "simulated_world"]


class _Meeting:
    """One collective of one group: complete once every rank has brought its part."""

    def __init__(self, ranks: tuple[int, ...]) -> None:
        self.ranks = ranks
        self.parts: dict[int, Collective] = {}
        self.shared: Tensor | None = None

    def bring(self, rank: int, collective: Collective) -> None:
        for other, theirs in itertools.islice(self.parts.items(), 1):
            if collective.describe() != theirs.describe() or getattr(collective, "op", 0) != getattr(theirs, "op", 0):
                raise MismatchError(
                    f"rank {rank} started {collective.describe()}, but rank {other} started {theirs.describe()}"
                )
            if isinstance(collective, Broadcast) and collective.root != getattr(theirs, "root", None):
                raise MismatchError(f"rank {rank} and rank {other} name different roots of {collective.describe()}")
        self.parts[rank] = collective
        if len(self.parts) == len(self.ranks):
            self._meet()

    def _meet(self) -> None:
        first = self.parts[self.ranks[0]]
        tensors = [self.parts[r].tensor for r in self.ranks]
        if isinstance(first, AllReduce | ReduceScatter):
            self.shared = reduce_rows(torch.stack(tensors), first.op)
        elif isinstance(first, Broadcast):
            self.shared = tensors[first.root].clone()
        elif isinstance(first, Barrier):
            self.shared = first.tensor
        else:
            self.shared = torch.stack(tensors)

    def missing(self) -> list[int]:
        return [rank for rank in self.ranks if rank not in self.parts]

    def done(self) -> bool:
        return self.shared is not None

    def result_of(self, rank: int) -> Tensor:
        assert self.shared is not None
        mine, place, size = self.parts[rank], self.ranks.index(rank), len(self.ranks)
        if isinstance(mine, AllReduce | Broadcast):
            return mine.tensor.copy_(self.shared)
        if isinstance(mine, AllGather):
            return self.shared.clone()
        if isinstance(mine, AllToAll):
            return self.shared[:, place].clone()
        if isinstance(mine, ReduceScatter):
            return self.shared.view(size, self.shared.shape[0] // size, *self.shared.shape[1:])[place].clone()
        if isinstance(mine, SendRecv):
            if mine.source is None:
                return mine.tensor
            sender = self.parts[self.ranks[mine.source]]
            if not isinstance(sender, SendRecv) or sender.to != place:
                raise MismatchError(f"rank {rank} waits for rank {self.ranks[mine.source]}, which sends it nothing")
            return self.shared[mine.source].clone()
        return self.shared


class _Seat(Handle):
    """One rank's view of a meeting."""

    def __init__(self, meeting: _Meeting, rank: int, collective: Collective) -> None:
        self.meeting = meeting
        self.rank = rank
        self.collective = collective

    def done(self) -> bool:
        return self.meeting.done()

    def result(self) -> Tensor:
        return self.meeting.result_of(self.rank)


class _World:
    """The meetings of all groups, in their order, and the worlds made of some of its ranks."""

    def __init__(self, node_of: Sequence[int]) -> None:
        self.node_of = node_of
        self.meetings: dict[tuple[Channel, int], _Meeting] = {}
        self.turn: dict[tuple[Channel, int], int] = {}
        self.started = 0
        self.users: list[list[weakref.ref[Callable[[], None]]]] = [[] for _ in node_of]
        self.subsets: dict[tuple[int, ...], list[SimulatedComm]] = {}
        self.parts: dict[int, SimulatedComm] = {}
        """By rank, its comm across the replicas of a sharded model."""

    def start(self, rank: int, channel: Channel, ranks: tuple[int, ...], collective: Collective) -> _Seat:
        turn = self.turn.get((channel, rank), 0)
        self.turn[channel, rank] = turn + 1
        self.started += 1
        meeting = self.meetings.setdefault((channel, turn), _Meeting(ranks))
        meeting.bring(rank, collective)
        if meeting.done():
            del self.meetings[channel, turn]
        return _Seat(meeting, rank, collective)

    def all_started(self) -> int:
        """Return the number of collectives started here and across replicas."""
        return self.started + sum(part._world.started for part in self.parts.values())


class SimulatedComm(Comm):
    """One rank of a simulated world; made by `simulated_world`, or by `among` from one that was."""

    wire = "simulated"
    takes_turns = True
    link = Link()  # there is nothing to be measured
    no_threads = "simulated ranks take turns in one thread: start real processes, or simulate LocalSGD"

    def __init__(self, world: _World, rank: int) -> None:
        super().__init__(rank, len(world.node_of), DEADLINE)
        self._world = world
        self._set_nodes(world.node_of)
        self._whole: SimulatedComm | None = None  # the comm of all shards, if this one is across replicas
        world.users[rank] = self._users

    def _start(self, collective: Collective, ranks: tuple[int, ...]) -> Handle:
        if collective.group == "replica" and self._whole is not None:
            return self._whole._world.start(self._whole.rank, ranks, ranks, collective)
        return self._world.start(self.rank, self._channel(collective.group), ranks, collective)

    def _among(self, members: tuple[int, ...], given: Iterable[int] | RankSet) -> Comm | None:
        if self.rank not in members:
            return None
        made, place = self._world.subsets.get(members), members.index(self.rank)
        if made is None or made[place].has_ended():  # the first rank to ask makes it for all of them, so that they meet
            made = self._world.subsets[members] = _comms([self._world.node_of[rank] for rank in members])
        return made[place]

    def _share_replica(self, comm: Comm, replicas: Sequence[tuple[int, ...]]) -> None:
        assert isinstance(comm, SimulatedComm)
        mine = next(members for members in replicas if self.rank in members)
        self._world.parts[self.rank] = comm._across(self, mine)

    def _across(self, whole: SimulatedComm, replica: tuple[int, ...]) -> SimulatedComm:
        self._whole, self._ranks["replica"] = whole, replica
        return self

    def wait(self, handle: Handle, deadline: float | None = None) -> Tensor:
        """Wait by advancing the missing ranks' exchanges.

        Raises the errors of their own code unchanged, and CommError if they cannot get there.
        """
        while not handle.done():
            assert isinstance(handle, _Seat)
            missing, user = handle.meeting.missing(), handle.collective.user
            # a missing rank may itself wait for one that has arrived here, but is behind in another collective
            if not self._move(missing, user) and not self._move((r for r in range(self.size) if r != self.rank), user):
                raise CommError(
                    f"rank {self.rank} waits for {handle.collective.describe()}, which rank(s) "
                    f"{', '.join(map(str, missing))} did not start: in a simulated world every rank must finish its "
                    f"backward pass before the first one steps"
                )
        return handle.result()

    def nudge(self, user: int | None = None) -> None:
        """Advance all ranks' exchanges, for one user or for all, until each waits for a rank."""
        while self._move(range(self.size), user):
            pass

    def _move(self, ranks: Iterable[int], user: int | None) -> bool:
        """Advance the exchanges of these ranks, for one user or for all; return True if any got further."""
        if self._whole is not None:
            whole = self._whole._world
            before = whole.all_started()
            for part in whole.parts.values():
                _progress(part._world, range(part.size), user)
            return whole.all_started() > before
        before = self._world.started
        _progress(self._world, ranks, user)
        return self._world.started > before


def _progress(world: _World, ranks: Iterable[int], user: int | None) -> None:
    """Advance the exchanges of some ranks, for one user or for all."""
    for rank in ranks:
        for number, reference in enumerate(world.users[rank]):
            progress = reference() if user is None or number == user else None
            if progress is not None:
                progress()


def simulated_world(size: int, nodes: int = 1, checksums: bool = False) -> list[SimulatedComm]:
    """Return `size` ranks spread evenly over `nodes` machines, rank 0 first, with `checksums` as in `dgcopt.init`.

    Raises ConfigError if the ranks do not divide.
    """
    if check_whole(size, "size", 1) % check_whole(nodes, "nodes", 1):
        raise ConfigError(f"{size} ranks cannot be spread evenly over {nodes} nodes")
    comms = _comms([rank // (size // nodes) for rank in range(size)])
    for comm in comms:
        comm.verify(checksums)
    return comms


def _comms(node_of: Sequence[int]) -> list[SimulatedComm]:
    """Return all ranks of a new world, one for each machine number."""
    world = _World(node_of)
    return [SimulatedComm(world, rank) for rank in range(len(node_of))]


def simulate(exchanges: Sequence[Exchange], comms: Sequence[SimulatedComm] | None = None) -> list[Tensor]:
    """Drive one exchange per rank, each as far as it gets, and return their results, rank by rank.

    `exchanges` are generators of collectives, such as `Compressor.exchange` makes; `comms` the ranks, by default as
    many of one machine. Raises MismatchError if the ranks do not yield the same collectives.
    """
    comms = simulated_world(len(exchanges)) if comms is None else comms
    exchanges = [lowered(exchange, comm) for comm, exchange in zip(comms, exchanges, strict=True)]
    results: dict[int, Tensor] = {}
    waiting: dict[int, Handle] = {}
    while len(results) < len(exchanges):
        ready = [r for r in range(len(exchanges)) if r not in results and (r not in waiting or waiting[r].done())]
        if not ready:
            raise MismatchError(f"rank(s) {sorted(results)} ended their exchange while rank(s) {sorted(waiting)} go on")
        for rank in ready:
            result = waiting.pop(rank).result() if rank in waiting else None
            try:
                collective = exchanges[rank].send(result)  # type: ignore[arg-type]  # None starts a generator
            except StopIteration as stop:
                results[rank] = stop.value
            else:
                waiting[rank] = comms[rank].start(collective)
    return [results[rank] for rank in range(len(exchanges))]
