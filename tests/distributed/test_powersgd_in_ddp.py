"""PowerSGD against torch's own hooks: the same training, by two real ranks under DistributedDataParallel."""

import functools

import pytest
from launching import HERE, Outcome, launch, missing

pytestmark = [
    pytest.mark.processes,
    pytest.mark.timeout(200),
    pytest.mark.skipif(bool(missing("torch")), reason=missing("torch")),
]

TOLERANCE = {"float32": 1e-6, "fp16": 5e-4}


@functools.cache
def outcome() -> Outcome:
    return launch("torch", 2, [str(HERE / "powersgd_worker.py")], limit=180)


def test_all_comparisons_were_made_and_nothing_is_left_behind() -> None:
    assert outcome().code == 0, outcome().tail
    assert len(outcome().records) == 13 and not outcome().orphans


@pytest.mark.parametrize("place", range(11))
def test_training_ends_where_it_does_with_torchs_hook(place: int) -> None:
    assert outcome().records, outcome().tail
    name, by_rank = list(outcome().records.items())[place]
    for record in by_rank.values():
        assert record["from dense"] > 1e-3, f"{name}: compression made no difference, so nothing was compared"
        assert record["apart"] < TOLERANCE.get(name, 1e-12), f"{name}: {record}"


def test_several_buckets_overlap_on_gloo_and_replicas_keep_the_same_bits() -> None:
    first, second = outcome().records["several buckets"].values()
    assert first["buckets"] > 1 and first["weights"] == second["weights"]


def test_the_distributed_optimizer_does_the_same_as_the_hook() -> None:
    first, second = outcome().records["DistributedOptimizer"].values()
    assert first["apart"] < 1e-12 and first["weights"] == second["weights"]
