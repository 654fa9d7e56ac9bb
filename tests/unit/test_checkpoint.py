"""Checkpoints appear whole or not at all; damage is found, named, and passed over where an older one is valid.

And what ranks hold back is shared out anew where there are more or fewer of them.
"""

import copy
import functools
import itertools
import json
import logging
import multiprocessing
import os
import signal
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import Tensor

import dgcopt
from dgcopt import DGC, CheckpointError, ConfigError, checkpoint
from dgcopt.checkpoint import STATE_KEY, reshare
from dgcopt.comm import LocalComm
from tests.support.worlds import Ranks, same, together


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

    for place in ("_write", "_write_text", "_put"):
        with monkeypatch.context() as patched, pytest.raises(KeyboardInterrupt):
            patched.setattr(checkpoint, place, die)
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
        patched.setattr(checkpoint.os, "replace", die)
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


# -- what a save may delete ------------------------------------------------------------------------------------------


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


@pytest.mark.parametrize("size", [1, 2, 3])
def test_only_valid_ones_are_kept(tmp_path: Path, size: int):
    """For damage to any of three ranks' files, whatever the number of ranks that save next."""

    def save(step: int, ranks: int, keep: int) -> set[int]:
        together(ranks, lambda comm: checkpoint._save(tmp_path, state(step), step, comm, keep=keep))
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
        together(3, lambda comm, step=step: checkpoint._save(tmp_path, state(step), step, comm, keep=2))
    (tmp_path / "step-00000004" / "rank-1.pt").unlink()
    assert {loaded[0] for loaded in together(3, lambda comm: checkpoint._load(tmp_path, comm))} == {3}
    first, second = sorted(record.getMessage() for record in caplog.records)
    assert "rank 0 passes over step-00000004: " in first and "cannot be used by rank(s) [1], which say why" in first
    assert "rank 1 passes over step-00000004: " in second and "rank-1.pt cannot be read" in second


def test_saving_goes_on_once_there_is_space_again(tmp_path: Path, monkeypatch):
    """On a disk that three checkpoints fill: leftovers of failed saves would take the space of later ones."""
    (together(2, lambda comm: checkpoint._save(tmp_path / "size", state(0), 0, comm, keep=1)))
    one, limit = sum(path.stat().st_size for path in (tmp_path / "size").rglob("*.pt")), [0]
    disk, write = tmp_path / "disk", checkpoint._write

    def write_if_space(path: Path, state: dict) -> bytes:
        digest = write(path, state)
        used = sum(path.stat().st_size for path in disk.rglob("*.pt"))
        if used > limit[0]:
            os.truncate(path, max(0, path.stat().st_size - (used - limit[0])))
            raise OSError(28, "No space left on device")
        return digest

    monkeypatch.setattr(checkpoint, "_write", write_if_space)

    def save(step: int) -> list:
        return together(2, lambda comm: checkpoint._save(disk, state(step), step, comm, keep=1), CheckpointError)

    for limit[0], step, fits in ((2 * one, 1, True), (int(1.6 * one), 2, False), (int(1.9 * one), 3, False)):
        done = save(step)
        assert all(isinstance(outcome, Path if fits else CheckpointError) for outcome in done), done
        assert together(2, lambda comm: checkpoint._load(disk, comm))[0][0] == 1
    limit[0] = 2 * one
    assert {outcome.name for outcome in save(4)} == {"step-00000004"}
    assert [path.name for path in disk.iterdir()] == ["step-00000004"]


def test_a_disk_without_space_for_a_manifest(tmp_path: Path, comm, monkeypatch):
    checkpoint.save(tmp_path, state(1), 1, comm)

    def full(path: Path, text: str) -> None:
        path.write_text("")
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patched, pytest.raises(CheckpointError, match="No space left"):
        patched.setattr(checkpoint, "_write_text", full)
        checkpoint.save(tmp_path, state(2), 2, comm)
    assert [path.name for path in tmp_path.iterdir()] == ["step-00000001"]


# -- two runs, one directory -----------------------------------------------------------------------------------------


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
    write, outcomes = checkpoint._write, []
    for loads in (True, False):
        directory, other = tmp_path / str(loads), runs()
        if loads:
            assert other("load", directory) == "None"

        def meanwhile(path: Path, state: dict, directory=directory, other=other) -> bytes:
            digest = write(path, state)
            outcomes.append(other("save", directory, {"run": "other"}, 1))
            return digest

        with monkeypatch.context() as patched:
            patched.setattr(checkpoint, "_write", meanwhile)
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
        checkpoint._announce(left, step + 9, 1, step)
        (left / "rank-0.pt").write_bytes(b"half")
    assert checkpoint.load(tmp_path, LocalComm()) == (8, {"step": 8})
    checkpoint.save(tmp_path, {"step": 9}, 9, LocalComm())
    assert sorted(path.name for path in tmp_path.iterdir()) == ["step-00000008", "step-00000009"]


