"""Two runs that write to one directory: the second is refused, and no checkpoint is lost."""

import itertools
import multiprocessing
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from dgcopt import CheckpointError, checkpoint
from dgcopt.checkpoint import saving
from dgcopt.comm import LocalComm


class Run:
    """A process of its own, which saves and loads when told."""

    def __init__(self) -> None:
        context = multiprocessing.get_context("fork")
        self.pipe, theirs = context.Pipe()
        self.process = context.Process(target=self.serve, args=(theirs,), daemon=True)
        self.process.start()

    @staticmethod
    def serve(pipe: Any) -> None:
        for name, arguments, options in iter(pipe.recv, None):
            try:
                pipe.send(str(getattr(checkpoint, name)(*arguments, comm=LocalComm(), **options)))
            except CheckpointError as error:
                pipe.send(error)

    def __call__(self, name: str, *arguments: Any, **options: Any) -> Any:
        self.pipe.send((name, arguments, options))
        return self.pipe.recv()

    def end(self) -> None:
        self.process.kill()
        self.process.join()


@pytest.fixture
def runs() -> Iterator[Any]:
    started: list[Run] = []

    def start() -> Run:
        started.append(Run())
        return started[-1]

    yield start
    for run in started:
        run.end()


def assert_refused(outcome: Any, directory: Path, other: Run) -> None:
    assert isinstance(outcome, CheckpointError), outcome
    for words in (f"of another run (process {other.process.pid} on ", f"writes to {directory}"):
        assert words in str(outcome), outcome


@pytest.mark.parametrize("loads", [True, False], ids=["each loads first", "neither loads"])
def test_two_runs_in_one_directory(tmp_path: Path, runs, loads: bool):
    """A run that finds a checkpoint written by another one, since it began to use the directory, is refused."""
    for number, order in enumerate(order for order in itertools.product((0, 1), repeat=4) if order[0] == 0):
        directory, both = tmp_path / str(number), [runs(), runs()]
        written: list[int] = []
        known: list[set[int] | None] = [None, None]
        for run in (0, 1) if loads else ():
            assert both[run]("load", directory) == "None"
            known[run] = set()
        for step, run in enumerate(order):
            mine = known[run] = set(written) if (already := known[run]) is None else already
            outcome = both[run]("save", directory, {"run": run}, step, keep=9)
            if mine >= set(written):
                assert outcome == str(directory / f"step-{step:08d}"), (order, step, outcome)
                written.append(step)
                mine.add(step)
            else:
                assert_refused(outcome, directory, both[1 - run])
        assert sorted(int(path.name[5:]) for path in directory.iterdir()) == written, order
        for run in both:
            run.end()


def test_a_save_in_the_middle_of_another_runs_save(tmp_path: Path, runs, monkeypatch):
    """Whichever of them is refused, the other one's checkpoint is whole."""
    write, outcomes = saving.write_state, []
    for loads in (True, False):
        directory, other = tmp_path / str(loads), runs()
        if loads:
            assert other("load", directory) == "None"

        def meanwhile(path: Path, state: dict, directory=directory, other=other) -> bytes:
            digest = write(path, state)
            outcomes.append(other("save", directory, {"run": "other"}, 1))
            return digest

        with monkeypatch.context() as patched:
            patched.setattr(saving, "write_state", meanwhile)
            try:
                mine: Any = checkpoint.save(directory, {"run": "this"}, 1, LocalComm())
            except CheckpointError as error:
                mine = error
        if loads:  # the other knows that the save in progress began after it
            assert mine == directory / "step-00000001"
            assert f"of another run (process {os.getpid()} on " in str(outcomes[-1])
        else:  # the other takes it for what a killed run has left
            assert_refused(mine, directory, other)
        step, loaded = checkpoint.load(directory, LocalComm())
        assert (step, loaded) == (1, {"run": "this" if loads else "other"})
        checkpoint.save(directory, {"run": "this"}, 2, LocalComm())
        assert [path.name for path in directory.glob(".*")] == []


@pytest.mark.parametrize("loads", [True, False])
def test_a_new_process_goes_on(tmp_path: Path, runs, loads: bool):
    """After a run that has ended, and after one that was killed in a save."""
    for step in range(0, 9, 3):
        run = runs()
        if loads and step:
            assert str(step - 1) in run("load", tmp_path)
        for more in range(3):
            assert run("save", tmp_path, {"step": step + more}, step + more) == str(
                tmp_path / f"step-{step + more:08d}"
            )
        run.end()
        left = tmp_path / f".unfinished-step-{step + 9:08d}-{step:016x}"
        saving._announce(left, step + 9, 1, step)
        (left / "rank-0.pt").write_bytes(b"half")
    assert checkpoint.load(tmp_path, LocalComm()) == (8, {"step": 8})
    checkpoint.save(tmp_path, {"step": 9}, 9, LocalComm())
    assert sorted(path.name for path in tmp_path.iterdir()) == ["step-00000008", "step-00000009"]
