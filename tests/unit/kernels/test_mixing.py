"""Weighted sums: the same bits in C as in torch."""

from __future__ import annotations

import pytest
import torch
from hypothesis import strategies as st

from dgcopt import kernels
from dgcopt.kernels import Mixture
from tests.support.oracle import (
    KINDS,
    Sizes,
    all_implementations,
    assert_same_bits,
    built,
    native,
    numbers,
    specification,
)


def lists_of(large):
    return st.lists(st.integers(0, 200) | large, max_size=4)


weights = st.sampled_from([0.0, 0.1, 0.5, 0.9, 1 - 0.9, 0.999, 1.0, 3.0])


@all_implementations(
    lengths=Sizes(lists_of(st.just(5000)), lists_of(st.just(140_001))),
    gap=st.integers(0, 3),
    keep=weights,
    add=weights,
    kind=st.sampled_from(KINDS),
    seed=st.integers(0, 2**20),
)
def test_mix(of, lengths, gap, keep, add, kind, seed):
    starts = [gap + sum(lengths[:place]) + gap * place for place in range(len(lengths))]
    parts = [numbers(length + gap, torch.float32, kind, seed + length)[gap:] for length in lengths]
    ours = numbers(2 * gap + sum(lengths) + gap * len(lengths), torch.float32, kind, seed)
    theirs = ours.clone()
    for each, flat in ((of, ours), (specification, theirs)):
        each.mix(flat, Mixture(keep, add, starts, parts))
    assert_same_bits(ours, theirs)


def test_what_they_mean():
    flat, mixture = (
        torch.tensor([1.0, 2.0, 3.0]),
        Mixture(2.0, 0.5, [0, 2], [torch.tensor([4.0]), torch.tensor([-4.0])]),
    )
    kernels.mix(flat, mixture)
    assert flat.tolist() == [4, 2, 4]
    kernels.mix(flat, mixture.inverse)
    assert flat.tolist() == [1, 2, 3]


@built
def test_what_does_not_fit_is_refused():
    with pytest.raises(ValueError, match="4 elements from 0 on are not among those from 0 to 3"):
        native.mix(torch.zeros(3), Mixture(1.0, 1.0, [0], [torch.zeros(4)]))
    with pytest.raises(ValueError, match="from -1 on"):
        native.mix(torch.zeros(3), Mixture(1.0, 1.0, [-1], [torch.zeros(1)]))
    with pytest.raises(ValueError, match="from 1 on are not among those from 2 to 3"):
        native.mix(torch.zeros(3), Mixture(1.0, 1.0, [0, 1], [torch.zeros(2), torch.zeros(1)]))
