"""Checkpoints appear whole or not at all; damage is found, named, and passed over where an older one is valid.

And what ranks hold back is shared out anew where there are more or fewer of them.
"""

import copy
import functools
import json
import os
import signal
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import Tensor
from worlds import Ranks, same, together

import dgcopt
from dgcopt import DGC, CheckpointError, ConfigError, checkpoint
from dgcopt.checkpoint import STATE_KEY, reshare
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


@pytest.mark.parametrize(
    "state_of_last", [{"x": lambda: 0}, {"x": (n for n in [])}], ids=["no pickling", "of the wrong type"]
)
def test_a_state_that_cannot_be_written_fails_everywhere(tmp_path: Path, state_of_last):
    def save(comm):
        return checkpoint._save(tmp_path, state_of_last if comm.rank == 2 else {}, 1, comm, keep=1)

    errors = together(3, save, catch=CheckpointError)
    assert all(isinstance(error, CheckpointError) for error in errors), errors
    assert "rank(s) [2] failed" in str(errors[0])


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
