"""256 levels between two ends: the same bits in C as in torch."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from oracle import EXAMPLES, KINDS, assert_same_bits, built, numbers

from dgcopt.kernels import native
from dgcopt.kernels import torch as specification


@built
@settings(max_examples=EXAMPLES, deadline=None)
@given(
    numel=st.one_of(st.integers(1, 300), st.just(140_001)),
    offset=st.sampled_from([0.0, 1.0, -3.7, 1e6, 1e30]),
    kind=st.sampled_from(KINDS),
    how=st.sampled_from(["set", "add", "subtract"]),
    shift=st.integers(0, 3),
    seed=st.integers(0, 2**20),
)
def test_minmax(numel, offset, kind, how, shift, seed):
    values = (numbers(numel + shift, torch.float32, kind, seed) + offset)[shift:]
    ends = native.minmax_ends(values)
    assert_same_bits(ends, specification.minmax_ends(values))
    ours, theirs = torch.empty(numel, dtype=torch.uint8), torch.empty(numel, dtype=torch.uint8)
    native.minmax_codes(values, ends, ours)
    specification.minmax_codes(values, ends, theirs)
    assert torch.equal(ours, theirs)
    mine, other = values.clone(), values.clone()
    native.put_minmax(ours, ends, mine, how)
    specification.put_minmax(theirs, ends, other, how)
    assert_same_bits(mine, other)


def test_what_they_mean():
    values, codes = torch.tensor([0.0, 255.0, 100.25, -0.0]), torch.empty(4, dtype=torch.uint8)
    ends = specification.minmax_ends(values)
    specification.minmax_codes(values, ends, codes)
    assert ends.tolist() == [0, 255] and codes.tolist() == [0, 255, 100, 0]


@built
def test_what_does_not_fit_is_refused():
    with pytest.raises(ValueError, match="flat tensor of 2"):
        native.minmax_codes(torch.zeros(3), torch.zeros(3), torch.zeros(3, dtype=torch.uint8))
    with pytest.raises(ValueError, match="flat tensor of 3"):
        native.put_minmax(torch.zeros(2, dtype=torch.uint8), torch.zeros(2), torch.zeros(3), "set")
    with pytest.raises(ValueError, match="smallest"):
        native.minmax_ends(torch.zeros(0))
