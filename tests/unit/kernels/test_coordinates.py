"""What is done at few positions of a flat tensor, and where those are: in C the bits of the specification in torch."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from oracle import EXAMPLES, KINDS, assert_same_bits, built, halves_and_wholes, numbers, numels

from dgcopt.kernels import native
from dgcopt.kernels import torch as specification


@built
@settings(max_examples=EXAMPLES, deadline=None)
@given(
    numel=numels,
    dtype=halves_and_wholes,
    kind=st.sampled_from(KINDS),
    density=st.sampled_from([0.0, 0.01, 0.5, 1.0]),
    shift=st.integers(0, 3),
    seed=st.integers(0, 2**20),
)
def test_few_positions(numel, dtype, kind, density, shift, seed):
    flat = numbers(numel + shift, dtype, kind, seed)[shift:]
    positions = (torch.rand(numel, generator=torch.Generator().manual_seed(seed)) < density).nonzero().squeeze(1)
    values = numbers(len(positions), torch.float32, kind, seed + 1)
    assert_same_bits(native.gather(flat, positions), specification.gather(flat, positions))
    ours, theirs = flat.clone(), flat.clone()
    native.subtract_at(ours, positions, values)
    specification.subtract_at(theirs, positions, values)
    assert_same_bits(ours, theirs)
    native.clear_at(ours, positions)
    specification.clear_at(theirs, positions)
    assert_same_bits(ours, theirs)


@built
@settings(max_examples=EXAMPLES, deadline=None)
@given(
    numel=numels,
    kind=st.sampled_from(KINDS),
    least=st.sampled_from([1e-45, 1e-3, 1.0, 2.0, 1e38, math.inf]),
    shift=st.integers(0, 3),
    seed=st.integers(0, 2**20),
)
def test_positions_reaching(numel, kind, least, shift, seed):
    flat = numbers(numel + shift, torch.float32, kind, seed)[shift:]
    found = native.positions_above(flat, least, numel)
    for of in (native, specification):
        again = of.positions_above(flat, least, len(found))
        assert again is not None and torch.equal(found, again)
        assert of.positions_above(flat, least, len(found) - 1) is None
    assert found.tolist() == [i for i, x in enumerate(flat.tolist()) if abs(x) >= torch.tensor(least).item()]


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
