"""Checkpoints appear whole or not at all, and saving deletes nothing of others."""

import json
import os
import signal
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import dgcopt
from dgcopt import CheckpointError, ConfigError, checkpoint
from dgcopt.checkpoint import files, loading, saving
from tests.support.checkpoints import state
from tests.support.worlds import together


def test_round_trip_and_what_is_kept(tmp_path: Path, comm):
    assert checkpoint.load(tmp_path / "nowhere", comm) is None
    for step in (10, 20, 30):
        checkpoint.save(tmp_path, state(step), np.int64(step), comm, keep=2)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["step-00000020", "step-00000030"]
    step, loaded = checkpoint.load(tmp_path, comm)
    assert step == 30 and loaded["nested"] == state(30)["nested"]
    assert torch.equal(loaded["weights"], state(30)["weights"])
    checkpoint.save(tmp_path, state(31), 30, comm)  # the same step again replaces it
    assert checkpoint.load(tmp_path, comm)[1]["epoch"] == 31


def test_a_new_directory_is_flushed_into_those_around_it(tmp_path: Path, comm, monkeypatch):
    """Otherwise a machine that goes down could lose it with the checkpoint in it."""
    flushed: list[Path] = []
    monkeypatch.setattr(saving, "flush_folder", flushed.append)
    checkpoint.save(tmp_path / "run" / "checkpoints", state(1), 1, comm)
    assert {tmp_path, tmp_path / "run", tmp_path / "run" / "checkpoints"} <= {*flushed}
    flushed.clear()
    checkpoint.save(tmp_path / "run" / "checkpoints", state(2), 2, comm)
    assert tmp_path not in flushed


def test_a_later_step_that_is_there(tmp_path: Path, comm):
    """As of an earlier run: what was saved would be deleted as the older one, and never be loaded."""
    for step in (100, 200):
        checkpoint.save(tmp_path, state(step), step, comm)
    with pytest.raises(CheckpointError, match=r"step-00000200 is of a later step than 7, and would be loaded"):
        checkpoint.save(tmp_path, state(7), 7, comm)
    assert checkpoint.load(tmp_path, comm)[0] == 200
    (tmp_path / "step-00000200" / "rank-0.pt").write_bytes(b"nonsense")
    assert checkpoint.load(tmp_path, comm)[0] == 100
    checkpoint.save(tmp_path, state(150), 150, comm)  # where training goes on from the one that was valid
    assert checkpoint.load(tmp_path, comm)[0] == 150
    checkpoint.save(tmp_path, state(180), 180, comm)
    (tmp_path / "step-00000180" / "rank-0.pt").write_bytes(b"nonsense")
    assert checkpoint.load(tmp_path, comm)[0] == 150, "the damaged one of step 200 did not count"
    checkpoint.save(tmp_path, state(200), 200, comm)
    assert checkpoint.load(tmp_path, comm)[1]["epoch"] == 200


def test_an_interrupted_save_leaves_the_previous_one(tmp_path: Path, comm, monkeypatch):
    checkpoint.save(tmp_path, state(1), 1, comm)

    def die(*_):
        raise KeyboardInterrupt

    for place in ("write_state", "write_text", "_publish"):
        with monkeypatch.context() as patched, pytest.raises(KeyboardInterrupt):
            patched.setattr(saving, place, die)
            checkpoint.save(tmp_path, state(2), 2, comm)
        assert checkpoint.load(tmp_path, comm)[0] == 1
    checkpoint.save(tmp_path, state(2), 3, comm)
    assert checkpoint.load(tmp_path, comm)[0] == 3
    assert not list(tmp_path.glob(".*"))


def test_an_interrupted_replacement_leaves_the_one_it_replaces(tmp_path: Path, comm, monkeypatch):
    checkpoint.save(tmp_path, state(1), 1, comm, keep=1)
    replace, moves = os.replace, []

    def die(source, target):
        moves.append(target)
        if len(moves) == 2:
            raise KeyboardInterrupt
        replace(source, target)

    with monkeypatch.context() as patched, pytest.raises(KeyboardInterrupt):
        patched.setattr(saving.os, "replace", die)
        checkpoint.save(tmp_path, state(2), 1, comm, keep=1)
    assert checkpoint.load(tmp_path, comm)[1]["epoch"] == 1
    checkpoint.save(tmp_path, state(3), 1, comm, keep=1)
    assert checkpoint.load(tmp_path, comm)[1]["epoch"] == 3
    assert [path.name for path in tmp_path.iterdir()] == ["step-00000001"]


