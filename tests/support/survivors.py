"""An abstract training run under the membership protocol: barriers that fail on some ranks only, deaths, freezes."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from dgcopt.comm.membership import Epoch, Rules, Status, agree, found, gone_key, join
from tests.support.simulated_store import Life, Pause, Process, Simulation


@dataclass
class Group:
    """The process group of one epoch: who has come to which barrier, and who has left."""

    arrived: dict[Any, set[str]] = field(default_factory=dict)
    left: set[str] = field(default_factory=set)
    state: list[Any] | None = None


class Run:
    """A run of `size` ranks that commits `goal` steps.

    Attributes: `logs`, by process, the members of the epoch in which it has committed each step, of dead ones too;
    `epochs`, by number, every epoch that a process has gone on in; `restarted`, how many processes were started again.
    """

    def __init__(
        self,
        seed: int,
        size: int,
        goal: int,
        rules: Rules,
        *,
        agents: bool = True,
        restart_after: float | None = None,
    ) -> None:
        self.rng = random.Random(seed)
        self.sim = Simulation(self.rng)
        self.size, self.goal, self.rules = size, goal, rules
        self.agents, self.restart_after = agents, restart_after
        self.groups: dict[int, Group] = {}
        self.logs: dict[str, list[Any]] = {}
        self.epochs: dict[int, set[Epoch]] = {}
        self.restarted = 0
        self.killed: list[str] = []
        self.frozen: set[str] = set()
        for rank in range(size):
            self._start(rank, 0)

    def _start(self, rank: int, turn: int) -> None:
        name = f"{rank}.{turn}"
        self.sim.start(name, self._life(Status(name, rank, ""), found_it=turn == 0))

    def living(self) -> list[Process]:
        return [one for one in self.sim.processes.values() if one.alive and not one.ended]

    def kill(self, process: Process) -> None:
        self.sim.kill(process)
        self.killed.append(process.name)
        if self.agents:
            self.sim.after(self.rng.uniform(0, 0.1), lambda: self.sim.write(gone_key(process.name), "killed"))
        if self.restart_after is not None:
            self.restarted += 1
            rank, turn = map(int, process.name.split("."))
            self.sim.after(self.restart_after, lambda: self._start(rank, 1000 * self.restarted + turn + 1))

    def freeze(self, process: Process, seconds: float) -> None:
        self.sim.freeze(process, seconds)
        self.frozen.add(process.name)

    def at(self, second: float, act: Callable[[Process], None]) -> None:
        """Do something to a random living process at a time."""

        def choose() -> None:
            if living := self.living():
                act(self.rng.choice(living))

        self.sim.after(second, choose)

    def _life(self, me: Status, found_it: bool) -> Life:
        begin = found(me, self.size, self.rules, self.sim.now) if found_it else join(me, self.rules, self.sim.now)
        epoch = yield from begin
        log = self.logs[me.member] = []
        commits, prepared, is_new = 0, False, me.member in epoch.newcomers
        while True:
            self.epochs.setdefault(epoch.number, set()).add(epoch)
            group = self.groups.setdefault(epoch.number, Group())
            late = yield from self._barrier(epoch, me, "built")
            if late is None and not is_new and group.state is None:
                group.state = list(log)
            if late is None and is_new:
                late = yield from self._barrier(epoch, me, "state")
                if late is None:
                    assert group.state is not None
                    log[:], commits, is_new = group.state, epoch.commits, False
            elif late is None:
                late = yield from self._barrier(epoch, me, "state")
            while late is None and commits < self.goal:
                yield Pause(self.rng.uniform(0.01, 0.1))
                late = yield from self._barrier(epoch, me, ("vote", commits))
                if late is None:
                    prepared = True
                    late = yield from self._barrier(epoch, me, ("confirm", commits))
                if late is None:
                    log.append(epoch.members)
                    commits, prepared = commits + 1, False
                    if f"dgcopt/ask/{epoch.asked}" in self.sim.data and self.rng.random() < 0.5:
                        break  # as told in the barrier, which may fail on some of those that are told
            if commits == self.goal and late is None:
                self.sim.write(gone_key(me.member), "done")
                return commits
            group.left.add(me.member)
            before = epoch
            status = Status(me.member, me.hint, "", -1 if is_new else commits, prepared)
            epoch = yield from agree(status, epoch, self.rules, self.sim.now, self.rules.notice if late else None)
            if not is_new and epoch.commits != commits:
                assert prepared and epoch.commits == commits + 1, (status, epoch)
                log.append(before.members)
                commits = epoch.commits
            prepared, is_new = False, me.member in epoch.newcomers

    def _barrier(self, epoch: Epoch, me: Status, tag: Any) -> Any:
        """Return None if it was passed, False if it failed, True if the deadline has passed."""
        group, start = self.groups[epoch.number], self.sim.now()
        arrived = group.arrived.setdefault(tag, set())
        arrived.add(me.member)
        while True:
            yield Pause(self.rng.uniform(0.001, 0.01))
            dead = any(not self.sim.processes[name].alive for name in epoch.members)
            broken = dead or group.left
            complete = arrived >= set(epoch.members)
            if complete and not (broken and self.rng.random() < 0.5):
                return None
            if broken and not complete and self.rng.random() < 0.7:
                return False
            if broken and complete:
                return False
            if self.sim.now() - start > self.rules.deadline:
                return True

    def check(self) -> None:
        """Raise AssertionError if replicas differ, two halves have gone on, or somebody hangs."""
        assert not self.living(), f"still at work after {self.sim.time} s: {[one.name for one in self.living()]}"
        for number, epochs in self.epochs.items():
            assert len(epochs) == 1, f"two memberships of epoch {number}: {epochs}"
        longest = max(self.logs.values(), key=len, default=[])
        for name, log in self.logs.items():
            assert log == longest[: len(log)], f"{name} has committed {log}, others {longest}"
