"""Sums by owners equal a naive rule in plain Python; every coordinate has one owner."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import dgcopt
from dgcopt.flat.shard import Chunks, Shard, Sharding
from tests.conformance import naive_owners
from tests.conformance.owners import Ranks


@pytest.mark.parametrize("size", [1, 2, 3, 5, 8])
@pytest.mark.parametrize(("keep", "decay"), [(1.0, 1.0), (2.5, 0.9), (0.3, 1.0), (math.inf, 1.0)])
def test_sums_of_owners_equal_the_naive_rule(size: int, keep: float, decay: float) -> None:
    ranks = Ranks(dgcopt.TopK(0.05, "fp64", decay=decay, reduce="owner", keep=keep), size)
    steps = [ranks.gradients(seed) for seed in range(4)]
    expected = naive_owners.owners(0.05, keep, decay, steps, ranks.buckets[0])
    for grads, theirs in zip(steps, expected, strict=True):
        torch.testing.assert_close(ranks.exchange(grads), theirs, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("size", [1, 2, 3, 5, 8])
def test_partitioned_choices_equal_the_naive_rule(size: int) -> None:
    ranks = Ranks(dgcopt.TopK(0.05, reduce="partition"), size)
    steps = [ranks.gradients(seed) for seed in range(4)]
    expected = naive_owners.partition(0.05, steps, ranks.buckets[0])
    for grads, theirs in zip(steps, expected, strict=True):
        torch.testing.assert_close(ranks.exchange(grads), theirs, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("overlap", [False, True])
@pytest.mark.parametrize("reduce", ["gather", "owner", "partition"])
def test_dgc_sends_what_top_k_does(reduce: Any, overlap: bool) -> None:
    """With memory read before the vote, and with memory updated already."""
    one = Ranks(dgcopt.DGC(0.05, vectors="sparse", values="fp64", reduce=reduce), 4)
    other = Ranks(dgcopt.TopK(0.05, "fp64", reduce=reduce), 4)
    for seed in range(4):
        for context in one.contexts:
            context.certain = not overlap
        torch.testing.assert_close(one.exchange(one.gradients(seed)), other.exchange(other.gradients(seed)))
        one.assert_nothing_is_lost()


@pytest.mark.parametrize("size", [1, 2, 3, 8])
def test_vectors_are_added_up_by_owners(size: int) -> None:
    """Sums of full values are exact; in 8 bits, rounding errors of values and sums are sent later."""
    whole = Ranks(dgcopt.DGC(0.1, vectors="fp64", reduce="owner"), size, kind="vector")
    coded = Ranks(dgcopt.DGC(0.1, vectors="int8", reduce="owner"), size, kind="vector")
    for seed in range(3):
        grads = whole.gradients(seed)
        torch.testing.assert_close(whole.exchange(grads), sum(grads, torch.zeros(())), rtol=1e-12, atol=1e-12)
        torch.testing.assert_close(coded.exchange(grads), sum(grads, torch.zeros(())), rtol=0, atol=float(size))
    for _ in range(8):
        coded.exchange([torch.zeros_like(grad) for grad in grads])
        coded.assert_nothing_is_lost()
    torch.testing.assert_close(coded.applied, coded.given, rtol=1e-4, atol=1e-4)


@settings(deadline=None)
@given(st.sampled_from([Sharding, Chunks]), st.integers(1, 3000), st.integers(1, 70))
def test_every_coordinate_has_one_owner(make: type[Sharding], numel: int, size: int) -> None:
    sharding = make(numel, size)
    positions = torch.arange(numel)
    owners, places = sharding.owners(positions), sharding.places(positions)
    for owner in range(size):
        mine = owners == owner
        assert torch.equal(sharding.positions(places[mine], owner), positions[mine])
        assert bool((places[mine].diff() > 0).all()) and bool((places[mine] < sharding.length).all())
    flat = torch.randn(numel)
    left, whole = flat.clone(), torch.zeros(numel)
    for owner in range(size):
        whole += Shard.taken_from(left, sharding, owner).whole()
    assert torch.equal(whole, flat) and not left.any()


@pytest.mark.parametrize(
    "wrong",
    [
        {"reduce": "owners"},
        {"keep": 0},
        {"keep": True},
        {"keep": math.nan},
        {"keep": 2.0},
        {"keep": 0.5, "reduce": "gather"},
        {"keep": math.inf, "reduce": "partition"},
    ],
)
def test_settings_that_do_not_exist(wrong: dict[str, Any]) -> None:
    for make in (dgcopt.TopK, dgcopt.ChunkedTopK, dgcopt.DGC):
        with pytest.raises(dgcopt.ConfigError, match=next(iter(wrong))):
            make(**wrong)
