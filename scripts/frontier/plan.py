"""The plan of bench_frontier.py: methods, sweeps of their settings, and the file of finished runs.

First a sweep of each method, all sweeps in turn so that each has a result soon: with seed 0 and half the steps, of the
learning rate, and for methods with an outer optimizer of its learning rate and momentum too, until the best point of
the grid has worse neighbours. Then the best settings at all steps with three seeds, of the methods that no other beats
by MARGIN with as few bytes. Then the same with eight ranks: for some after a sweep of their own, for others with the
settings of four. A method that is added to METHODS extends the plan.
"""

from __future__ import annotations

import fcntl
import hashlib
import json
import math
import os
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

__all__ = [
    "METHODS",
    "STEPS",
    "Method",
    "Results",
    "Run",
    "best_settings",
    "loss_in",
    "ready",
    "run_of",
    "survivors",
    "swept",
]

STEPS = 3000

MARGIN = 0.01
"""A method whose loss is higher by more than this fraction than another's with as few bytes gets no further seeds."""


@dataclass(frozen=True)
class Method:
    """An exchange, and the optimizer of each rank.

    Args:
        exchange: expression of a compressor or an averaging rule, evaluated with the names of `dgcopt` and `outer`; its
            fields {outer_lr} and {momentum} are swept like the learning rate.
        optimizer: "adamw", "adamw0" without its first moment, "sgd", or "muon" with AdamW for all but the matrices.
        lr: learning rate at which the sweep starts.
        ranks: numbers of ranks: the first is for the sweep and the paired seeds, all others for the last stage.
        sweeps: those of the last stage that have a sweep of their own.
    """

    exchange: str
    optimizer: str = "adamw"
    lr: float = 8e-3
    ranks: tuple[int, ...] = (4, 8)
    sweeps: tuple[int, ...] = ()

    @property
    def grid(self) -> dict[str, dict[int, float]]:
        """The values of each swept setting by their place from the start of the sweep."""
        grid = {"lr": {place: self.lr * 2.0**place for place in range(-5, 6)}}
        if "{outer_lr" in self.exchange:
            grid["outer_lr"] = {place: 2.0**place for place in range(-3, 3)}
        if "{momentum" in self.exchange:
            grid["momentum"] = dict(enumerate((0.0, 0.5, 0.8, 0.9, 0.95), start=-1))
        return grid