def test_killed_while_saving(tmp_path: Path, comm):
    """At any moment, whether the save is of a new step or of one again."""
    checkpoint.save(tmp_path, state(0), 0, comm, keep=1)
    before = 0
    for attempt in range(20):
        child = os.fork()
        if child == 0:
            try:
                for save in range(10**6):
                    checkpoint.save(tmp_path, state(save), 10 * attempt + (save > 2), comm, keep=1)
            finally:
                os._exit(1)
        time.sleep(0.001 + 0.0023 * attempt)
        os.kill(child, signal.SIGKILL)
        assert os.waitpid(child, 0)[1] == signal.SIGKILL
        step, loaded = checkpoint.load(tmp_path, comm)
        assert torch.equal(loaded["weights"], state(loaded["epoch"])["weights"])
        assert step in (before, 10 * attempt, 10 * attempt + 1)
        before = step


def put_foreign(directory: Path) -> dict[Path, bytes]:
    """Folders of others: named like ours, with files named like ours, or with a manifest of their own."""
    for name in ("step-00000001", "step-7", "step-00000030", ".cache-step-1", ".unfinished-step-00000002", "step-x"):
        (directory / name).mkdir(parents=True)
        (directory / name / "rank-0.pt").write_text(f"weights in {name}")
    (directory / "step-7" / "manifest.json").write_text('{"step": 7, "files": ["rank-0.pt"]}')
    (directory / ".replaced-step-00000009").mkdir()
    (directory / "step-00000011").mkdir()
    return {path: path.read_bytes() if path.is_file() else b"" for path in directory.rglob("*")}


def test_folders_of_others_stay(tmp_path: Path, comm):
    foreign = put_foreign(tmp_path)
    ours = [f"step-{step:08d}" for step in (40, 50, 60)]
    for step in (40, 50, 60):
        checkpoint.save(tmp_path, state(step), step, comm, keep=1)
    with pytest.raises(CheckpointError, match=r"step-00000070 is there and has no manifest of dgcopt"):
        (tmp_path / "step-00000070").mkdir()
        checkpoint.save(tmp_path, state(70), 70, comm, keep=1)
    assert (tmp_path / "step-00000070").is_dir()
    assert {path: path.read_bytes() if path.is_file() else b"" for path in foreign} == foreign
    assert [name for name in ours if (tmp_path / name).exists()] == ours[-1:]

    (tmp_path / ours[-1] / "notes.txt").write_text("mine")  # a file of others in a folder of ours
    checkpoint.save(tmp_path, state(80), 80, comm, keep=1)
    assert [path.name for path in (tmp_path / ours[-1]).iterdir()] == ["notes.txt"]
    assert checkpoint.load(tmp_path, comm)[0] == 80


def test_saving_goes_on_once_there_is_space_again(tmp_path: Path, monkeypatch):
    """On a disk that three checkpoints fill: leftovers of failed saves would take the space of later ones."""
    (together(2, lambda comm: saving._save(tmp_path / "size", state(0), 0, comm, keep=1)))
    one, limit = sum(path.stat().st_size for path in (tmp_path / "size").rglob("*.pt")), [0]
    disk, write = tmp_path / "disk", saving.write_state

    def write_if_space(path: Path, state: dict) -> bytes:
        digest = write(path, state)
        used = sum(path.stat().st_size for path in disk.rglob("*.pt"))
        if used > limit[0]:
            os.truncate(path, max(0, path.stat().st_size - (used - limit[0])))
            raise OSError(28, "No space left on device")
        return digest

    monkeypatch.setattr(saving, "write_state", write_if_space)

    def save(step: int) -> list:
        return together(2, lambda comm: saving._save(disk, state(step), step, comm, keep=1), CheckpointError)

    for limit[0], step, fits in ((2 * one, 1, True), (int(1.6 * one), 2, False), (int(1.9 * one), 3, False)):
        done = save(step)
        assert all(isinstance(outcome, Path if fits else CheckpointError) for outcome in done), done
        assert together(2, lambda comm: loading._load(disk, comm))[0][0] == 1
    limit[0] = 2 * one
    assert {outcome.name for outcome in save(4)} == {"step-00000004"}
    assert [path.name for path in disk.iterdir()] == ["step-00000004"]


