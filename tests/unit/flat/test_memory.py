"""Memory is a transaction: changes of a step are seen after its commit, and a rollback leaves no trace."""

import dataclasses

import pytest
import torch

from dgcopt.averaging import Weights
from dgcopt.compressors import Context, Memory, Place
from dgcopt.flat.buckets import Bucket, Segment
from dgcopt.flat.store import Store
from dgcopt.kernels import BLOCK


@pytest.fixture
def memory() -> Memory:
    return Memory([Segment("a", torch.zeros(70), 0), Segment("b", torch.zeros(3), 128)])


def keep(memory: Memory) -> None:
    """One step, in every way in which memory changes."""
    memory.remember("slow", torch.zeros(1)).add_(1)
    memory.advance("fast")[1].fill_(2)
    memory.keep_residual(memory.residual()[1].fill_(3))
    held = memory.hold("in place")
    memory.on_commit(lambda: held.fill_(4))
    memory.share("matrix", memory.segments[1], torch.ones(2))


def seen(memory: Memory) -> dict[str, float]:
    return {kind: float(flat[0]) for kind, flat in memory.items()}


def test_changes_are_seen_after_the_commit_only(memory: Memory) -> None:
    keep(memory)
    assert set(seen(memory).values()) == {0.0} and not memory.shared
    memory.commit()
    assert seen(memory) == {"slow": 1, "fast": 2, "residual": 3, "in place": 4}
    assert memory.shared["matrix"]["b"].tolist() == [1, 1]
    assert memory["residual"][70:128].tolist() == [0] * 58, "gaps stay zero"


def test_a_rollback_leaves_no_trace(memory: Memory) -> None:
    keep(memory)
    memory.commit()
    before = {kind: flat.clone() for kind, flat in memory.items()}
    shared = memory.shared["matrix"]["b"]
    grad = torch.zeros(192)
    memory.add_unsent(grad)
    keep(memory)
    memory.rollback()
    assert before.keys() == dict(memory).keys() and memory.shared["matrix"]["b"] is shared
    assert all(torch.equal(memory[kind], flat) for kind, flat in before.items())
    keep(memory)
    memory.commit()
    assert seen(memory)["slow"] == 2


def test_parameters_that_no_rank_used_keep_their_memory(memory: Memory) -> None:
    keep(memory)
    memory.prepare([True, False])
    memory.commit()
    assert float(memory["slow"][0]) == 1 and memory["slow"][128:131].tolist() == [0] * 3
    assert memory["in place"][128:131].tolist() == [0] * 3 and "matrix" not in memory.shared


def test_facts_are_frozen_and_memory_is_changed_by_its_methods(memory: Memory) -> None:
    context = Context(Place(0, 2, "average", 5, None, memory.segments), memory)
    with pytest.raises(dataclasses.FrozenInstanceError):
        context.place.step = 6  # type: ignore[misc]
    with pytest.raises(AttributeError):
        context.step = 6  # type: ignore[misc]
    with pytest.raises(TypeError):
        memory["residual"] = torch.zeros(192)  # type: ignore[index]
    other = context.placed(op="sum", size=1)
    assert (context.op, context.size, other.op, other.size) == ("average", 2, "sum", 1)
    assert other.memory is memory and other.checks is context.checks


def test_an_author_meets_few_fields() -> None:
    assert len(dataclasses.fields(Context)) <= 12 and len(dataclasses.fields(Weights)) <= 12


def test_memory_of_parameters_that_come_together_keeps_the_higher_precision() -> None:
    """After a checkpoint of compressors per parameter, for one."""
    params, fine = {"a": torch.zeros(3), "b": torch.zeros(2)}, torch.tensor([1 + 2.0**-20, 3.0])
    store = Store()
    store.restore({**store.state(), "memory": {"residual": {"a": torch.ones(3, dtype=torch.bfloat16), "b": fine}}})
    segments = (Segment("a", params["a"], 0), Segment("b", params["b"], BLOCK))
    store.adopt(Bucket(0, segments, None, 2 * BLOCK))
    kept = store.memory()["residual"]
    assert kept["a"].eq(1).all() and torch.equal(kept["b"], fine)
