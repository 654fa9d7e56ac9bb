"""Reads and writes at positions, and their owners: C and Triton give the bits of the specification."""

from __future__ import annotations

import pytest
import torch
from hypothesis import strategies as st

from dgcopt import kernels
from dgcopt.kernels import Parts, owner_of
from tests.support.oracle import (
    KINDS,
    InTriton,
    Sizes,
    all_implementations,
    assert_same_bits,
    built,
    halves_and_wholes,
    in_triton,
    native,
    numbers,
    numels,
    specification,
)


@all_implementations(
    numel=Sizes(numels.filter(lambda numel: numel < 6000), numels),
    dtype=halves_and_wholes,
    kind=st.sampled_from(KINDS),
    density=st.sampled_from([0.0, 0.01, 0.5, 1.0]),
    shift=st.integers(0, 3),
    seed=st.integers(0, 2**20),
)
def test_few_positions(of, numel, dtype, kind, density, shift, seed):
    flat = numbers(numel + shift, dtype, kind, seed)[shift:]
    positions = (torch.rand(numel, generator=torch.Generator().manual_seed(seed)) < density).nonzero().squeeze(1)
    values = numbers(len(positions), torch.float32, kind, seed + 1)
    assert_same_bits(of.gather(flat, positions), specification.gather(flat, positions))
    ours, theirs = flat.clone(), flat.clone()
    of.subtract_at(ours, positions, values)
    specification.subtract_at(theirs, positions, values)
    assert_same_bits(ours, theirs)
    of.clear_at(ours, positions)
    specification.clear_at(theirs, positions)
    assert_same_bits(ours, theirs)


@built
def test_positions_outside_are_refused_and_nothing_is_changed():
    flat = torch.ones(100)
    for positions in ([3, 100], [-1], [2**62]):
        outside = torch.tensor(positions)
        with pytest.raises(IndexError, match="within the 100"):
            native.gather(flat, outside)
        with pytest.raises(IndexError, match="within the 100"):
            native.subtract_at(flat, outside, torch.ones(len(outside)))
        with pytest.raises(IndexError, match="within the 100"):
            native.clear_at(flat, outside)
    assert flat.tolist() == [1.0] * 100
    with pytest.raises(ValueError, match="flat tensor of 2"):
        native.subtract_at(flat, torch.tensor([1, 2]), torch.ones(1))
    before = flat._version
    native.subtract_at(flat, torch.tensor([1, 2]), torch.ones(2))
    assert flat.sum() == 98 and flat._version > before


def in_parts(sizes, gaps, kind, seed, missing=()):
    """Parts that lie apart, of one flat tensor; each behind one element of something else."""
    starts = torch.tensor([0, *(size + gap for size, gap in zip(sizes, gaps, strict=True))]).cumsum(0)[:-1]
    tensors = [numbers(size + 1, torch.float32, kind, seed + place)[1:] for place, size in enumerate(sizes)]
    left = [None if place in missing else tensor for place, tensor in enumerate(tensors)]
    return Parts(left, starts, starts + torch.tensor(sizes))


def some_positions(parts, count, seed):
    """Ascending ones, and ascending ones again, as two messages name them; both may name the same."""
    owned = torch.cat([torch.arange(a, b) for a, b in zip(parts.starts.tolist(), parts.stops.tolist(), strict=True)])
    random = torch.Generator().manual_seed(seed)
    return torch.cat([owned[torch.rand(len(owned), generator=random) < count] for _ in range(2)])


@all_implementations(
    sizes=st.lists(st.integers(1, 300), min_size=1, max_size=6),
    missing=st.sets(st.integers(0, 5)),
    kind=st.sampled_from(KINDS),
    density=st.sampled_from([0.0, 0.01, 0.5, 1.0]),
    seed=st.integers(0, 2**20),
)
def test_parts_that_lie_apart(of, sizes, missing, kind, density, seed):
    gaps = torch.randint(0, 3, (len(sizes),), generator=torch.Generator().manual_seed(seed)).tolist()
    ours, theirs = (in_parts(sizes, gaps, kind, seed, missing) for _ in range(2))
    positions = some_positions(ours, density, seed)
    values = numbers(len(positions), torch.float32, kind, seed + 100)
    rates = torch.rand(len(sizes), generator=torch.Generator().manual_seed(seed)).neg().tolist()
    before = [None if part is None else part._version for part in ours.tensors]
    sums = of.add_at(ours, positions, values)
    assert_same_bits(sums, specification.add_at(theirs, positions, values))
    of.step_at(ours, rates, positions, sums)
    specification.step_at(theirs, rates, positions, sums)
    for mine, other in zip(ours.tensors, theirs.tensors, strict=True):
        assert_same_bits(mine, other)
    assert all(part is None or part._version > was for part, was in zip(ours.tensors, before, strict=True))


