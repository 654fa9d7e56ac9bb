"""The torch wire for jobs that train on after ranks are lost.

Ranks meet in a store that outlives each of them, hosted by the agent of `dgcopt run --survive`. Each epoch, a period in
which the ranks stay the same, has Gloo groups of its own. A rank whose collective fails leaves them first: it shuts its
connections down, so that no thread of Gloo waits in them any longer, and tells the store, where a thread of every other
rank waits for that. Then the survivors agree on the next epoch (`dgcopt.comm.membership`) and build new groups.
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
import socket
import sys
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import replace
from datetime import timedelta
from itertools import pairwise
from typing import Any, TypeAlias

import torch
import torch.distributed as dist
from torch import Tensor

from ..collectives import (
    AllGather,
    AllReduce,
    AllToAll,
    Barrier,
    Broadcast,
    Collective,
    ReduceScatter,
    SendRecv,
)
from ..errors import CommError, ConfigError, QuorumLost, TimeoutExceeded, VotedOut
from .base import DEADLINE, Channel, Comm, Handle, RankSet, Result
from .membership import (
    MEMBER,
    STORE,
    Epoch,
    Rules,
    Status,
    agree,
    called_key,
    came_key,
    drive,
    failed_key,
    found,
    gone_key,
    has_begun,
    join,
    next_ask,
    noticed_key,
    trains_key,
)
from .torch import MOVED, REDUCE, REDUCED, Works, tells_all

__all__ = ["SurvivingComm", "TCPKeyValueStore"]

log = logging.getLogger("dgcopt")

LOOK = 0.2
"""Seconds between two polls: of rank 0 for processes that ask to join, and of every rank for the end of an epoch."""

BUILD = 20.0
"""Longest seconds for building the groups of an epoch; all members are known to be waiting for it."""

PAUSE = 0.005
"""Seconds between two polls of the store by an idle rank."""


class TCPKeyValueStore:
    """torch's TCPStore with the interface of the membership protocol. Raises CommError once the store is gone."""

    def __init__(self, host: str, port: int, deadline: float = DEADLINE) -> None:
        self._place = f"{host}:{port}"
        try:
            self.tcp = dist.TCPStore(
                host, port, is_master=False, timeout=timedelta(seconds=deadline), wait_for_workers=False
            )
        except RuntimeError as error:
            raise self._lost(error) from error
        _end_waits_after(deadline, port)

    def get(self, key: str) -> str | None:
        with self._reaching():
            return self.tcp.get(key).decode() if self.tcp.check([key]) else None

    def set(self, key: str, value: str) -> None:
        with self._reaching():
            self.tcp.set(key, value)

    def compare_set(self, key: str, value: str) -> str:
        with self._reaching():
            return bytes(self.tcp.compare_set(key, "", value)).decode()

    def wait(self, key: str, seconds: float) -> str | None:
        # torch's own wait logs two lines at each timeout, and blocks other threads' access to the store meanwhile
        end, pause = time.monotonic() + seconds, PAUSE / 4
        while (value := self.get(key)) is None and time.monotonic() < end:
            time.sleep(pause)
            pause = min(2 * pause, 4 * PAUSE)
        return value

    @contextlib.contextmanager
    def _reaching(self) -> Iterator[None]:
        try:
            yield
        except RuntimeError as error:
            raise self._lost(error) from error

    def _lost(self, error: Exception) -> CommError:
        reason = (str(error).strip().splitlines() or [type(error).__name__])[0]
        return CommError(
            f"the store at {self._place} does not answer ({reason:.200}). It is hosted by the first agent of "
            f"`dgcopt run --survive`; without it no rank can go on. Start the job anew from a checkpoint."
        )


