"""The agent of `dgcopt run --survive`: starts the ranks of a machine, and restarts each rank that dies.

The first agent hosts the store in which ranks agree on their membership, so that it outlives every rank. Each agent
testifies there to the ends of its ranks, so that the others need not wait for them.
"""

from __future__ import annotations

import contextlib
import logging
import os
import signal
import subprocess
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Protocol

import torch.distributed as dist

from ..comm.membership import MEMBER, STORE, gone_key, state_key, trains_key
from ..errors import ConfigError

__all__ = ["Agent", "Plan", "Process"]

log = logging.getLogger("dgcopt")

POLL = 0.02
"""Seconds between two looks at the ranks."""

TRIES = 3
"""Limit of consecutive starts of a rank that end before it trains."""

GRACE = 10.0
"""Seconds that ranks have to end after SIGTERM."""

PATIENCE = timedelta(seconds=300)
"""Limit of waits for the store, and for agents that no longer look at their ranks."""

AGENTS, SETTINGS, LOOKS = "dgcopt/agents", "dgcopt/settings of agents", "dgcopt/looks of agents"
ENDED, FINISHED = "dgcopt/agents ended", "dgcopt/finished"


class Process(Protocol):
    """A rank's process, as `subprocess.Popen` has it."""

    def poll(self) -> int | None: ...

    def wait(self, timeout: float | None = None) -> int: ...

    def terminate(self) -> None: ...

    def kill(self) -> None: ...


@dataclass(frozen=True)
class Plan:
    """The ranks of one machine.

    Attributes:
        words: command line of a rank.
        ranks: number of ranks on this machine.
        machines: number of agents.
        endpoint: host and port of the store; port 0 takes a free one.
        hosts: True if this agent hosts the store.
        env: environment variables of every rank.
        restart_after: seconds from the end of a rank to its next start.
    """

    words: Sequence[str]
    ranks: int
    machines: int = 1
    endpoint: tuple[str, int] = ("127.0.0.1", 0)
    hosts: bool = True
    env: Mapping[str, str] = field(default_factory=dict)
    restart_after: float = 0.0

    def __str__(self) -> str:
        host, port = self.endpoint
        role = "hosts" if self.hosts else "joins"
        return (
            f"an agent that {role} the store at {host}:{port or '(a free port)'}, {self.ranks} x {' '.join(self.words)}"
        )


@dataclass
class _Slot:
    """One rank's place.

    Attributes:
        due: time of its next start.
        tries: number of consecutive starts without training.
        code: its exit status once it is not restarted any more.
    """

    number: int
    process: Process | None = None
    starts: int = 0
    due: float = 0.0
    tries: int = 0
    code: int | None = None