OUTER = "outer=outer({outer_lr:g}, {momentum:g})"
CODED = "values='int2', indices='rice'"
METHODS: dict[str, Method] = {
    "dense": Method("NoCompression()", sweeps=(8,)),
    "one rank": Method("NoCompression()", ranks=(1,)),
    "TopK of the update, 1%": Method(f"TopK(0.01, {CODED})", "adamw0", lr=16e-3),
    "one rank, Muon": Method("NoCompression()", "muon", ranks=(1,)),
    **{
        f"MuLoCo, {code}, unsent local, H = {every}": Method(
            f"DiLoCo({every}, {OUTER}, compression={code}(), unsent='local')", "muon", sweeps=sweeps
        )
        for code, every, sweeps in (
            ("OneBit", 32, (8,)),
            ("OneBitReduce", 32, (8,)),
            ("OneBit", 8, ()),
            ("OneBit", 16, ()),
            ("OneBitReduce", 64, ()),
        )
    },
    "DiLoCo, OneBit, unsent local, H = 32": Method(
        f"DiLoCo(32, {OUTER}, compression=OneBit(), unsent='local')", lr=4e-3
    ),
    "MuLoCo, TopK 1%, unsent local, H = 8": Method(
        f"DiLoCo(8, {OUTER}, compression=TopK(0.01, {CODED}), unsent='local')", "muon"
    ),
    "MuLoCo, TopK 1%, unsent local, H = 32": Method(
        f"DiLoCo(32, {OUTER}, compression=TopK(0.01, {CODED}), unsent='local')", "muon"
    ),
    "MuLoCo, TopK 5%, unsent local, H = 32": Method(
        f"DiLoCo(32, {OUTER}, compression=TopK(0.05, {CODED}), unsent='local')", "muon"
    ),
    "TopK of the gradient, 1%, Muon": Method(f"TopK(0.01, {CODED}, source='gradient')", "muon"),
    "DiLoCo without first moment, TopK 1%, unsent local, H = 8": Method(
        f"DiLoCo(8, {OUTER}, compression=TopK(0.01, {CODED}), unsent='local')", "adamw0", lr=4e-3
    ),
    "MuLoCo, H = 8": Method(f"DiLoCo(8, {OUTER})", "muon"),
    "MuLoCo, H = 128": Method(f"DiLoCo(128, {OUTER})", "muon"),
    "DiLoCo as in its paper, H = 8": Method("DiLoCo(every=8)"),
    "DiLoCo as in its paper, without first moment, H = 8": Method("DiLoCo(every=8)", "adamw0", lr=2e-3),
    "LocalSGD, H = 8": Method("LocalSGD(every=8)"),
    "LocalSGD without first moment, H = 8": Method("LocalSGD(every=8)", "adamw0"),
    "TopK of the update, 0.1%": Method(f"TopK(0.001, {CODED})", "adamw0", lr=16e-3),
    "DiLoCo, TopK 1%, unsent local, H = 8": Method(
        f"DiLoCo(8, {OUTER}, compression=TopK(0.01, {CODED}), unsent='local')"
    ),
    "LocalSGD, moments on their own periods, H = 8": Method(
        "LocalSGD(every=8, state_every={{'exp_avg': 24, 'exp_avg_sq': 48}})"
    ),
    "DiLoCo, H = 8": Method(f"DiLoCo(8, {OUTER})"),
    "DiLoCo without first moment, H = 8": Method(f"DiLoCo(8, {OUTER})", "adamw0", lr=4e-3),
    "dense without first moment": Method("NoCompression()", "adamw0", ranks=(4,)),
    "TopK of the update, 1%, with first moment": Method(f"TopK(0.01, {CODED})", lr=16e-3),
    "LocalSGD, H = 32": Method("LocalSGD(every=32)"),
    "SparseLoCo, H = 32": Method("SparseLoCo(every=32, lr={outer_lr:g})"),
    "DiLoCo, H = 32": Method(f"DiLoCo(32, {OUTER})"),
    "DiLoCo, TopK 1%, unsent local, H = 32": Method(
        f"DiLoCo(32, {OUTER}, compression=TopK(0.01, {CODED}), unsent='local')"
    ),
    "DiLoCo, TopK 1%, unsent apart, H = 8": Method(f"DiLoCo(8, {OUTER}, compression=TopK(0.01, {CODED}))"),
    "DiLoCo, TopK 0.1%, unsent local, H = 8": Method(
        f"DiLoCo(8, {OUTER}, compression=TopK(0.001, {CODED}), unsent='local')"
    ),
    "DeMo": Method("DeMo()", "sgd", lr=2e-3),
    "PowerSGD, rank 4": Method("PowerSGD(rank=4)"),
    "dense, Muon": Method("NoCompression()", "muon"),
    "MuLoCo, H = 32": Method(f"DiLoCo(32, {OUTER})", "muon"),
    "DGC of the gradient, 1%": Method(f"DGC(0.01, {CODED}, vectors='int8', warmup=None, source='gradient')"),
    "DGC of the gradient, 0.1%": Method(f"DGC(0.001, {CODED}, vectors='int8', warmup=None, source='gradient')"),
    "OneBit of the gradient": Method("OneBit()"),
    "Signum": Method("Signum()", "sgd", lr=2e-3),
    "OneBitAdam": Method("OneBitAdam()"),
    "DiLoCo, TopK 0.1%, unsent local, H = 32": Method(
        f"DiLoCo(32, {OUTER}, compression=TopK(0.001, {CODED}), unsent='local')"
    ),
}


@dataclass(frozen=True)
class Run:
    """The settings of one run, which identify its result."""

    exchange: str
    optimizer: str
    lr: float
    ranks: int
    steps: int
    seed: int
    task: str

    @property
    def key(self) -> str:
        return json.dumps(asdict(self), sort_keys=True)


def loss_in(entry: dict[str, Any]) -> float:
    """Return the final loss of a finished run, infinite for one that diverged."""
    return math.inf if entry["loss"] is None else float(entry["loss"])


class Results:
    """Finished runs, one line of JSON each.

    Args:
        path: their file.
        task: version of the task of which runs are planned and reported.
    """

    def __init__(self, path: Path, task: str) -> None:
        self.path, self.task = path, task
        self.runs: dict[str, dict[str, Any]] = {}
        self.read()

    def read(self) -> None:
        """Read what has been added to the file, by other processes too."""
        if not self.path.exists():
            return
        with self.path.open("r+b") as file:
            fcntl.lockf(file, fcntl.LOCK_EX)
            whole = file.read()
            if not whole.endswith(b"\n"):  # killed while it wrote
                whole = whole[: whole.rfind(b"\n") + 1]
                file.truncate(len(whole))
        for line in whole.decode().splitlines():
            entry = json.loads(line)
            self.runs[Run(**entry["run"]).key] = entry

    def add(self, run: Run, result: dict[str, Any], commit: str) -> None:
        entry = {"run": asdict(run), **result, "commit": commit}
        self.runs[run.key] = entry
        with self.path.open("a") as file:
            fcntl.lockf(file, fcntl.LOCK_EX)
            file.write(json.dumps(entry) + "\n")
            file.flush()
            os.fsync(file.fileno())

    @contextmanager
    def claimed(self, run: Run) -> Iterator[bool]:
        """Whether this process alone may make the run: neither does another one now, nor is it finished.

        The claim is a lock on one byte of a file in the temporary folder; the byte is the hash of the run.
        """
        with (Path(tempfile.gettempdir()) / "dgcopt-frontier.lock").open("ab") as file:
            byte = int.from_bytes(hashlib.sha256(run.key.encode()).digest()[:6], "big")
            try:
                fcntl.lockf(file, fcntl.LOCK_EX | fcntl.LOCK_NB, 1, byte)
            except OSError:
                yield False
                return
            self.read()  # the run may have ended a moment ago
            yield self.loss(run) is None

    def loss(self, run: Run) -> float | None:
        """The final loss, infinite for a run that diverged, None for one that is not there."""
        entry = self.runs.get(run.key)
        return None if entry is None else loss_in(entry)


