"""Checkpoints appear whole or not at all; damage is found, named, and passed over where an older one is valid."""

import json
from pathlib import Path

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import dgcopt
from dgcopt import CheckpointError, checkpoint
from dgcopt.comm.local import LocalComm


@pytest.fixture
def comm():
    return LocalComm()


def state(step: int) -> dict:
    return {"weights": torch.full((50,), float(step)), "epoch": step, "nested": {"betas": (0.9, 0.99), "name": "x"}}


def test_round_trip_and_what_is_kept(tmp_path: Path, comm):
    assert checkpoint.load(tmp_path / "nowhere", comm) is None
    for step in (10, 20, 30):
        checkpoint.save(tmp_path, state(step), step, comm, keep=2)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["step-00000020", "step-00000030"]
    step, loaded = checkpoint.load(tmp_path, comm)
    assert step == 30 and loaded["nested"] == state(30)["nested"]
    assert torch.equal(loaded["weights"], state(30)["weights"])
    checkpoint.save(tmp_path, state(31), 30, comm)  # the same step again replaces it
    assert checkpoint.load(tmp_path, comm)[1]["epoch"] == 31


def test_an_interrupted_save_leaves_the_previous_one(tmp_path: Path, comm, monkeypatch):
    checkpoint.save(tmp_path, state(1), 1, comm)

    def die(*_):
        raise KeyboardInterrupt

    for place in ("_write", "_write_text"):
        with monkeypatch.context() as patched, pytest.raises(KeyboardInterrupt):
            patched.setattr(checkpoint, place, die)
            checkpoint.save(tmp_path, state(2), 2, comm)
        assert checkpoint.load(tmp_path, comm)[0] == 1
    checkpoint.save(tmp_path, state(2), 2, comm)
    assert checkpoint.load(tmp_path, comm)[0] == 2
    assert not list(tmp_path.glob(".*"))


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


def test_a_checkpoint_of_another_number_of_ranks(tmp_path: Path, comm):
    folder = checkpoint.save(tmp_path, state(1), 1, comm)
    manifest = json.loads((folder / "manifest.json").read_text())
    (folder / "manifest.json").write_text(json.dumps(manifest | {"world_size": 4}))
    with pytest.raises(CheckpointError, match="4 ranks and this run has 1"):
        checkpoint.load(tmp_path, comm)


def test_nothing_is_unpickled(tmp_path: Path, comm):
    class Payload:
        def __reduce__(self):
            return (Path.touch, (tmp_path / "owned",))

    checkpoint.save(tmp_path, {"x": Payload()}, 1, comm)
    with pytest.raises(CheckpointError, match="cannot be read"):
        checkpoint.load(tmp_path, comm)
    assert not (tmp_path / "owned").exists()


def test_a_directory_that_cannot_be_written(tmp_path: Path, comm):
    (tmp_path / "file").write_text("")
    with pytest.raises(CheckpointError, match="rank 0: cannot make"):
        checkpoint.save(tmp_path / "file" / "below", state(1), 1, comm)
    with pytest.raises(dgcopt.ConfigError, match="keep"):
        checkpoint.save(tmp_path, state(1), 1, comm, keep=0)