class Agent:
    """Runs the ranks of one machine to their end. Raises ConfigError if the store is not to be had."""

    def __init__(self, plan: Plan) -> None:
        self.plan = plan
        host, port = plan.endpoint
        # the store looks up the name of each client, and serves nobody meanwhile
        os.environ.setdefault("RES_OPTIONS", "timeout:1 attempts:1")
        try:
            self._store = dist.TCPStore(host, port, is_master=plan.hosts, timeout=PATIENCE, wait_for_workers=False)
        except RuntimeError as error:
            problem = "cannot be hosted here" if plan.hosts else "does not answer"
            raise ConfigError(
                f"the store at {host}:{port} {problem} ({str(error).splitlines()[0]:.200}). Give the first machine and "
                f"a free port as --rdzv-endpoint HOST:PORT, alike on all machines."
            ) from error
        self.address = f"{host}:{self._store.port}"
        mine = f"-np {plan.ranks} --nnodes {plan.machines}"  # from which ranks are numbered
        first = self._store.compare_set(SETTINGS, "", mine).decode()
        if first != mine:  # before it takes a number, which another machine would get once more
            raise ConfigError(f"this machine has {mine}, and the first one has {first}. Give the same on all machines.")
        self._number = self._store.add(AGENTS, 1) - 1
        if self._number >= plan.machines:
            self._store.add(AGENTS, -1)  # it is not waited for
            raise ConfigError(
                f"{self._number + 1} agents have come to {self.address}, and --nnodes is {plan.machines}. Start that "
                f"number, or choose another port for another job."
            )
        self._slots = [_Slot(number) for number in range(plan.ranks)]
        self._is_ending, self._signal = False, 0

    def run(self) -> int:
        """Start the ranks; return 0 once training has ended well, else the exit status of a rank or of a signal."""
        before = {number: signal.signal(number, self._end) for number in (signal.SIGTERM, signal.SIGINT)}
        try:
            while not self._is_ending and any(slot.code is None for slot in self._slots):
                with contextlib.suppress(RuntimeError):
                    self._store.add(LOOKS, 1)
                has_finished = self._get(FINISHED) is not None
                for slot in self._slots:
                    if not self._is_ending:  # ranks that a signal has ended are not started anew
                        self._look(slot, has_finished)
                time.sleep(POLL)
        finally:
            self._end()
            self._reap()
            for number, handler in before.items():
                signal.signal(number, handler)
        failed = next((slot.code for slot in self._slots if slot.code), 0)
        if not failed and self._signal and self._get(FINISHED) is None:
            failed = -self._signal  # ranks that end well when they are told to have not trained to the end
        self._wait_for_machines()
        return 128 - failed if failed < 0 else failed

    def _look(self, slot: _Slot, has_finished: bool) -> None:
        """Start a rank that is due, note one that has ended, and end one that training has finished without."""
        if slot.process is None:
            if slot.code is None and has_finished:
                slot.code = 0
            elif slot.code is None and time.monotonic() >= slot.due:
                self._start(slot)
            return
        code, name = slot.process.poll(), self._name(slot)
        if code is None and not has_finished:
            return
        trains = self._get(trains_key(name))
        # nobody is left to take in a restarted rank, or a late one
        is_out = has_finished and (trains == b"no" or (trains is None and slot.starts > 0))
        if code is None:
            if is_out:
                slot.process.terminate()
            return
        slot.tries = slot.tries + 1 if trains is None else 0
        slot.process, slot.starts = None, slot.starts + 1
        self._set(gone_key(name), str(code))
        if code == 0 or is_out:
            slot.code = 0
            self._set(FINISHED, name)
        elif slot.tries >= TRIES:
            slot.code = code
            log.error("dgcopt: rank %s ended with %d, as %d starts in a row: not again", name, code, TRIES)
        elif self.plan.machines == 1 and not any(self._may_train(other, trains) for other in self._slots):
            for other in self._slots:
                other.code = code if other.code is None else other.code
            log.error("dgcopt: all ranks are lost, and their state with them. Start the job anew from a checkpoint")
        else:
            slot.due = time.monotonic() + self.plan.restart_after
            log.warning("dgcopt: rank %s ended with %d and is restarted", name, code)

    def _may_train(self, slot: _Slot, trained: bytes | None) -> bool:
        """Return True for a rank that runs, unless others have `trained` and it waits for the state of one."""
        if slot.process is None or trained is None or slot.starts == 0:
            return slot.process is not None
        return self._get(state_key(self._name(slot))) is not None

    def _name(self, slot: _Slot) -> str:
        return f"{self._number}.{slot.number}.{slot.starts}"

    def _get(self, key: str) -> bytes | None:
        with contextlib.suppress(RuntimeError):
            return self._store.get(key) if self._store.check([key]) else None
        return None

    def _set(self, key: str, value: str) -> None:
        with contextlib.suppress(RuntimeError):  # ranks can do without the testimony, which only saves them time
            self._store.set(key, value)

    def _start(self, slot: _Slot) -> None:
        plan = self.plan
        env = {
            **os.environ,
            **plan.env,
            STORE: self.address,
            MEMBER: self._name(slot),
            "RANK": str(self._number * plan.ranks + slot.number),
            "WORLD_SIZE": str(plan.ranks * plan.machines),
            "LOCAL_RANK": str(slot.number),
            "LOCAL_WORLD_SIZE": str(plan.ranks),
        }
        slot.process = self.spawn(env)

    def spawn(self, env: Mapping[str, str]) -> Process:
        """Start a rank with these environment variables."""
        try:
            return subprocess.Popen(self.plan.words, env=env)
        except (OSError, ValueError) as error:  # not executable, too long, or with a NUL character
            raise ConfigError(f"{self.plan.words[0]} cannot be started ({error}): correct the command") from error

    def _end(self, number: int = 0, *_: object) -> None:
        """Ask all ranks to end, if a signal is given because of it."""
        self._is_ending, self._signal = True, self._signal or number
        for slot in self._slots:
            if slot.process is not None:
                slot.process.terminate()

    def _reap(self) -> None:
        end = time.monotonic() + GRACE
        for slot in self._slots:
            if slot.process is not None:
                try:
                    code = slot.process.wait(max(0.0, end - time.monotonic()))
                except subprocess.TimeoutExpired:
                    slot.process.kill()
                    code = slot.process.wait()
                slot.process, slot.code = None, code if slot.code is None else slot.code

    def _wait_for_machines(self) -> None:
        """Keep the store up until the ranks of all machines have ended, or all other agents are lost."""
        with contextlib.suppress(RuntimeError):
            self._store.add(ENDED, 1)
            looks, last = -1, time.monotonic()
            while self.plan.hosts and self._store.add(ENDED, 0) < self._store.add(AGENTS, 0):
                before, looks = looks, self._store.add(LOOKS, 0)
                if looks > before:
                    last = time.monotonic()
                elif time.monotonic() - last > PATIENCE.total_seconds():
                    log.warning("dgcopt: other machines have not answered for %s, and are not waited for", PATIENCE)
                    return
                time.sleep(10 * POLL)