class GlooComm(Comm):
    """Collectives over hand-made Gloo groups; CUDA tensors travel through the host."""

    wire = "torch"

    def __init__(self, rank: int, size: int, deadline: float) -> None:
        super().__init__(rank, size, deadline)
        self._groups: dict[Channel, Any] = {}

    def supports(self, collective: Collective) -> bool:
        if isinstance(collective, ReduceScatter):
            return False
        return not isinstance(collective, AllReduce) or collective.tensor.dtype in REDUCED

    def sent(self, collective: Collective) -> int:
        size = self.size_of(collective.group)
        return (size - 1) * collective.nbytes if tells_all(collective, size) else super().sent(collective)

    def _start(self, collective: Collective, ranks: tuple[int, ...]) -> Handle:
        group, tensor, size = self._groups.get(self._channel(collective.group)), collective.tensor, len(ranks)
        if group is None:
            raise CommError(f"rank {self.rank}: the group of {collective.describe()} is closed")
        tensor = tensor.cpu()
        if tensor.dtype not in MOVED and not isinstance(collective, AllReduce):
            tensor = tensor.view(-1).view(torch.uint8)
        divide_by = size if getattr(collective, "op", None) == "average" else 1
        output, to_all = tensor, tells_all(collective, size)
        works: list[dist.Work] = []
        if to_all:
            copies = tensor.view(-1).view(torch.uint8).repeat(size)
            output = tensor.new_empty(size, *tensor.shape)
            works.append(group.alltoall_base(output.view(-1).view(torch.uint8), copies, [], []))
        elif isinstance(collective, AllReduce):
            reducing = dist.AllreduceOptions()
            reducing.reduceOp = dist.ReduceOp(REDUCE[collective.op])
            works.append(group.allreduce([tensor], reducing))
        elif isinstance(collective, AllGather):
            output = tensor.new_empty(size, *tensor.shape)
            works.append(group.allgather([list(output.unbind(0))], [tensor]))
        elif isinstance(collective, AllToAll):
            output = torch.empty_like(tensor)
            works.append(group.alltoall_base(output, tensor, [], []))
        elif isinstance(collective, Broadcast):
            sending = dist.BroadcastOptions()
            sending.rootRank = collective.root
            works.append(group.broadcast([tensor], sending))
        elif isinstance(collective, SendRecv):
            if collective.source is not None:
                output = torch.empty_like(tensor)
                works.append(group.recv([output], collective.source, 0))
            if collective.to is not None:
                works.append(group.send([tensor], collective.to, 0))
        elif isinstance(collective, Barrier):
            works.append(group.barrier())
        else:
            raise CommError(f"torch.distributed does not have {collective.describe()}")
        return Works(collective, works, output, divide_by, to_all)

    def wait(self, handle: Handle, deadline: float | None = None) -> Tensor:
        """Wait as `Comm.wait` does, blocking inside the library."""
        if not isinstance(handle, Works):
            return super().wait(handle, deadline)
        limit = self.deadline if deadline is None else deadline
        try:
            handle.wait(limit)
            return handle.result()
        except RuntimeError as error:
            if "timed out" in str(error).lower() or "timeout" in str(error).lower():
                raise self._late(handle.collective, limit) from error
            raise self._failed(handle.collective, error) from error

    def _among(self, members: tuple[int, ...], given: Iterable[int] | RankSet) -> Comm | None:
        raise ConfigError(
            "dgcopt.init(survive=True) has no groups of some ranks, as process_set= and AsyncAverage need: leave "
            "survive=True or the group out"
        )


Transfer: TypeAlias = Callable[[Comm], None]
"""Sends this rank's state, as rank 0 of a comm, to its other ranks; there it receives the state."""


