"""A key-value store in virtual time: runs the membership protocol of thousands of ranks in one process."""

from __future__ import annotations

import heapq
import random
from collections import Counter
from collections.abc import Callable, Generator
from dataclasses import dataclass, field
from itertools import count
from typing import Any, TypeAlias

from dgcopt.comm.membership import CompareSet, Operation, Read, Wait, Write

__all__ = ["Pause", "Process", "Simulation"]


@dataclass(frozen=True)
class Pause:
    """Let some seconds pass."""

    seconds: float


Life: TypeAlias = Generator[Operation | Pause, str | None, Any]


@dataclass(eq=False)
class Process:
    """One simulated process.

    Attributes:
        result, error: its outcome.
        time: end of it on the simulated clock, in seconds.
        operations: number of store operations by kind.
        nbytes: bytes of keys and values.
    """

    name: str
    life: Life
    alive: bool = True
    ended: bool = False
    frozen_until: float = 0.0
    result: Any = None
    error: Exception | None = None
    time: float = 0.0
    operations: Counter[str] = field(default_factory=Counter)
    nbytes: int = 0
    waits_for: str | None = None
    turn: int = 0


class Simulation:
    """Processes that share a store, in virtual time; all randomness comes from `rng`.

    Args:
        rng: draws latencies.
        latency: longest seconds that one operation takes.
    """

    def __init__(self, rng: random.Random, latency: float = 0.002) -> None:
        self.rng = rng
        self.latency = latency
        self.time = 0.0
        self.data: dict[str, str] = {}
        self.processes: dict[str, Process] = {}
        self._events: list[tuple[float, int, Callable[[], None]]] = []
        self._order = count()
        self._waiting: dict[str, list[Process]] = {}

    def now(self) -> float:
        """Return the virtual time in seconds."""
        return self.time

    def start(self, name: str, life: Life) -> Process:
        """Let a process begin."""
        process = self.processes[name] = Process(name, life)
        self.after(self._delay(), lambda: self._resume(process, None, process.turn))
        return process

    def after(self, seconds: float, act: Callable[[], None]) -> None:
        """Schedule a call after some seconds."""
        heapq.heappush(self._events, (self.time + seconds, next(self._order), act))

    def kill(self, process: Process) -> None:
        """End a process between two of its operations."""
        process.alive = False

    def freeze(self, process: Process, seconds: float) -> None:
        """Stop a process for a while, as SIGSTOP does."""
        process.frozen_until = max(process.frozen_until, self.time + seconds)

    def run(self, until: float) -> None:
        """Run to the end of all processes, or to a virtual time."""
        while self._events and self._events[0][0] <= until:
            self.time, _, act = heapq.heappop(self._events)
            act()

    def write(self, key: str, value: str) -> None:
        """Set a key from outside, as an agent does."""
        self.data[key] = value
        for process in self._waiting.pop(key, []):
            if process.waits_for == key:
                process.waits_for = None
                process.nbytes += len(key) + len(value)
                self._answer(process, value)

    def _delay(self) -> float:
        return self.rng.uniform(0.1, 1.0) * self.latency

    def _answer(self, process: Process, answer: str | None) -> None:
        turn = process.turn
        self.after(self._delay(), lambda: self._resume(process, answer, turn))

    def _resume(self, process: Process, answer: str | None, turn: int) -> None:
        if not process.alive or process.ended or turn != process.turn:
            return
        if process.frozen_until > self.time:
            self.after(process.frozen_until - self.time, lambda: self._resume(process, answer, turn))
            return
        process.turn += 1
        process.time = self.time
        try:
            operation = process.life.send(answer)
        except StopIteration as stop:
            process.ended, process.result = True, stop.value
        except Exception as error:
            process.ended, process.error = True, error
        else:
            # the request takes effect at the store even if its sender has ended by then
            turn = process.turn
            self.after(self._delay(), lambda: self._carry_out(process, operation, turn))

    def _carry_out(self, process: Process, operation: Operation | Pause, turn: int) -> None:
        answer: str | None = None
        process.operations[type(operation).__name__] += 1
        match operation:
            case Pause(seconds):
                self.after(seconds, lambda: self._resume(process, None, turn))
                return
            case Read(key):
                answer = self.data.get(key)
            case Write(key, value):
                process.nbytes += len(value)
                self.write(key, value)
            case CompareSet(key, value):
                process.nbytes += len(value)
                if key not in self.data:
                    self.write(key, value)
                answer = self.data[key]
            case Wait(key, seconds):
                if key not in self.data:
                    process.waits_for = key
                    self._waiting.setdefault(key, []).append(process)
                    self.after(seconds, lambda: self._give_up(process, key, turn))
                    return
                answer = self.data[key]
        process.nbytes += len(operation.key) + len(answer or "")
        self._answer(process, answer)

    def _give_up(self, process: Process, key: str, turn: int) -> None:
        if process.turn == turn and process.waits_for == key:
            process.waits_for = None
            self._resume(process, None, turn)
