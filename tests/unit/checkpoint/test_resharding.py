"""Memory is resharded among more or fewer ranks with its sum over ranks preserved."""

import copy
import functools
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from dgcopt import DGC, CheckpointError, ConfigError
from dgcopt.checkpoint import loading, reshare, saving
from dgcopt.flat.optimizer_state import STATE_KEY
from tests.support.checkpoints import assert_shared_out, optimizers_in, sums
from tests.support.worlds import Ranks, same, together

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


def test_shared_memory_is_taken_from_the_first_rank():
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
        together(len(states), lambda comm, s=step, t=states: saving._save(folder, t[comm.rank], s, comm, keep=2))
    loaded = together(size, lambda comm: loading._load(folder, comm))
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
    loaded = together(size, lambda comm: loading._load(folder, comm))
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
def test_residuals_have_the_same_effect_after_resharding(size: int, sgd: dict[str, Any]):
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