class SurvivingComm(GlooComm):
    """One rank's end of a wire that survives the loss of ranks; made by `dgcopt.init(survive=True)`.

    `rank` and `size` change when the membership does: at the end of a failed step, and at the first gradient of a step
    if a process has asked to join. A process that comes back is alone until it has taken over the state of a live rank
    (`come_back`).

    Args:
        store: where the ranks meet.
        me: this process.
        size: ranks of the first epoch.
        rules: limits of negotiations.

    Attributes: `epoch`, the membership, None before this process has come back; `commits`, steps committed by all
    optimizers of this wire; `give`, the transfer of state to newcomers, without which none is admitted; `lost_seconds`,
    time spent in recoveries.
    """

    survives = True

    def __init__(self, store: TCPKeyValueStore, me: Status, size: int, rules: Rules) -> None:
        super().__init__(0, 1, rules.deadline)
        self._store = store
        self._rules = rules
        self._device, self._address = _device()
        self._me = replace(me, where=json.dumps([_machine(), *self._address]))
        self.epoch: Epoch | None = None
        self.commits = 0
        self.lost_seconds = 0.0
        self.give: Transfer | None = None
        self._prepared = self._admits = self._change_due = self._trains = False
        self._grace: float | None = None  # of the round that this rank is in, if it waits for a quorum
        self._called = -1  # the number of commits after which some rank has come to a round
        self._handed = -1
        self._is_asked = False  # set on rank 0 if a process asks to join
        self._live = threading.Lock()
        self._for_groups: TCPKeyValueStore | None = None
        self._for_watching: TCPKeyValueStore | None = None
        self._connected: int | None = None  # epoch of the open connections
        self._watcher: threading.Thread | None = None
        if not drive(has_begun(), store):
            self._begin_or_recover(drive(found(self._me, size, rules, time.monotonic), store))

    def give_state_by(self, transfer: Transfer) -> None:
        """Admit newcomers from now on; `transfer` sends them this rank's state."""
        self.give = transfer

    @staticmethod
    def from_environment(env: Mapping[str, str], rules: Rules) -> SurvivingComm:
        """Join with the settings of the agent of `dgcopt run --survive`. Raises ConfigError if there is none."""
        missing = [name for name in (STORE, MEMBER, "RANK", "WORLD_SIZE") if name not in env]
        if missing:
            raise ConfigError(
                f"dgcopt.init(survive=True) needs a store that outlives every rank, and the environment lacks "
                f"{', '.join(missing)}: start the script by `dgcopt run --survive -np N train.py`"
            )
        if not sys.platform.startswith("linux"):
            raise ConfigError("dgcopt.init(survive=True) needs Linux, where a process can shut down Gloo's connections")
        host, _, port = env[STORE].rpartition(":")
        store = TCPKeyValueStore(host, int(port), rules.deadline)
        return SurvivingComm(store, Status(env[MEMBER], int(env["RANK"]), ""), int(env["WORLD_SIZE"]), rules)

    # -- epochs ------------------------------------------------------------------------------------------------------

    def _begin(self, epoch: Epoch) -> None:
        """Build the groups of an epoch and take this rank's number in it. May fail."""
        self.epoch, self.generation, self.members = epoch, epoch.number + 1, epoch.members
        self._set_ranks(epoch.members.index(self._me.member), len(epoch.members))
        places = [json.loads(where) for where in epoch.where]
        machines = [machine for machine, _, _ in places]
        self._set_nodes([machines.index(machine) for machine in machines])
        self.link = None
        self._users.clear()
        self._is_asked = False
        self._peers = {(host, port) for _, host, port in places} - {self._address}
        with self._live:
            self._connected = epoch.number
        name = "dgcopt watches the ranks"
        self._watcher = threading.Thread(target=self._watch, args=(epoch,), name=name, daemon=True)
        self._watcher.start()
        channels: list[tuple[Channel, tuple[int, ...]]] = [(self.ranks(), self.ranks())]
        channels += [("control", self.ranks()), ("agreement", self.ranks())]
        channels += [(members, members) for members in self._subgroups if self.rank in members]
        named = {key: [epoch.members[rank] for rank in ranks] for key, ranks in channels if len(ranks) > 1}
        self._groups = self._build(epoch, "", named)

    def _build(self, epoch: Epoch, prefix: str, channels: dict[Channel, list[str]]) -> dict[Channel, Any]:
        """Build a group of the members of each channel.

        Raises CommError or RuntimeError if they do not all come, at once if one is known to have ended: Gloo does not
        notice that. The attempt is then left to a thread.
        """
        built: dict[Channel, Any] = {}
        failures: list[Exception] = []

        def build() -> None:
            try:
                store, self._for_groups = self._for_groups or self._connection(), None
                for channel, members in channels.items():
                    built[channel] = self._group(store, f"{epoch.number}/{prefix}{channel}", members)
                self._for_groups = store  # unless it waits in vain: the next groups then need another one
            except Exception as error:  # raised below, in the thread that waits
                failures.append(error)

        thread = threading.Thread(target=build, name="dgcopt builds groups", daemon=True)
        thread.start()
        thread.join(LOOK)
        everyone = {one for members in channels.values() for one in members}
        while thread.is_alive():
            gone = [one for one in everyone if self._store.get(gone_key(one)) is not None]
            if gone or self._connected != epoch.number:
                raise CommError(
                    f"{' and '.join(gone) or 'a rank'} has left epoch {epoch.number} before its groups were built"
                )
            thread.join(LOOK)
        if failures:
            raise failures[0]
        if self._connected != epoch.number:  # another rank has left it meanwhile; its thread may still have built
            raise CommError(f"a rank has left epoch {epoch.number} while its groups were built")
        return built

    def _connection(self) -> TCPKeyValueStore:
        """Return a further connection to the store, for a thread: torch blocks other threads while one waits.

        Connections are kept for later epochs: torch's store looks up the name of each client, and serves nobody
        meanwhile, for seconds if no name server answers.
        """
        return TCPKeyValueStore(self._store.tcp.host, self._store.tcp.port, self.deadline)

    def _group(self, store: TCPKeyValueStore, name: str, members: list[str]) -> dist.ProcessGroupGloo:
        options: Any = dist.ProcessGroupGloo._Options()  # type: ignore[attr-defined]
        options._devices = [self._device]
        options._timeout = timedelta(seconds=min(self.deadline, BUILD))
        place = members.index(self._me.member)
        prefixed = dist.PrefixStore(f"dgcopt/groups/{name}", store.tcp)
        group = dist.ProcessGroupGloo(prefixed, place, len(members), options)
        group._set_default_timeout(timedelta(seconds=self.deadline))
        return group

    def _watch(self, epoch: Epoch) -> None:
        """Shut this rank's connections down once another rank has left the epoch; on rank 0, poll for newcomers."""
        with contextlib.suppress(CommError):
            store = self._for_watching = self._for_watching or self._connection()
            while True:
                time.sleep(LOOK)
                is_asked = self.rank == 0 and self.give is not None and store.get(next_ask(epoch)) is not None
                with self._live:
                    if self._connected != epoch.number:  # the next epoch may have answered the request
                        return
                    self._is_asked = is_asked
                commits = self.commits
                if store.get(called_key(epoch.number, commits)) is not None:
                    self._called = commits
                if store.get(failed_key(epoch)) is not None:
                    self._disconnect(epoch)
                    store.set(noticed_key(epoch.number, self._me.member), "")
                    return

    def _disconnect(self, epoch: Epoch) -> None:
        """Shut down the connections of an epoch, so that every wait in them fails at once, here and elsewhere."""
        with self._live:
            if self._connected == epoch.number:
                _shut_down(self._address, self._peers)
                self._connected = None

    def _leave(self) -> None:
        """Leave the groups of the epoch before this rank announces itself for the next one."""
        assert self.epoch is not None
        self._disconnect(self.epoch)
        try:
            self._store.set(failed_key(self.epoch), str(self.rank))
        finally:  # open groups abort a process that ends, from their threads
            for group in self._groups.values():
                group.abort()
            self._groups.clear()

    def _begin_or_recover(self, epoch: Epoch) -> None:
        try:
            self._begin(epoch)
        except RuntimeError as error:
            log.warning("dgcopt: epoch %d could not begin, and is left again: %s", epoch.number, error)
            self.recover()

    def recover(self, error: CommError | None = None) -> None:
        """Begin the next epoch with the surviving ranks and those that ask to join.

        Afterwards the step that `error` has interrupted is committed, if `commits` has grown, or else aborted on all.
        Raises VotedOut if the others have gone on without this rank, QuorumLost if too few are left.
        """
        assert self.epoch is not None
        start, before, step = time.monotonic(), self.epoch, self.commits
        patience = self._rules.notice if isinstance(error, TimeoutExceeded) else None
        waits_for_busy = self._grace is None
        if self._grace is not None:
            patience = min(self._grace, self._rules.notice)
        while True:
            times = [time.monotonic()]
            self._leave()
            times.append(time.monotonic())
            status = replace(self._me, commits=self.commits, prepared=self._prepared, admits=self._admits)
            negotiation = agree(status, self.epoch, self._rules, time.monotonic, patience, waits_for_busy)
            epoch = drive(negotiation, self._store)
            times.append(time.monotonic())
            if self.commits not in (-1, epoch.commits):
                self.commits, self._admits = epoch.commits, False
            self._prepared = self._change_due = False
            self._grace = None
            try:
                self._begin(epoch)
                break
            except RuntimeError as failure:
                log.warning("dgcopt: epoch %d could not begin, and is left again: %s", epoch.number, failure)
        seconds = time.monotonic() - start
        self.lost_seconds += seconds
        ended = "committed" if self.commits > step else "aborted"
        log.warning(
            "dgcopt: epoch %d has %d ranks, after %d: lost %s, new %s. This one is rank %d. It took %.2f s (to leave "
            "%.2f, agree %.2f, build groups %.2f); the step under way was %s",
            *(epoch.number, len(epoch.members), len(before.members)),
            *(sorted({*before.members} - {*epoch.members}), sorted({*epoch.members} - {*before.members})),
            *(self.rank, seconds, *(later - sooner for sooner, later in pairwise([*times, time.monotonic()])), ended),
        )

    # -- steps -------------------------------------------------------------------------------------------------------

    def confirm(self, start: Callable[[Collective, str], Handle]) -> bool:
        """Commit as `Comm.confirm` does; if it raises CommError the next epoch has begun."""
        self._prepared = True
        wanted = torch.tensor([self._is_asked], dtype=torch.int32)
        before = self.commits
        try:
            told = self.wait(start(AllReduce(wanted, op="max", group="control"), "commit"))
        except CommError as error:
            if isinstance(error, VotedOut | QuorumLost):
                raise
            self.recover(error)
            if self.commits == before:
                raise
            return False
        self._prepared = self._admits = False
        self._grace = None
        self.commits += 1
        self._change_due = bool(told)
        return True

    def begin_step(self) -> None:
        """Admit processes that ask to join; every rank calls it between two steps.

        Raises ConfigError on a rank that has come back and has no state yet.
        """
        if self.epoch is None:
            raise ConfigError(
                f"{self._me.member}: this rank has come back to a job that trains, and has no state. Before the first "
                f"step, make state = dgcopt.survive.State(model=..., optimizer=..., step=0) and call state.sync()"
            )
        if not self._trains:
            self._trains = True
            self._store.set(trains_key(self._me.member), "")
        self._admits = True
        if self._change_due:
            self.recover()
        if self.epoch.newcomers and self._handed < self.epoch.number:
            self._handed = self.epoch.number
            self._hand_over(self.epoch)

    @property
    def is_called(self) -> bool:
        """As `Comm.is_called`."""
        return self.epoch is not None and (self._called == self.commits or self._connected != self.epoch.number)

    def gather(self, quorum: int, grace: float) -> None:
        """As `Comm.gather`. Half of the ranks are needed to go on without the others, so the quorum is no smaller."""
        epoch, self._grace = self.epoch, grace
        assert epoch is not None
        quorum = min(len(epoch.members), max(quorum, (len(epoch.members) + 1) // 2))
        self._store.set(called_key(epoch.number, self.commits), "")
        self._store.set(came_key(epoch.number, self.commits, self._me.member), "")
        missing = [member for member in epoch.members if member != self._me.member]
        start, reached = time.monotonic(), float("inf")
        while missing:
            missing = [one for one in missing if self._store.get(came_key(epoch.number, self.commits, one)) is None]
            now = time.monotonic()
            if len(epoch.members) - len(missing) >= quorum:
                reached = min(reached, now)
            if missing and now - reached > grace:
                raise CommError(f"rank {self.rank}: {', '.join(missing)} did not come to the round in {grace:g} s")
            if missing and now - start > self.deadline:
                raise TimeoutExceeded(f"rank {self.rank}: {', '.join(missing)} did not come in {self.deadline:g} s")
            gone = [one for one in missing if self._store.get(gone_key(one)) is not None]
            if gone or self._connected != epoch.number:
                raise CommError(f"rank {self.rank}: {', '.join(gone) or 'another rank'} has left the round")
            if missing:
                time.sleep(4 * PAUSE)

    def return_late(self, error: CommError) -> None:
        """As `Comm.return_late`."""
        if self.give is None:
            raise error
        log.warning("dgcopt: %s is late, and joins the others again: %s", self._me.member, error)
        while True:
            try:
                return self.come_back(self.give)
            except VotedOut as again:  # the others have begun another epoch before this one had their state
                log.warning("dgcopt: %s asks again: %s", self._me.member, again)

    def close_admission(self) -> None:
        """As `Comm.close_admission`; processes without state are voted out of an epoch that begins meanwhile."""
        self._admits = False

    def complete(self, act: Callable[[], Result]) -> Result:
        """Call as `Comm.complete` does; the function ends with a commit of its own."""
        self.close_admission()
        while True:
            generation = self.generation
            try:
                result = act()
                self.confirm(self._start_labelled)
                return result
            except (VotedOut, QuorumLost):
                raise
            except CommError as error:
                if self.generation == generation:  # otherwise the confirmation has recovered already
                    self.recover(error)

    def _start_labelled(self, collective: Collective, label: str) -> Handle:
        collective.call(label, collective.user)
        return self.start(collective)

    # -- coming back -------------------------------------------------------------------------------------------------

    @property
    def is_pending(self) -> bool:
        """True for a process that has rejoined and has no state yet."""
        return self.epoch is None or self.commits < 0

    def _hand_over(self, epoch: Epoch) -> None:
        """Send this rank's state to the newcomers, if this is the first rank with state."""
        giver = next(member for member in epoch.members if member not in epoch.newcomers)
        if giver != self._me.member:
            return
        start = time.monotonic()
        try:
            if self.give is None:
                raise CommError("dgcopt.survive.State.sync() was not called here")
            self.give(self._pair(epoch))
        except (CommError, RuntimeError) as error:  # the newcomer is gone, as the vote will show
            log.warning("dgcopt: rank %d could not give its state to a new rank: %s", self.rank, error)
            return
        log.info("dgcopt: rank %d gave its state to %s in %.2f s", self.rank, epoch.newcomers, time.monotonic() - start)

    def _pair(self, epoch: Epoch) -> Comm:
        """Return a comm of the sender of state, as rank 0, and the newcomers."""
        giver = next(member for member in epoch.members if member not in epoch.newcomers)
        members = [giver, *epoch.newcomers]
        comm = GlooComm(members.index(self._me.member), len(members), self.deadline)
        comm._groups = self._build(epoch, "handover/", {comm.ranks(): members, "agreement": members})
        comm.checksums = True
        return comm

    def come_back(self, take: Transfer) -> None:
        """Join the training ranks, and receive the state of one of them.

        Raises QuorumLost if they do not take this process in before the deadline.
        """
        self.commits = -1
        first = 0 if self.epoch is None else self.epoch.number + 1
        self._me = replace(self._me, returns=self._me.returns + 1)
        self._begin_or_recover(drive(join(self._me, self._rules, time.monotonic, first), self._store))
        while self.commits < 0:
            assert self.epoch is not None
            try:
                take(self._pair(self.epoch))
                self.commits, self._handed = self.epoch.commits, self.epoch.number
            except RuntimeError as error:
                log.warning(
                    "dgcopt: %s could not take over a rank's state, and tries again: %s", self._me.member, error
                )
                self.recover()

    def close(self) -> None:
        """Leave permanently and tell the other ranks, so that they need not wait."""
        super().close()
        with contextlib.suppress(CommError):
            self._store.set(gone_key(self._me.member), "left")
        with self._live:
            self._connected = None
        if self._watcher is not None:
            self._watcher.join(self.deadline)  # Python aborts if it ends while a thread is inside torch's store
        self._groups.clear()


def _machine() -> str:
    return os.environ.get("DGCOPT_NODE") or socket.gethostname()


def _device() -> tuple[object, tuple[str, int]]:
    """Make Gloo's device for this process; return it with the address at which it listens."""
    before = _listening()
    interface = os.environ.get("GLOO_SOCKET_IFNAME", "").split(",")[0]
    make = dist.ProcessGroupGloo
    device = make.create_device(interface=interface) if interface else make.create_default_device()
    addresses = _listening() - before
    if len(addresses) != 1:
        raise CommError(f"Gloo listens at {len(addresses)} new addresses of this process, not at one: {addresses}")
    return device, addresses.pop()


def _sockets() -> Iterator[socket.socket]:
    """Return copies of this process's TCP sockets."""
    for name in os.listdir("/proc/self/fd"):
        with contextlib.suppress(OSError):
            if os.readlink(f"/proc/self/fd/{name}").startswith("socket:"):
                with socket.socket(fileno=os.dup(int(name))) as one:
                    if one.family in (socket.AF_INET, socket.AF_INET6) and one.type == socket.SOCK_STREAM:
                        yield one


def _end_waits_after(deadline: float, port: int) -> None:
    """Make connections to a port fail after the network was silent for the deadline; torch's store would wait on."""
    pause = max(1, int(deadline / 4))
    for one in _sockets():
        with contextlib.suppress(OSError):
            if not _is_listening(one) and one.getpeername()[1] == port:
                one.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
                one.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, pause)
                one.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, pause)
                one.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, int(1000 * deadline))


def _is_listening(one: socket.socket) -> bool:
    return bool(one.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN))


def _listening() -> set[tuple[str, int]]:
    return {one.getsockname()[:2] for one in _sockets() if _is_listening(one)}


def _shut_down(mine: tuple[str, int], theirs: set[tuple[str, int]]) -> None:
    """Shut down Gloo's connections: those to its own address, and those to the addresses of other ranks.

    Its `abort` does not: while a thread waits for a stalled rank, the connections to all others stay open.
    """
    for one in _sockets():
        with contextlib.suppress(OSError):
            if not _is_listening(one) and (one.getsockname()[:2] == mine or one.getpeername()[:2] in theirs):
                one.shutdown(socket.SHUT_RDWR)
