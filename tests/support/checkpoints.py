"""Small states for checkpoints, and comparisons of the memory of two worlds."""

import copy
from typing import Any

import torch
from torch import Tensor

from dgcopt.flat.optimizer_state import STATE_KEY
from tests.support.worlds import same


def state(step: int) -> dict:
    return {"weights": torch.full((50,), float(step)), "epoch": step, "nested": {"betas": (0.9, 0.99), "name": "x"}}


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
