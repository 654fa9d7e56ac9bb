"""The interface of every wire: the ranks, and collectives that are started and waited for."""

from __future__ import annotations

import os
import socket
import sys
import time
import weakref
from abc import ABC, abstractmethod
from collections.abc import Callable, Generator, Iterable, Sequence
from operator import index
from types import MethodType
from typing import Any, ClassVar, Literal, NoReturn, Protocol, TypeAlias, TypeVar

import torch
from torch import Tensor

from ..collectives import (
    OPS,
    AllGather,
    AllReduce,
    AllToAll,
    Broadcast,
    Collective,
    Exchange,
    Group,
    Link,
    Rank,
    ReduceScatter,
    SendRecv,
    carried,
    on_cpu,
    reduce_rows,
)
from ..errors import CommError, ConfigError, DGCError, MismatchError
from ..errors.checks import is_rank
from .checksum import checked
from .failures import Failures
from .handles import Finished, Handle

__all__ = ["DEADLINE", "Channel", "Comm", "LocalComm", "RankSet", "lowered"]

DEADLINE = 300.0
"""Default deadline: seconds that a rank waits for a collective before it raises."""

Channel: TypeAlias = tuple[int, ...] | Literal["replica", "control", "agreement"]
"""Key within which collectives are matched: the ranks of a group, or the name of a group for small messages."""

Result = TypeVar("Result")


class RankSet(Protocol):
    """An object with `ranks`, such as Horovod's ProcessSet."""

    ranks: Iterable[int] | None


