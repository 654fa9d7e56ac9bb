"""Whose positions are: the same in C and in Triton as in torch, and back again."""

from __future__ import annotations

import pytest
import torch
from hypothesis import strategies as st

from dgcopt.kernels import owner_of
from tests.support.oracle import all_implementations, built, native, specification


@all_implementations(
    count=st.sampled_from([0, 1, 7, 300, 1000]),
    size=st.sampled_from([1, 2, 3, 8, 64, 1000, 70_000]),
    most=st.sampled_from([1000, 2**25, 2**40]),
    seed=st.integers(0, 2**20),
)
def test_by_owner_and_back(of, count, size, most, seed):
    generator = torch.Generator().manual_seed(seed)
    positions = torch.randint(most, (count,), generator=generator).unique()
    order, places, counts = of.by_owner(positions, size)
    for mine, theirs in zip((order, places, counts), specification.by_owner(positions, size), strict=True):
        assert mine.dtype == theirs.dtype and torch.equal(mine, theirs)
    assert torch.equal(of.of_owners(places, counts, size), positions[order])
    few = counts[: size // 2]  # what came from the first owners alone
    some = places[: int(few.sum())]
    assert torch.equal(of.of_owners(some, few, size), specification.of_owners(some, few, size))


def test_an_owner_has_one_of_each_row():
    owners = owner_of(torch.arange(8 * 1000), 8).view(1000, 8)
    assert (owners.sort(1).values == torch.arange(8)).all()
    assert (torch.bincount(owners[:, 0], minlength=8) > 1000 / 8 / 2).all(), "nobody has a column for himself"


@built
def test_what_cannot_be_is_refused():
    with pytest.raises(ValueError, match="0 or more"):
        native.by_owner(torch.tensor([3, -1]), 2)
    with pytest.raises(ValueError, match="flat tensor of 3"):
        native.of_owners(torch.tensor([0, 1]), torch.tensor([1, 2]), 2)
    with pytest.raises(ValueError, match="at most 2 owners"):
        native.of_owners(torch.tensor([0, 1, 2]), torch.tensor([1, 1, 1]), 2)
    with pytest.raises(ValueError, match="at most 2 owners"):
        native.of_owners(torch.tensor([0]), torch.tensor([2, -1]), 2)