def run_of(method: Method, settings: dict[str, float], ranks: int, steps: int, seed: int, task: str) -> Run:
    """Return the run of a method with the values of its swept settings."""
    return Run(method.exchange.format(**settings), method.optimizer, settings["lr"], ranks, steps, seed, task)


def swept(method: Method, results: Results, ranks: int = 0) -> tuple[dict[Run, dict[str, float]], Run | None]:
    """Return the finished runs of the sweep with their settings, best first, and the next run, None if it is done.

    The sweep starts in the middle of the grid and goes on from the best point: to its neighbours in each setting. It is
    that of the method's first number of ranks, or of `ranks` if it has a sweep of its own.
    """
    if ranks not in method.sweeps:
        ranks = method.ranks[0]
    start, losses, points = dict.fromkeys(method.grid, 0), dict[Run, float](), dict[Run, dict[str, int]]()

    def run_at(point: dict[str, int]) -> Run:
        settings = {name: method.grid[name][place] for name, place in point.items()}
        return run_of(method, settings, ranks, STEPS // 2, 0, results.task)

    def finished() -> dict[Run, dict[str, float]]:
        return {
            run: {name: method.grid[name][place] for name, place in points[run].items()}
            for run in sorted(losses, key=losses.__getitem__)
        }

    while True:
        best = points[min(losses, key=losses.__getitem__)] if losses else start
        moves = [(name, best[name] + by) for name in best for by in (-1, 1) if best[name] + by in method.grid[name]]
        ahead = [best, *({**best, name: place} for name, place in moves)]
        unseen = [point for point in ahead if run_at(point) not in losses]
        run_before = [point for point in unseen if results.loss(run_at(point)) is not None]
        if not run_before:
            return finished(), run_at(unseen[0]) if unseen else None
        run, point = run_at(run_before[0]), run_before[0]
        loss = results.loss(run)
        assert loss is not None
        losses[run], points[run] = loss, point


def best_settings(method: Method, results: Results, ranks: int = 0) -> dict[str, float]:
    """Return the best settings of the sweep so far; see `swept`."""
    return next(iter(swept(method, results, ranks)[0].values()), {})


def survivors(results: Results) -> list[str]:
    """Return the methods that get further seeds: those that no other one beats by MARGIN with as few bytes.

    Settings are the best of their sweeps. One rank sends none, so it beats whatever is worse. Dense training and one
    rank are always among them, as all others are compared to them.
    """
    best = {}
    for name, method in METHODS.items():
        for run in list(swept(method, results)[0])[:1]:
            entry = results.runs[run.key]
            best[name] = (entry.get("bytes_per_sample", 0), loss_in(entry))
    return [
        name
        for name, (sent, loss) in best.items()
        if name == "dense"
        or METHODS[name].ranks == (1,)
        or not any(other <= sent and less < loss * (1 - MARGIN) for other, less in best.values())
    ]


def ready(results: Results) -> Iterator[Run]:
    """Yield the runs that can be made now, in order: the next of each sweep, or those of the first stage left."""
    sweeps = [*sweeps_left([*METHODS.values()], 0, results)]
    yield from sweeps
    if sweeps:
        return
    left = [METHODS[name] for name in survivors(results)]
    for stage in range(max(len(method.ranks) for method in left)):
        methods = [method for method in left if stage < len(method.ranks)]
        if stage:
            yield from sweeps_left([one for one in methods if one.ranks[stage] in one.sweeps], stage, results)
        for method in methods:
            if swept(method, results, ranks := method.ranks[stage])[1] is None:
                settings = best_settings(method, results, ranks)
                runs = [run_of(method, settings, ranks, STEPS, seed, results.task) for seed in range(3)]
                yield from (run for run in runs if results.loss(run) is None)


def sweeps_left(methods: Sequence[Method], stage: int, results: Results) -> list[Run]:
    """Return the next run of each sweep that is not done, those with the fewest runs first."""
    sweeps = [swept(method, results, method.ranks[stage]) for method in methods]
    unfinished = [(len(finished), place, run) for place, (finished, run) in enumerate(sweeps) if run is not None]
    return [run for *_, run in sorted(unfinished, key=lambda sweep: sweep[:2])]