class Comm(Failures, ABC):
    """One rank's connection to all ranks over a wire (torch.distributed, Horovod, MPI or the simulator).

    Collectives of one group must be started in the same order on all its ranks; those of the groups "control" and
    "agreement" are matched apart from all others.

    Attributes: those of `Nodes`, and

        checksums: True if messages are verified; equal on all ranks.
        streams: number of connections to each other rank over which messages are spread.
    """

    checksums: bool = False
    streams: int = 1
    takes_turns: ClassVar[bool] = False
    """True if ranks take turns in one thread, so that none can wait for a later call of another."""
    elastic: bool = False
    """True if ranks may join while others train; no collective may then wait before a new rank has its state."""
    survives: bool = False
    """True if ranks may be lost, or join, while the others train on: see `confirm` and `recover`."""
    generation: int = 0
    """Number of memberships that this comm has had."""
    commits: int = 0
    """Confirmed steps, if ranks survive."""
    members: tuple[str, ...] = ()
    """Unique names of the processes by rank, if ranks survive."""
    copy_every: int = 0
    """Steps between copies of each rank's residual to another rank, if ranks survive; 0 for no copies."""
    link: Link | None = None
    """Measured speed of the wire, the same on all ranks; None if not measured."""
    joins_replicas: bool = False
    """True for a comm of one rank per replica, as `across_replicas` makes it."""
    is_part: bool = False
    """True for a comm of a subset of the ranks, as `among` makes it."""
    no_threads: str = ""
    """Reason why no other thread may use a second comm of the same ranks, as `among` makes it; empty if one may."""
    _is_closed: bool = False

    def __init__(self, rank: int, size: int, deadline: float = DEADLINE) -> None:
        if not 0 <= rank < size:
            raise ConfigError(f"rank {rank} does not exist among {size} ranks")
        if not deadline > 0:
            raise ConfigError(f"deadline must be a positive number of seconds, not {deadline}")
        self.deadline = deadline
        self._users: list[weakref.ref[Callable[[], None]]] = []
        self._leaving: list[Callable[[], None]] = []
        self._set_ranks(rank, size)

    # -- ranks and groups --------------------------------------------------------------------------------------------

    def _find_nodes(self, launched_on: str = "") -> None:
        """Ask every rank for the name of its machine: the launcher's, or its own.

        DGCOPT_NODE overrides it if host names are not distinct.
        """
        name = os.environ.get("DGCOPT_NODE") or launched_on or socket.gethostname()
        mine = torch.zeros(256, dtype=torch.uint8, device="cpu")
        encoded = name.encode()[:256]
        mine[: len(encoded)] = torch.frombuffer(bytearray(encoded), dtype=torch.uint8)
        rows = [bytes(row.tolist()) for row in self.run(AllGather(self.to_wire(mine), label="names of machines")).cpu()]
        self._set_nodes([rows.index(row) for row in rows])

    def _name_ranks(self, names: Sequence[str]) -> None:
        """Name the ranks of this comm in messages, in place of their numbers in it."""
        ranks = Rank.of_group(names)
        self.rank = ranks[self.rank]
        self._ranks = {group: tuple(ranks[place] for place in of) for group, of in self._ranks.items()}

    def set_link(self, link: Link) -> None:
        """Set the measured speed of the wire, the same on all ranks."""
        self.link = link

    def to_wire(self, tensor: Tensor) -> Tensor:
        """Move a small bookkeeping tensor to the device of this wire's collectives (the GPU for NCCL)."""
        return tensor

    def verify(self, checksums: bool) -> None:
        """Verify messages by checksums, on all ranks alike; False to trust the wire."""
        self.checksums = checksums

    def copy_residuals(self, every: int) -> None:
        """Copy each rank's residual to another rank every `every` steps; 0 for no copies."""
        self.copy_every = every

    def spread(self, streams: int) -> None:
        """Spread exchanges over `streams` connections to each other rank; every rank must call it with the same number.

        Raises ConfigError if the library has only one.
        """
        if streams > 1 and self.size > 1:
            instead = f": mpirun --mca btl_tcp_links {streams} has MPI use so many" if self.wire == "mpi" else ""
            raise ConfigError(f"init(streams={streams}) is for the wire torch, not for {self.wire}{instead}")

    def ranks(self, group: Group = "world") -> tuple[int, ...]:
        """Return the ranks of one of this rank's groups, ascending."""
        return self._ranks[group]

    def size_of(self, group: Group) -> int:
        """Return the number of ranks in the group."""
        return len(self.ranks(group))

    def is_void(self) -> bool:
        """Return True if the library was restarted since this comm was made; its ranks are gone or renumbered."""
        return False

    def has_ended(self) -> bool:
        """Return True if no collective can be started: this comm is closed, or the script has ended the library."""
        return self._is_closed

    def _channel(self, group: Group) -> Channel:
        """Return the group's key in the tables of a wire."""
        return group if group in ("replica", "control", "agreement") else self._ranks[group]

    def among(self, ranks: Iterable[int] | RankSet | Literal["node", "across"]) -> Comm:
        """Return a comm of some of this comm's ranks, renumbered from 0 in ascending order.

        A rank outside, or alone in the set, gets a LocalComm. Every rank of this comm must call it with the same
        `ranks`: whole numbers, or an object that has them as `.ranks`, such as Horovod's ProcessSet; or "node" or
        "across", with which every rank gets the set that it is in: the ranks of its machine, or those of its local
        rank on all machines that have so many. The new comm has this one's deadline and checksums. On torch and Horovod
        it counts as one node, and only a comm of all ranks can be asked. Raises ConfigError for ranks that are no
        whole numbers, repeated or out of range, MismatchError if ranks ask for different ones, CommError if the library
        refuses the group.
        """
        given: Any = ranks
        if isinstance(given, str):
            if given not in self._partitions:
                raise ConfigError(f"among() needs the ranks as whole numbers, 'node' or 'across', not {given!r}")
            sets = self._partitions[given]
        else:
            sets = [self._asked_for(given)]
        comm: Comm | None = None
        for members in sets:
            if len(members) > 1:  # every rank takes part in making each
                comm = self._make(members, list(members) if isinstance(given, str) else given) or comm
        comm = comm or LocalComm(self.deadline)
        comm.checksums = self.checksums
        comm.is_part = self.is_part or comm.size < self.size
        return comm

    def across_replicas(self, replicas: Sequence[Sequence[int]]) -> Comm:
        """Return a comm of the ranks that hold the same shard of the model as this one: one rank of each replica.

        Args:
            replicas: the ranks of each replica, shard by shard: all ranks of this comm, the same on all of them.

        Its group "replica" is this rank's replica, in this comm's numbers. Raises ConfigError on other wires than
        torch.distributed, and as `among` does.
        """
        comm: Comm = self
        for members in zip(*replicas, strict=True):
            made = self.among(members)
            if self.rank in members:
                comm = made
                comm._name_ranks([f"{rank} (replica {place})" for place, rank in enumerate(sorted(members))])
        self._share_replica(comm, [tuple(sorted(members)) for members in replicas])
        comm.joins_replicas = True
        return comm

    def place_in_replica(self) -> dict[str, int]:
        """Return which of the shards of its replica this rank holds: "rank" of "size"."""
        ranks = self.ranks("replica")
        return {"rank": ranks.index(self._rank_in("replica")), "size": len(ranks)}

    def _share_replica(self, comm: Comm, replicas: Sequence[tuple[int, ...]]) -> None:
        """Give a comm of one rank per replica its group "replica"; every rank takes part in making each group."""
        raise ConfigError(f"sharded parameters are exchanged over torch.distributed, and the wire is {self.wire}")

    def _asked_for(self, given: Any) -> tuple[int, ...]:
        """Return the ranks that `given` names, if all ranks name the same."""
        asked = getattr(given, "ranks", given)
        try:
            members = tuple(sorted(map(index, asked)))
        except TypeError as error:
            raise ConfigError(f"among() needs the ranks as whole numbers, not {asked!r} of {given!r}") from error
        if not members or len(set(members)) < len(members) or members[0] < 0 or members[-1] >= self.size:
            raise ConfigError(
                f"among() needs one or more of the ranks 0 to {self.size - 1}, each once, not {list(members)}"
            )
        if self.waits_at_start:
            mine = torch.zeros(self.size, dtype=torch.uint8, device="cpu")
            mine[list(members)] = 1
            rows = self.run(AllGather(mine, group="agreement", label="ranks of a process set"))
            named = [row.nonzero().flatten().tolist() for row in rows]
            for rank, theirs in enumerate(named):
                if theirs != named[0]:
                    raise MismatchError(
                        f"rank {self.rank}: rank 0 asks for a process set of ranks {named[0]}, rank {rank} for "
                        f"{theirs}. Every rank must give the same ranks, whether it is one of them or not; "
                        f"process_set='node' or 'across' gives each rank its own set"
                    )
        return members

    def _make(self, members: tuple[int, ...], given: Any) -> Comm | None:
        try:
            return self._among(members, given)
        except DGCError:
            raise
        except (RuntimeError, ValueError) as error:
            raise CommError(
                f"rank {self.rank}: {self.wire} could not make a group of rank(s) {list(members)}: {error}"
            ) from error

    # -- one collective ----------------------------------------------------------------------------------------------

    def start(self, collective: Collective) -> Handle:
        """Start a collective; returns at once if the library is asynchronous.

        Raises CommError if its shape does not fit the group, the library refuses it, or this comm is closed and the
        group has other ranks.
        """
        ranks = self.ranks(collective.group)
        self._check(collective, len(ranks))
        if len(ranks) == 1 and not self._supports_alone(collective):
            return Finished(collective, alone(collective))
        if self.has_ended() and not self.is_void():  # the error of a library that was restarted says more
            raise CommError(
                f"rank {self.rank}: {collective.describe()}: this wire is closed. Join by dgcopt.init(), and let each "
                f"optimizer join by optimizer.rejoin()."
            )
        tensor = collective.tensor.resolve_conj().resolve_neg().contiguous()  # wires send memory as it is
        if tensor.numel() == 1 and set(tensor.stride()) - {1}:
            # contiguous by any strides, but some do not allow a view of its bytes
            tensor = tensor.clone(memory_format=torch.contiguous_format)
        collective.send(tensor)
        try:
            return self._start(collective, ranks)
        except DGCError:
            raise
        except (RuntimeError, ValueError) as error:
            raise self._refused(collective, error) from error

    def wait(self, handle: Handle, deadline: float | None = None) -> Tensor:
        """Wait for a collective and return its result.

        `deadline` in seconds from now, this comm's own by default. Raises TimeoutExceeded past it, CommError if the
        collective failed. Polls with sleeps that grow to 1 ms, so that ranks on shared cores do not starve each other.
        """
        limit = self.deadline if deadline is None else deadline
        start, pause = time.monotonic(), 20e-6
        try:
            while not handle.done():
                if time.monotonic() - start > limit:
                    raise self._late(handle.collective, limit)
                time.sleep(pause)
                pause = min(2 * pause, 1e-3)
            return handle.result()
        except DGCError:
            raise
        except (RuntimeError, ValueError) as error:
            raise self._failed(handle.collective, error) from error

    def finish_on_device(self, deadline: float | None = None) -> None:  # most wires have nothing to do
        """Wait for collectives that a device still runs after `wait`; call it before the host reads from the device.

        `deadline` in seconds from now, this comm's own by default. Raises TimeoutExceeded past it, CommError if a
        collective failed. Returns at once on wires with a `wait` that blocks the host.
        """

    def sent(self, collective: Collective) -> int:
        """Return the bytes that this rank sends for a collective, by the wire's or the bandwidth-optimal algorithm."""
        return collective.sent(self.size_of(collective.group))

    def run(self, collective: Collective, deadline: float | None = None) -> Tensor:
        """Start a collective and wait for it, `lowered` if need be."""
        return self.drive(_one(collective), deadline)

    def drive(self, exchange: Generator[Collective, Tensor, Result], deadline: float | None = None) -> Result:
        """Run a whole exchange, waiting at each of its collectives; return its result."""
        exchange = lowered(exchange, self)
        result: Tensor | None = None
        with on_cpu():
            while True:
                try:
                    collective = exchange.send(result)  # type: ignore[arg-type]  # the first send starts a generator
                except StopIteration as stop:
                    return stop.value
                result = self.wait(self.start(collective), deadline)

    # -- for the wires -----------------------------------------------------------------------------------------------

    @abstractmethod
    def _start(self, collective: Collective, ranks: tuple[int, ...]) -> Handle:
        """Start a supported collective among two or more ranks."""

    @abstractmethod
    def _among(self, members: tuple[int, ...], given: Iterable[int] | RankSet) -> Comm | None:
        """Return this rank's comm of `members`, for which `given` was given; None if it is not a member.

        Called on every rank of this comm, so that all can take part in making the group.
        """

    def supports(self, collective: Collective) -> bool:
        """Return True if the library has this collective for this dtype; otherwise `emulate` builds it from others."""
        return True

    def _supports_alone(self, collective: Collective) -> bool:
        """Return True if the wire handles collectives of a single rank itself."""
        return False

    def emulate(self, collective: Collective) -> Exchange:
        """Carry out a collective that the library lacks, by supported ones, at the same cost in bytes."""
        size = self.size_of(collective.group)
        same = {"group": collective.group, "label": collective.label}
        tensor = collective.tensor
        if isinstance(collective, ReduceScatter):
            self._check(collective, size)
            rows = yield AllToAll(tensor.reshape(size, -1), **same)  # type: ignore[arg-type]
            return reduce_rows(rows, collective.op).view(tensor.shape[0] // size, *tensor.shape[1:])
        if isinstance(collective, AllReduce):
            padded = tensor.new_zeros(-(-tensor.numel() // size) * size)
            padded[: tensor.numel()] = tensor.reshape(-1)
            rows = yield AllToAll(padded.view(size, -1), **same)  # type: ignore[arg-type]
            mine = reduce_rows(rows, collective.op)
            whole = yield AllGather(mine, **same)  # type: ignore[arg-type]
            return whole.view(-1)[: tensor.numel()].view(tensor.shape)
        raise CommError(f"rank {self.rank}: {self.wire} does not have {collective.describe()}")

    @property
    def waits_at_start(self) -> bool:
        """True if ranks may wait for each other at start-up, before any has taken a step."""
        return not (self.takes_turns or self.elastic or self.survives)

    def nudge(self, user: int | None = None) -> None:  # no need if ranks run by themselves
        """Run the pending jobs of all ranks as far as possible, for one user or for all, if ranks take turns."""

    def attend(self, progress: Callable[[], None]) -> int:
        """Register a user of this wire and return its number, by which all ranks know it.

        `progress` moves its exchanges on while another rank waits; only the simulated wire calls it. The wire does not
        keep it alive.
        """
        self._users.append(weakref.WeakMethod(progress) if isinstance(progress, MethodType) else weakref.ref(progress))
        return len(self._users) - 1

    # -- where ranks survive -----------------------------------------------------------------------------------------

    def begin_step(self) -> None:  # elsewhere the ranks stay the same
        """Admit processes that have asked to join; every rank calls it at the beginning of a step."""

    @property
    def is_called(self) -> bool:
        """True if other ranks wait in `gather`, or have gone on without this one."""
        return False

    def gather(self, quorum: int, grace: float) -> None:
        """Wait until all ranks have come here, at most `grace` seconds longer than for `quorum` of them.

        Raises CommError if some are late then: `recover` goes on without them.
        """
        raise ConfigError("a quorum of ranks needs dgcopt.init(survive=True)")

    def return_late(self, error: CommError) -> None:
        """Join the ranks that have gone on without this one, in the same process. Raises the error where it cannot."""
        raise error

    def close_admission(self) -> None:  # elsewhere the ranks stay the same
        """Admit no process until the next `begin_step`, as this rank is past the state that it would give."""

    def confirm(self, start: Callable[[Collective, str], Handle]) -> bool:
        """Commit a prepared or skipped step together with all ranks.

        Returns False if the membership has changed since. Raises CommError if the step is aborted on all survivors
        instead.
        """
        return True

    def complete(self, act: Callable[[], Result]) -> Result:
        """Call a function of collectives on every rank; after a loss repeat it until all survivors have done so."""
        return act()

    def recover(self, error: CommError | None = None) -> None:
        """Continue with the surviving ranks after an error of this comm. Raises the error if they cannot."""
        if error is not None:
            raise error

    def abort(self, code: int = 1) -> NoReturn:
        """Exit with this code; end the other ranks too if the launcher would not."""
        sys.exit(code)

    def before_close(self, leave: Callable[[], None]) -> None:
        """Register `leave`, to be called by `close` while the other ranks can still be reached."""
        self._leaving.append(leave)

    def close(self) -> None:
        """Leave the wire; its handles are void."""
        while self._leaving:
            self._leaving.pop()()
        self._users.clear()
        self._is_closed = True

    def _check(self, collective: Collective, size: int) -> None:
        tensor, problem = collective.tensor, ""
        if isinstance(collective, ReduceScatter) and (tensor.dim() == 0 or tensor.shape[0] % size):
            problem = f"its first dimension must be divisible by {size}"
        elif isinstance(collective, AllToAll) and (tensor.dim() == 0 or tensor.shape[0] != size):
            problem = f"its first dimension must be {size}, a row for each rank"
        elif isinstance(collective, Broadcast) and not is_rank(collective.root, size):
            problem = f"root {collective.root!r} is not among the {size} ranks of group {collective.group}"
        elif isinstance(collective, SendRecv):
            for peer in (collective.to, collective.source):
                if peer is not None and not is_rank(peer, size):
                    problem = f"peer {peer!r} is not among the {size} ranks of group {collective.group}"
        elif isinstance(collective, AllReduce | ReduceScatter) and collective.op not in OPS:
            problem = f"op must be one of {', '.join(OPS)}, not {collective.op!r}"
        if problem:
            raise CommError(f"rank {self.rank}: {collective.describe()}: {problem}")

    def __repr__(self) -> str:
        return f"<{type(self).__name__} rank {self.rank} of {self.size}, node {self.node} of {self.nodes}>"


class LocalComm(Comm):
    """The wire of a single process: every collective is its own result."""

    wire = "local"

    def __init__(self, deadline: float = DEADLINE) -> None:
        super().__init__(0, 1, deadline)

    def _start(self, collective: Collective, ranks: tuple[int, ...]) -> Handle:
        raise AssertionError("a single rank starts nothing")  # Comm.start answers groups of one by itself

    def _among(self, members: tuple[int, ...], given: Iterable[int] | RankSet) -> Comm:
        raise AssertionError("a single rank has no two members")


def alone(collective: Collective) -> Tensor:
    """Return the result of a collective in a group of one rank."""
    return collective.tensor.unsqueeze(0) if isinstance(collective, AllGather) else collective.tensor


def _one(collective: Collective) -> Exchange:
    return (yield collective)


def lowered(exchange: Generator[Collective, Tensor, Result], comm: Comm) -> Generator[Collective, Tensor, Result]:
    """Return the exchange in collectives that the wire's library has, verified if checksums are on."""
    exchange = _emulated(exchange, comm)
    return checked(exchange, comm.rank) if comm.checksums else exchange


def _emulated(exchange: Generator[Collective, Tensor, Result], comm: Comm) -> Generator[Collective, Tensor, Result]:
    def carry(collective: Collective) -> Exchange:
        # each rank gets another sum, which cannot be compared: with checksums the summands travel instead
        cannot_be_checked = comm.checksums and isinstance(collective, ReduceScatter)
        if comm.supports(collective) and not cannot_be_checked:
            return (yield collective)
        return (yield from comm.emulate(collective))

    return carried(exchange, carry)
