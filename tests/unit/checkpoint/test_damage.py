"""Damage is found, named, and passed over if an older checkpoint is valid."""

import json
import logging
import os
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from dgcopt import CheckpointError, checkpoint
from dgcopt.checkpoint import loading, saving
from dgcopt.comm import LocalComm
from tests.support.checkpoints import state
from tests.support.worlds import together


@contextmanager
def unprivileged() -> Iterator[None]:
    """Without the rights of root, whom no permission keeps from reading."""
    user = os.geteuid()
    os.seteuid(user or 65534)
    try:
        yield
    finally:
        os.seteuid(user)


@pytest.mark.parametrize(("closed", "rights"), [(".", 0), ("checkpoints", 0), ("checkpoints", 0o111)])
def test_a_directory_that_may_not_be_read_does_not_pass_for_an_empty_one(closed: str, rights: int):
    with tempfile.TemporaryDirectory() as folder:  # pytest's own is closed to other users
        directory = Path(folder, "checkpoints")
        together(2, lambda comm: saving._save(directory, state(1), 1, comm, keep=1))
        Path(folder).chmod(0o755)
        Path(folder, closed).chmod(rights)
        with unprivileged():
            with pytest.raises(
                CheckpointError, match=r"cannot be read \(Permission denied\), so .* Give this user the"
            ):
                checkpoint.load(directory, LocalComm())
            mine, theirs = together(2, lambda comm: loading._load(directory, comm), catch=CheckpointError)
            saved = together(2, lambda comm: saving._save(directory, state(2), 2, comm, keep=1), catch=CheckpointError)
        Path(folder, closed).chmod(0o755)
    assert "Permission denied" in str(mine) and "rank 0 cannot read" in str(theirs)
    assert "Permission denied" in str(saved[0]) and isinstance(saved[1], CheckpointError)


@pytest.mark.parametrize("size", [1, 2, 3])
def test_only_valid_ones_are_kept(tmp_path: Path, size: int):
    """For damage to any of three ranks' files, whatever the number of ranks that save next."""

    def save(step: int, ranks: int, keep: int) -> set[int]:
        together(ranks, lambda comm: saving._save(tmp_path, state(step), step, comm, keep=keep))
        return {int(path.name.removeprefix("step-")) for path in tmp_path.iterdir()}

    for step in (1, 2):
        save(step, 3, keep=2)
    (tmp_path / "step-00000002" / "rank-2.pt").write_bytes(b"rot")
    assert save(3, size, keep=2) == {1, 2, 3}, "the good one was deleted, or the damaged one counted"
    assert save(4, size, keep=2) == {3, 4}
    (tmp_path / "step-00000004" / "manifest.json").write_text('{\n "dgcopt": "1.0", "st')  # cut short
    assert save(5, size, keep=3) == {3, 4, 5}
    (tmp_path / "step-00000003" / "rank-0.pt").unlink()
    assert save(6, size, keep=2) == {5, 6}
    assert save(7, size, keep=1) == {7}


def test_a_damaged_newest_one_is_named_in_the_log(tmp_path: Path, comm, caplog):
    for step in (1, 2):
        checkpoint.save(tmp_path, state(step), step, comm)
    assert checkpoint.load(tmp_path, comm)[0] == 2 and not caplog.records
    (tmp_path / "step-00000002" / "rank-0.pt").write_bytes(b"nonsense")
    assert checkpoint.load(tmp_path, comm)[0] == 1
    (record,) = caplog.records
    assert record.levelno == logging.WARNING and "passes over step-00000002" in record.getMessage()
    assert f"{tmp_path / 'step-00000002' / 'rank-0.pt'} is damaged" in record.getMessage()

    caplog.clear()
    for step in (3, 4):
        together(3, lambda comm, step=step: saving._save(tmp_path, state(step), step, comm, keep=2))
    (tmp_path / "step-00000004" / "rank-1.pt").unlink()
    assert {loaded[0] for loaded in together(3, lambda comm: loading._load(tmp_path, comm))} == {3}
    first, second = sorted(record.getMessage() for record in caplog.records)
    assert "rank 0 passes over step-00000004: " in first and "cannot be used by rank(s) [1], which say why" in first
    assert "rank 1 passes over step-00000004: " in second and "rank-1.pt cannot be read" in second


@pytest.mark.parametrize(
    "change",
    [
        *({"step": value} for value in (2, "1", None, True, 1.0, [])),
        *({"world_size": value} for value in (3, 0, -1, "1", None, True, 1e99, {})),
        *({"sha256": value} for value in ([], [1], "00", None, {"0": "00"}, ["00", "00"], [None], [["00"]])),
        *({"format": value} for value in (2, "1", None, True, 1.0)),
    ],
    ids=str,
)
def test_a_manifest_that_makes_no_sense(tmp_path: Path, change: dict):
    folder = together(2, lambda comm: saving._save(tmp_path, state(1), 1, comm, keep=1))[0]
    manifest = json.loads((folder / "manifest.json").read_text())
    for damaged in (manifest | change, {k: v for k, v in manifest.items() if k not in change}, [manifest], 1, None):
        (folder / "manifest.json").write_text(json.dumps(damaged))
        for size in (1, 2, 3):
            errors = together(size, lambda comm: loading._load(tmp_path, comm), catch=CheckpointError)
            assert all(isinstance(error, CheckpointError) for error in errors), (damaged, errors)
            assert "manifest.json" in str(errors[0])


@settings(max_examples=40, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
def test_any_damage_is_found(tmp_path_factory, data):
    comm, folder = LocalComm(), tmp_path_factory.mktemp("damage")
    for step in (1, 2):
        checkpoint.save(folder, state(step), step, comm)
    victim = folder / "step-00000002" / data.draw(st.sampled_from(["rank-0.pt", "manifest.json"]))
    content = bytearray(victim.read_bytes())
    how = data.draw(st.sampled_from(["flip", "truncate", "remove"]))
    if how == "flip" and victim.suffix == ".pt":
        content[data.draw(st.integers(0, len(content) - 1))] ^= 1 << data.draw(st.integers(0, 7))
        victim.write_bytes(content)
    elif how == "remove":
        victim.unlink()
    else:
        victim.write_bytes(content[: data.draw(st.integers(0, len(content) - 2))])
    step, loaded = checkpoint.load(folder, comm)
    assert step == 1 and loaded["epoch"] == 1


def test_only_damaged_ones(tmp_path: Path, comm):
    folder = checkpoint.save(tmp_path, state(1), 1, comm)
    (folder / "rank-0.pt").write_bytes(b"nonsense")
    with pytest.raises(CheckpointError, match=r"rank-0\.pt is damaged"):
        checkpoint.load(tmp_path, comm)


def test_nothing_is_unpickled(tmp_path: Path, comm, monkeypatch):
    class Payload:
        def __reduce__(self):
            return (Path.touch, (tmp_path / "owned",))

    with monkeypatch.context() as careless:  # who writes it does not look whether it can be read
        careless.setattr(torch, "load", lambda *_, **__: None)
        checkpoint.save(tmp_path, {"x": Payload()}, 1, comm)
    with pytest.raises(CheckpointError, match="cannot be read"):
        checkpoint.load(tmp_path, comm)
    assert not (tmp_path / "owned").exists()
