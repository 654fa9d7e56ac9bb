"""A trace of one rank's collectives in Chrome's format, for chrome://tracing, ui.perfetto.dev and `dgcopt report`.

As Horovod's timeline: the file is an array of events that needs no closing bracket, so that it is whole after a crash.
"""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from torch.optim import Optimizer

from ..collectives import Collective
from ..errors import ConfigError
from .held import held

__all__ = ["Trace", "trace"]

ROWS = ("queued", "wire", "waiting", "compress", "apply")
"""Rows of a rank in the trace: the phases of a step."""


ENOUGH = 256
"""Number of events that are written together: a system call costs as much as several of them."""


class Trace:
    """Writes the phases of one rank's collectives to a file, with their bytes.

        queued    from the request of a collective until its start
        wire      from the start of a collective until the end of the wait for its result, which may have come earlier
        waiting   while this rank waits for results
        compress  before the first collective of an exchange
        apply     after each result of an exchange

    Args:
        path: the file.
        rank: this rank, the process of Chrome's format.

    Raises ConfigError if the file cannot be written.
    """

    def __init__(self, path: Path, rank: int) -> None:
        self.rank = rank
        try:
            self._file = path.open("w")
        except OSError as error:
            raise ConfigError(f"cannot write the trace {path}: {error.strerror}") from error
        self._began = time.perf_counter()
        self._started: dict[int, float] = {}
        self._events: list[str] = ["[\n", self._row("process_name", 0, f"rank {rank}")]
        self._events += [self._row("thread_name", number, name) for number, name in enumerate(ROWS)]

    def _row(self, kind: str, number: int, name: str) -> str:
        event = {"name": kind, "ph": "M", "pid": self.rank, "tid": number, "args": {"name": name}}
        return json.dumps(event) + ",\n"

    def phase(self, row: str, name: str, start: float, end: float, **more: Any) -> None:
        """Note a phase, in seconds of `time.perf_counter`."""
        ts, dur, args = 1e6 * (start - self._began), 1e6 * (end - start), json.dumps(more) if more else "{}"
        self._events.append(
            f'{{"name": {json.dumps(name)}, "ph": "X", "pid": {self.rank}, "tid": {ROWS.index(row)}, '
            f'"ts": {ts:.1f}, "dur": {dur:.1f}, "args": {args}}},\n'
        )

    def started(self, collective: Collective) -> None:
        """Note that a collective starts."""
        self._started[id(collective)] = time.perf_counter()

    def waited(self, collective: Collective, start: float, end: float) -> None:
        """Note that a collective was waited for."""
        began = self._started.pop(id(collective), start)
        kind = type(collective).__name__
        self.phase("wire", collective.label, began, end, bytes=collective.nbytes, kind=kind)
        self.phase("waiting", collective.label, start, end)

    def stepped(self) -> None:
        """Note the end of a step; the events so far are written now and then."""
        ts = 1e6 * (time.perf_counter() - self._began)
        self._events.append(f'{{"name": "step", "ph": "i", "s": "p", "pid": {self.rank}, "tid": 0, "ts": {ts:.1f}}},\n')
        if len(self._events) >= ENOUGH:
            self.flush()

    def flush(self) -> None:
        """Write the events so far."""
        self._file.write("".join(self._events))
        self._file.flush()
        self._events.clear()

    def close(self) -> None:
        """Write the rest."""
        self.flush()
        self._file.close()


@contextmanager
def trace(optimizer: Optimizer, path: str | Path) -> Iterator[None]:
    """Context in which this rank's collectives are written to a file in Chrome's trace format.

    Open the file in chrome://tracing or ui.perfetto.dev, or let `dgcopt report` show the phases of a step.

    Args:
        optimizer: wrapped by `DistributedOptimizer`; in a single process the file has no event.
        path: the file; a different one on each rank.

    Raises ConfigError for an optimizer that is not wrapped, and for a file that cannot be written.
    """
    steps = held(optimizer).gradients
    if steps is None:
        raise ConfigError("trace() needs an optimizer that dgcopt.DistributedOptimizer has wrapped")
    written = Trace(Path(path), steps.comm.rank)
    steps.write_trace(written)
    try:
        yield
    finally:
        steps.write_trace(None)
        written.close()
