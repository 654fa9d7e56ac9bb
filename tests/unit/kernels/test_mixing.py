"""Weighted sums: the same bits in C as in torch."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from oracle import EXAMPLES, KINDS, assert_same_bits, built, numbers, numels

from dgcopt import kernels
from dgcopt.kernels import native
from dgcopt.kernels import torch as specification

weights = st.sampled_from([0.0, 0.1, 0.5, 0.9, 1 - 0.9, 0.999, 1.0, 3.0])


@built
@settings(max_examples=EXAMPLES, deadline=None)
@given(
    numel=numels,
    keep=weights,
    add=weights,
    in_place=st.booleans(),
    kind=st.sampled_from(KINDS),
    shift=st.integers(0, 3),
    seed=st.integers(0, 2**20),
)
def test_mix_and_unmix(numel, keep, add, in_place, kind, shift, seed):
    x, y = (numbers(numel + shift, torch.float32, kind, seed + of)[shift:] for of in range(2))
    mixed = []
    for of in (native, specification):
        mine = x.clone()
        mixed.append(mine if in_place else torch.empty_like(x))
        of.mix(mine, keep, y, add, mixed[-1])
    assert_same_bits(*mixed)
    for of, out in zip((native, specification), mixed, strict=True):
        of.unmix(out, keep, y, add)
    assert_same_bits(*mixed)


def test_what_they_mean():
    x, y, out = torch.tensor([1.0, 2.0]), torch.tensor([4.0, -4.0]), torch.empty(2)
    kernels.mix(x, 2.0, y, 0.5, out)
    assert out.tolist() == [4, 2]
    kernels.unmix(out, 2.0, y, 0.5)
    assert torch.equal(out, x)


@built
def test_what_does_not_fit_is_refused():
    with pytest.raises(ValueError, match="flat tensor of 3"):
        native.mix(torch.zeros(3), 1.0, torch.zeros(4), 1.0, torch.zeros(3))
    with pytest.raises(ValueError, match="flat tensor of 4"):
        native.unmix(torch.zeros(4), 1.0, torch.zeros(3), 1.0)