# -- steps and names -------------------------------------------------------------------------------------------------


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
        return checkpoint._save(tmp_path, state_of_last if comm.rank == 2 else {}, 1, comm, keep=1)

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
    folder = together(2, lambda comm: checkpoint._save(tmp_path, state(1), 1, comm, keep=1))[0]
    manifest = json.loads((folder / "manifest.json").read_text())
    for damaged in (manifest | change, {k: v for k, v in manifest.items() if k not in change}, [manifest], 1, None):
        (folder / "manifest.json").write_text(json.dumps(damaged))
        for size in (1, 2, 3):
            errors = together(size, lambda comm: checkpoint._load(tmp_path, comm), catch=CheckpointError)
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


def test_a_directory_that_cannot_be_written(tmp_path: Path, comm):
    (tmp_path / "file").write_text("")
    with pytest.raises(CheckpointError, match="rank 0: cannot make"):
        checkpoint.save(tmp_path / "file" / "below", state(1), 1, comm)
    with pytest.raises(ConfigError, match="keep"):
        checkpoint.save(tmp_path, state(1), 1, comm, keep=0)
    with pytest.raises(ConfigError, match="step must be a whole number of at least 0"):
        checkpoint.save(tmp_path, state(1), -1, comm)


# -- more or fewer ranks ---------------------------------------------------------------------------------------------

SHAPES = {"a": (3, 2), "b": (5,), "c": ()}


@st.composite
def ranks_that_were(draw: st.DrawFn) -> list[dict[str, Any]]:
    """States of 1 to 5 ranks, with optimizers at one or two places and memory of any kinds, parameters and dtypes."""
    size = draw(st.integers(1, 5))
    kinds = draw(st.lists(st.sampled_from(["residual", "momentum", "velocity"]), unique=True))
    names = {kind: draw(st.lists(st.sampled_from(sorted(SHAPES)), unique=True)) for kind in kinds}
    dtype = draw(st.sampled_from([torch.float32, torch.float64]))
    generator = torch.Generator().manual_seed(draw(st.integers(0, 999)))
    deep = draw(st.booleans())

    def optimizer(rank: int) -> dict[str, Any]:
        memory = {
            kind: {name: torch.randn(SHAPES[name], generator=generator, dtype=dtype) for name in names[kind]}
            for kind in kinds
        }
        kept = {"rank": rank, "world_size": size, "step": 7, "order": ["b", "a"], "memory": memory}
        return {"state": {0: {"step": 3}}, "param_groups": [{"lr": 0.1}], STATE_KEY: kept}

    return [
        {
            "model": {"w": torch.ones(2)},
            "rng": torch.tensor([rank]),
            STATE_KEY: "not an optimizer's",
            "optimizer": optimizer(rank),
            **({"more": [{"inner": (optimizer(rank), None)}]} if deep else {}),
        }
        for rank in range(size)
    ]


def optimizers_in(state: dict[str, Any]) -> list[dict[str, Any]]:
    return [state["optimizer"], *(entry["inner"][0] for entry in state.get("more", []))]


def sums(states: list[dict[str, Any]]) -> list[dict[tuple[str, str], Tensor]]:
    """By optimizer, kind and parameter: what all ranks hold, added up."""
    total: list[dict[tuple[str, str], Tensor]] = [{} for _ in optimizers_in(states[0])]
    for state in states:
        for found, optimizer in zip(total, optimizers_in(state), strict=True):
            for kind, by_name in optimizer[STATE_KEY]["memory"].items():
                for name, tensor in by_name.items():
                    found[kind, name] = found.get((kind, name), torch.zeros((), dtype=torch.float64)) + tensor.double()
    return total