@pytest.mark.parametrize("limit", [100, 5_000, 399_000])
def test_the_systems_error_is_the_one_that_is_raised(tmp_path: Path, limit: int) -> None:
    """Where a write fails, torch.save complains about positions in its archive, which names no full disk."""
    resource = pytest.importorskip("resource")
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (limit, before[1]))
    try:
        with pytest.raises(OSError, match="File too large"):
            files.write_state(tmp_path / "rank-0.pt", {"weights": torch.ones(100_000)})
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


def test_a_disk_without_space_for_a_manifest(tmp_path: Path, comm, monkeypatch):
    checkpoint.save(tmp_path, state(1), 1, comm)

    def full(path: Path, text: str) -> None:
        path.write_text("")
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patched, pytest.raises(CheckpointError, match="No space left"):
        patched.setattr(saving, "write_text", full)
        checkpoint.save(tmp_path, state(2), 2, comm)
    assert [path.name for path in tmp_path.iterdir()] == ["step-00000001"]


def test_the_largest_step(tmp_path: Path, comm):
    for step in (2**62, 2**63 - 1):
        checkpoint.save(tmp_path, state(1), step, comm)
        assert checkpoint.load(tmp_path, comm)[0] == step
    with pytest.raises(ConfigError, match=r"step must be at most 9223372036854775807, not 9223372036854775808"):
        checkpoint.save(tmp_path, state(1), 2**63, comm)
    (tmp_path / "step-9223372036854775808").mkdir()  # no save of ours, and no number that ranks can tell each other
    assert checkpoint.load(tmp_path, comm)[0] == 2**63 - 1


def test_a_directory_with_nul_in_its_name(comm):
    for call in (lambda: checkpoint.load("a\0b", comm), lambda: checkpoint.save("a\0b", {}, 1, comm)):
        with pytest.raises(ConfigError, match=r"'a\\x00b' contains a NUL character"):
            call()


@pytest.mark.parametrize(
    "state_of_last", [{"x": lambda: 0}, {"x": (n for n in [])}], ids=["no pickling", "of the wrong type"]
)
def test_a_state_that_cannot_be_written_fails_everywhere(tmp_path: Path, state_of_last):
    def save(comm):
        return saving._save(tmp_path, state_of_last if comm.rank == 2 else {}, 1, comm, keep=1)

    errors = together(3, save, catch=CheckpointError)
    assert all(isinstance(error, CheckpointError) for error in errors), errors
    assert "rank(s) [2] failed" in str(errors[0])


def test_a_disk_that_cannot_read_the_new_file_back(tmp_path: Path, comm, monkeypatch):
    """The error speaks of the disk, not of the state."""

    def fails(*args: Any, **kwargs: Any) -> None:
        raise OSError(5, "Input/output error")

    monkeypatch.setattr(torch, "load", fails)
    with pytest.raises(CheckpointError, match=r"rank-0\.pt cannot be read back .*Input/output error.*disk"):
        checkpoint.save(tmp_path, state(1), 1, comm)


def test_the_manifest_says_who_wrote_it(tmp_path: Path, comm):
    manifest = json.loads((checkpoint.save(tmp_path, state(1), 1, comm) / "manifest.json").read_text())
    assert manifest["dgcopt"] == dgcopt.__version__ and manifest["torch"] == torch.__version__


def test_a_directory_that_cannot_be_written(tmp_path: Path, comm):
    (tmp_path / "file").write_text("")
    with pytest.raises(CheckpointError, match="rank 0: cannot make"):
        checkpoint.save(tmp_path / "file" / "below", state(1), 1, comm)
    with pytest.raises(ConfigError, match="keep"):
        checkpoint.save(tmp_path, state(1), 1, comm, keep=0)
    with pytest.raises(ConfigError, match="step must be a whole number of at least 0"):
        checkpoint.save(tmp_path, state(1), -1, comm)
