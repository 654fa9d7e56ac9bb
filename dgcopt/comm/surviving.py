"""The torch wire for jobs that train on after ranks are lost.

Ranks meet in a store that outlives each of them, hosted by the agent of `dgcopt run --survive`. Each epoch, a period in
which the ranks stay the same, has Gloo groups of its own. A rank whose collective fails leaves them first: it shuts its
connections down, so that no thread of Gloo waits in them any longer, and tells the store, where a thread of every other
rank waits for that. Then the survivors agree on the next epoch (`dgcopt.comm.membership`) and build new groups.
"""

from __future__ import annotations

import contextlib
import logging
import sys
import time
from collections.abc import Callable, Mapping
from dataclasses import replace
from itertools import pairwise
from typing import TypeAlias

import torch

from ..collectives import AllReduce, Collective
from ..errors import CommError, ConfigError, QuorumLost, TimeoutExceeded, VotedOut
from .base import Channel, Comm, Result
from .epoch_groups import EpochGroups, machines_of
from .gloo import GlooComm
from .handles import Handle
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
    state_key,
    trains_key,
)
from .tcp_store import PAUSE, TCPKeyValueStore

__all__ = ["SurvivingComm"]

log = logging.getLogger("dgcopt")

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

    Attributes:
        epoch: membership; None before this process has come back.
        commits: number of steps committed by all optimizers of this wire.
        give: transfer of state to newcomers, without which none is admitted.
        lost_seconds: seconds spent in recoveries.
    """

    survives = True

    def __init__(self, store: TCPKeyValueStore, me: Status, size: int, rules: Rules) -> None:
        super().__init__(0, 1, rules.deadline, {})
        self._store = store
        self._rules = rules
        self._epoch_groups = EpochGroups(store, me.member)
        self._me = replace(me, where=self._epoch_groups.where)
        self.epoch: Epoch | None = None
        self.commits = 0
        self.lost_seconds = 0.0
        self.give: Transfer | None = None
        self._prepared = self._admits = self._change_due = self._trains = False
        self._grace: float | None = None  # of the round that this rank is in, if it waits for a quorum
        self._called = -1  # the number of commits after which some rank has come to a round
        self._handed = -1
        self._asked_in = -1  # the last epoch in which a process has asked to join, on rank 0
        if not drive(has_begun(), store):
            first = drive(found(self._me, size, rules, time.monotonic), store)
            store.set(state_key(me.member), "")
            self._begin_or_recover(first)

    def give_state_by(self, transfer: Transfer) -> None:
        """Admit newcomers from now on; `transfer` sends them this rank's state."""
        self.give = transfer

    @staticmethod
    def from_environment(env: Mapping[str, str], rules: Rules) -> SurvivingComm:
        """Join with the settings of the agent of `dgcopt run --survive`.

        Raises ConfigError if there is none, or if this process has left the job.
        """
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
        if store.get(gone_key(env[MEMBER])) is not None:
            raise ConfigError(
                f"{env[MEMBER]}: this process has left the job by dgcopt.shutdown(), and the other ranks go on without "
                f"it. Call shutdown() at the end of the script only"
            )
        return SurvivingComm(store, Status(env[MEMBER], int(env["RANK"]), ""), int(env["WORLD_SIZE"]), rules)

    # -- epochs ------------------------------------------------------------------------------------------------------

    def _begin(self, epoch: Epoch) -> None:
        """Build the groups of an epoch and take this rank's number in it. May fail."""
        self.epoch, self.generation, self.members = epoch, epoch.number + 1, epoch.members
        self._set_ranks(epoch.members.index(self._me.member), len(epoch.members))
        machines = machines_of(epoch)
        self._set_nodes([machines.index(machine) for machine in machines])
        self.link = None
        self._users.clear()
        self._epoch_groups.open(epoch, self._look)
        channels: list[tuple[Channel, tuple[int, ...]]] = [(self.ranks(), self.ranks())]
        channels += [("control", self.ranks()), ("agreement", self.ranks())]
        channels += [(members, members) for members in self._subgroups if self.rank in members]
        named = {key: [epoch.members[rank] for rank in ranks] for key, ranks in channels if len(ranks) > 1}
        self._groups = self._epoch_groups.build(epoch, "", named)

    def _look(self, epoch: Epoch, store: TCPKeyValueStore) -> None:
        """Note processes that ask to join, and ranks that have come to a round; called by a thread."""
        commits = self.commits
        if store.get(called_key(epoch.number, commits)) is not None:
            self._called = commits
        if self.rank == 0 and self.give is not None and store.get(next_ask(epoch)) is not None:
            self._asked_in = epoch.number

    def _leave(self) -> None:
        """Leave the groups of the epoch before this rank announces itself for the next one."""
        assert self.epoch is not None
        self._epoch_groups.close(self.epoch)
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
            log.warning("dgcopt: epoch %d could not start; the ranks agree on another: %s", epoch.number, error)
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
                log.warning("dgcopt: epoch %d could not start; the ranks agree on another: %s", epoch.number, failure)
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
        wanted = torch.tensor([self.epoch is not None and self._asked_in == self.epoch.number], dtype=torch.int32)
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
                f"{self._me.member}: this rank has joined a running job and has no state. Before the first step, make "
                f"state = dgcopt.survive.State(model=..., optimizer=..., step=0) and call state.sync()"
            )
        if not self._trains:
            self._trains = True
            self._store.set(trains_key(self._me.member), "yes")
        self._admits = True
        if self._change_due:
            self.recover()
        if self.epoch.newcomers and self._handed < self.epoch.number:
            self._handed = self.epoch.number
            self._hand_over(self.epoch)

    @property
    def is_called(self) -> bool:
        """As `Comm.is_called`."""
        epoch = self.epoch
        return epoch is not None and (self._called == self.commits or not self._epoch_groups.is_open(epoch))

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
            if gone or not self._epoch_groups.is_open(epoch):
                raise CommError(f"rank {self.rank}: {', '.join(gone) or 'another rank'} has left the round")
            if missing:
                time.sleep(4 * PAUSE)

    def return_late(self, error: CommError) -> None:
        """As `Comm.return_late`."""
        if self.give is None:
            raise error
        log.warning("dgcopt: %s is late, and joins the others again: %s", self._me.member, error)
        self._store.set(trains_key(self._me.member), "no")
        self._trains = False
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
        except (CommError, ConfigError, RuntimeError) as error:  # the newcomer is gone, as the vote will show
            log.warning("dgcopt: rank %d could not give its state to a new rank: %s", self.rank, error)
            return
        log.info("dgcopt: rank %d gave its state to %s in %.2f s", self.rank, epoch.newcomers, time.monotonic() - start)

    def _pair(self, epoch: Epoch) -> Comm:
        """Return a comm of the sender of state, as rank 0, and the newcomers."""
        giver = next(member for member in epoch.members if member not in epoch.newcomers)
        members = [giver, *epoch.newcomers]
        ranks = tuple(range(len(members)))
        groups = self._epoch_groups.build(epoch, "handover/", {ranks: members, "agreement": members})
        comm = GlooComm(members.index(self._me.member), len(members), self.deadline, groups)
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
                self._store.set(state_key(self._me.member), "")
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
        self._epoch_groups.leave()
        self._groups.clear()