def assert_shared_out(before: list[dict[str, Any]], after: list[dict[str, Any]]) -> None:
    for here, there in zip(sums(before), sums(after), strict=True):
        assert here.keys() == there.keys()
        for key, tensor in here.items():
            torch.testing.assert_close(there[key], tensor, rtol=1e-6, atol=1e-6)
    for rank, state in enumerate(after):
        base = copy.deepcopy(before[rank % len(before)])
        for mine, theirs in zip(optimizers_in(state), optimizers_in(base), strict=True):
            assert (mine[STATE_KEY]["rank"], mine[STATE_KEY]["world_size"]) == (rank, len(after))
            shape = {k: {n: t.shape for n, t in v.items()} for k, v in mine[STATE_KEY]["memory"].items()}
            assert shape == {k: {n: t.shape for n, t in v.items()} for k, v in theirs[STATE_KEY]["memory"].items()}
            if rank >= len(before):
                assert not any(t.any() for v in mine[STATE_KEY]["memory"].values() for t in v.values())
            for name in ("rank", "world_size", "memory"):
                theirs[STATE_KEY][name] = mine[STATE_KEY][name]
        assert same(base, state), "something besides the memory is not the base rank's"


@given(before=ranks_that_were(), size=st.integers(1, 5))
def test_memory_is_shared_out(before: list[dict[str, Any]], size: int):
    untouched = copy.deepcopy(before)
    after = [reshare(before, rank, size) for rank in range(size)]
    assert_shared_out(before, after)
    if size == len(before):
        assert same(after, before)
    for rank in range(size):  # a result shares no memory with what it was made of
        for optimizer in optimizers_in(after[rank]):
            for by_name in optimizer[STATE_KEY]["memory"].values():
                for tensor in by_name.values():
                    tensor.fill_(9)
    assert same(before, untouched)


def test_what_all_ranks_share_is_taken_from_the_first():
    def state(rank: int) -> dict[str, Any]:
        shared = {"Q": {"w": torch.ones(2)}} if rank == 0 else {}  # only first ranks of machines know it
        return {STATE_KEY: {"rank": rank, "world_size": 4, "memory": {}, "shared": shared}}

    states = [state(rank) for rank in range(4)]
    for size in (2, 3, 6):
        for rank in range(size):
            assert reshare(states, rank, size)[STATE_KEY]["shared"]["Q"]["w"].tolist() == [1.0, 1.0]


def test_a_rank_looks_only_at_what_it_needs():
    class Looked(list):
        def __getitem__(self, rank):
            seen.append(rank)
            return super().__getitem__(rank)

    states = Looked({"n": rank} for rank in range(5))
    for rank, size, expected in [(0, 2, [0, 2, 4]), (1, 2, [1, 3]), (6, 7, [1]), (2, 7, [2]), (3, 4, [3])]:
        seen: list[int] = []
        assert reshare(states, rank, size) == {"n": rank % 5} and seen == expected


def test_states_that_do_not_belong_together():
    def state_of(rank: int, size: int, shape: int = 2, place: str = "optimizer") -> dict[str, Any]:
        memory = {"residual": {"w": torch.ones(shape)}}
        return {place: {STATE_KEY: {"rank": rank, "world_size": size, "step": 0, "order": [], "memory": memory}}}

    for states, words in (
        (
            [state_of(0, 2), state_of(0, 2)],
            r"state\['optimizer'\] was given by rank 1 of 2, but is that of rank 0 of 2",
        ),
        ([state_of(0, 3), state_of(1, 3)], "rank 0 of 2, but is that of rank 0 of 3"),
        ([state_of(0, 2), state_of(1, 2, 3)], "residual of 'w' has other shapes on ranks 0, 1"),
        ([state_of(0, 2), state_of(1, 2, place="x")], "ranks 0 and 1 gave the memory of other optimizers"),
        ([state_of(0, 2), {}], "ranks 0 and 1 gave the memory of other optimizers"),
    ):
        with pytest.raises(CheckpointError, match=words):
            reshare(states, 0, 1)
    for states, rank, size in (([], 0, 1), ([{}], 1, 1), ([{}], -1, 2), ([{}], 0, 0)):
        with pytest.raises(ConfigError):
            reshare(states, rank, size)