@pytest.mark.parametrize("of", [specification, kernels], ids=["torch", "in use"])
def test_parts_of_flat_tensors_by_hand(of):
    spans = (torch.tensor([0, 64, 128]), torch.tensor([2, 67, 129]))
    parts = Parts([torch.zeros(2), None, torch.zeros(1)], *spans)
    sums = of.add_at(parts, torch.tensor([1, 65, 128, 0, 1]), torch.tensor([1.0, 2.0, 3.0, 4.0, 5.0]))
    assert [None if part is None else part.tolist() for part in parts.tensors] == [[4.0, 6.0], None, [3.0]]
    assert sums.tolist() == [6.0, 0.0, 3.0, 4.0, 6.0]
    weights = Parts([torch.ones(2), torch.ones(3), None], *spans)
    of.step_at(weights, [-0.5, 2.0, 1.0], torch.tensor([1, 66, 128, 1]), torch.tensor([8.0, 4.0, 1.0, 8.0]))
    assert weights.tensors[0].tolist() == [1.0, -3.0] and weights.tensors[1].tolist() == [1.0, 1.0, 9.0]
    for position in (-1, 2, 63, 67, 129, 2**40):
        with pytest.raises(IndexError, match="within the parts"):
            of.add_at(parts, torch.tensor([0, position]), torch.ones(2))
        with pytest.raises(IndexError, match="within the parts"):
            of.step_at(weights, [1.0] * 3, torch.tensor([0, position]), torch.ones(2))
    assert parts.tensors[0].tolist() == [4.0, 6.0] and weights.tensors[0].tolist() == [1.0, -3.0]


@built
def test_parts_that_do_not_fit_are_refused():
    spans = (torch.tensor([0, 64]), torch.tensor([2, 67]))
    short, whole = (Parts([torch.zeros(2), torch.zeros(size)], *spans) for size in (2, 3))
    with pytest.raises(ValueError, match="flat tensor of 3"):
        native.add_at(short, torch.tensor([1]), torch.ones(1))
    with pytest.raises(ValueError, match="flat tensor of 1"):
        native.add_at(whole, torch.tensor([1]), torch.ones(2))
    with pytest.raises(ValueError, match="as many rates"):
        native.step_at(whole, [1.0], torch.tensor([1]), torch.ones(1))


@pytest.mark.parametrize("of", [pytest.param(InTriton(), id="triton", marks=in_triton)])
def test_positions_outside_are_passed_over_where_nobody_waits(of):
    whole, three, spans = torch.ones(104), torch.ones(3), (torch.tensor([0, 64]), torch.tensor([2, 66]))
    flat, positions = whole[2:102], torch.tensor([-1, 3, 100])
    assert of.gather(flat, positions).tolist() == [0, 1, 0]
    of.subtract_at(flat, positions, three)
    assert whole.nonzero().view(-1).tolist() == [i for i in range(104) if i != 5]
    of.clear_at(flat, positions + 1)
    assert whole.nonzero().view(-1).tolist() == [i for i in range(104) if i not in (2, 5, 6)]
    parts = Parts([whole[8:10], whole[20:22]], *spans)
    assert of.add_at(parts, torch.tensor([-1, 2, 63, 66, 65]), torch.ones(5)).tolist() == [0, 0, 0, 0, 2]
    of.step_at(parts, [1.0, 1.0], torch.tensor([-1, 2, 63, 66, 2**40]), torch.ones(5))
    assert whole.sum() == 101 + 1 and whole[21] == 2
    with pytest.raises(ValueError, match="flat tensor of 2"):
        of.add_at(Parts([None, whole[:3]], *spans), positions, three)
    with pytest.raises(ValueError, match="at least 3 elements"):
        of.subtract_at(flat, positions, three[:2])
    with pytest.raises(ValueError, match="as many rates"):
        of.step_at(parts, [1.0], positions, three)


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
def test_wrong_operands_are_refused():
    with pytest.raises(ValueError, match="0 or more"):
        native.by_owner(torch.tensor([3, -1]), 2)
    with pytest.raises(ValueError, match="flat tensor of 3"):
        native.of_owners(torch.tensor([0, 1]), torch.tensor([1, 2]), 2)
    with pytest.raises(ValueError, match="at most 2 owners"):
        native.of_owners(torch.tensor([0, 1, 2]), torch.tensor([1, 1, 1]), 2)
    with pytest.raises(ValueError, match="at most 2 owners"):
        native.of_owners(torch.tensor([0]), torch.tensor([2, -1]), 2)