@settings(max_examples=25, deadline=None)
@given(older=ranks_that_were(), newer=ranks_that_were(), size=st.integers(1, 5), data=st.data())
def test_a_checkpoint_of_other_ranks(tmp_path_factory, older, newer, size, data):
    """Read from disk; with any damage to any rank's part, all ranks take the older one."""
    folder = tmp_path_factory.mktemp("resized")
    for step, states in ((1, older), (2, newer)):
        together(len(states), lambda comm, s=step, t=states: checkpoint._save(folder, t[comm.rank], s, comm, keep=2))
    loaded = together(size, lambda comm: checkpoint._load(folder, comm))
    assert [step for step, _ in loaded] == [2] * size
    assert_shared_out(newer, [state for _, state in loaded])

    victim = folder / "step-00000002" / f"rank-{data.draw(st.integers(0, len(newer) - 1))}.pt"
    content = bytearray(victim.read_bytes())
    how = data.draw(st.sampled_from(["flip", "truncate", "remove"]))
    if how == "flip":
        content[data.draw(st.integers(0, len(content) - 1))] ^= 1 << data.draw(st.integers(0, 7))
        victim.write_bytes(content)
    elif how == "remove":
        victim.unlink()
    else:
        victim.write_bytes(content[: data.draw(st.integers(0, len(content) - 1))])
    loaded = together(size, lambda comm: checkpoint._load(folder, comm))
    assert [step for step, _ in loaded] == [1] * size
    assert_shared_out(older, [state for _, state in loaded])


def states_of(world: Ranks) -> list[dict[str, Any]]:
    return [
        {"model": model.state_dict(), "optimizer": optimizer.state_dict()}
        for model, optimizer in zip(world.models, world.optimizers, strict=True)
    ]


def resumed(states: list[dict[str, Any]], size: int, ratio: float = 0.05, gain: int = 1, **sgd: Any) -> Ranks:
    """`size` ranks that go on from what another number of them were, with `gain` times their memory."""
    make = functools.partial(torch.optim.SGD, lr=0.02, **sgd)
    world = Ranks(size, make, compression=DGC(ratio, values="fp64"))
    for rank, (model, optimizer) in enumerate(zip(world.models, world.optimizers, strict=True)):
        if not states:
            continue
        state = reshare(states, rank, size)
        for by_name in state["optimizer"][STATE_KEY]["memory"].values():
            for tensor in by_name.values():
                tensor *= gain
        model.load_state_dict(state["model"])
        optimizer.load_state_dict(state["optimizer"])
    return world


@pytest.mark.parametrize(("before", "after"), [(4, 2), (2, 4), (4, 3), (3, 4), (3, 1)])
def test_training_goes_on_with_other_ranks(before: int, after: int):
    sgd = {"momentum": 0.9, "nesterov": True, "weight_decay": 0.01}
    old = resumed([], before, **sgd)
    for seed in range(6):
        old.step(seed)
    states = states_of(old)
    new = resumed(states, after, **sgd)
    assert_shared_out(states, states_of(new))
    new.assert_replicas_equal()
    for seed in range(6, 12):
        new.step(seed)
        new.assert_replicas_equal()
    assert all(sum.any() for (kind, _), sum in sums(states_of(new))[0].items() if kind == "residual")


def effect_of_what_is_pending(world: Ranks) -> list[Tensor]:
    """How far parameters move in three steps without a gradient."""
    start = world.weights()
    for _ in range(3):
        for model, optimizer in zip(world.models, world.optimizers, strict=True):
            optimizer.zero_grad()
            sum((param * 0).sum() for param in model.parameters()).backward()
        for optimizer in world.optimizers:
            optimizer.step()
    return [now - before for now, before in zip(world.weights(), start, strict=True)]


@pytest.mark.parametrize(
    "sgd",
    [
        {"momentum": 0.9},
        {"momentum": 0.9, "nesterov": True, "weight_decay": 0.1},
        {"momentum": 0.8, "dampening": 0.2, "weight_decay": 0.1, "maximize": True},
        {},
    ],
    ids=str,
)
@pytest.mark.parametrize("size", [1, 2, 3, 5])
def test_what_is_pending_does_what_it_would_have_done(size: int, sgd: dict[str, Any]):
    """If everything is sent at the next step, lr * sum / size moves parameters alike where lr * sum grows with size.

    The sum does here, in place of lr, which would act on weight decay too.
    """
    old = resumed([], 4, **sgd)
    for seed in range(6):
        old.step(seed)
    states = states_of(old)
    expected = effect_of_what_is_pending(resumed(states, 4, ratio=1.0, gain=4, **sgd))
    actual = effect_of_what_is_pending(resumed(states, size, ratio=1.0, gain=size, **sgd))
    for here, there in zip(actual, expected, strict=True):
        torch.testing.assert_close(here, there, rtol=1e-9, atol=1e-15)
    # biases are never held back, and without momentum nothing of them is pending
    assert all(there.norm() > 1e-4 for there in expected if there.dim() > 1)
