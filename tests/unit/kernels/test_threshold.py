"""The magnitudes that reach a threshold: the same in C and in Triton as in torch, and right."""

from __future__ import annotations

import math

import torch
from hypothesis import strategies as st

from tests.support.oracle import (
    KINDS,
    Sizes,
    all_implementations,
    assert_same_bits,
    built,
    native,
    numbers,
    numels,
    specification,
)


@all_implementations(
    numel=Sizes(st.integers(0, 200) | st.just(2500), numels),
    kind=st.sampled_from(KINDS),
    least=st.sampled_from([1e-45, 1e-3, 1.0, 2.0, 1e38, math.inf]),
    share=st.sampled_from([0.0, 0.001, 0.1, 0.5, 0.99, 1.0]),
    shift=st.integers(0, 3),
    seed=st.integers(0, 2**20),
)
def test_select_above(of, numel, kind, least, share, shift, seed):
    flat = numbers(numel + shift, torch.float32, kind, seed)[shift:]
    magnitudes, bound = flat.abs().tolist(), torch.tensor(least).item()
    reach = [i for i in range(numel) if magnitudes[i] >= bound]
    for most in {int(share * numel), int(share * len(reach)), max(0, len(reach) - 1), len(reach), numel + 1}:
        found, values = of.select_above(flat, least, most)
        expected_positions, expected_values = specification.select_above(flat, least, most)
        assert torch.equal(found, expected_positions)
        assert_same_bits(values, expected_values)
        assert_same_bits(values, flat[found])
        largest = sorted(reach, key=lambda i: -magnitudes[i])[:most]
        assert found.tolist() == sorted(largest)
        sums = torch.full((2, numel + shift), 7.0)[:, shift:]
        ours, theirs = (
            each.add_and_select_above(flat, flat.flip(0), 0.9, out, least, most)
            for each, out in zip((of, specification), sums, strict=True)
        )
        assert_same_bits(*sums)
        assert torch.equal(ours[0], theirs[0])
        assert_same_bits(ours[1], theirs[1])


@built
def test_a_sample_that_misleads():
    flat = torch.linspace(1, 2, 2**20)
    flat[:: 2**20 // 4096] = 3.0  # all that is looked at first
    for most in (1000, 5000, 400_000):
        expected, _ = specification.select_above(flat, 0.5, most)
        out = torch.empty_like(flat)
        for found, values in (
            native.select_above(flat, 0.5, most),
            native.add_and_select_above(flat, flat, 0.0, out, 0.5, most),
        ):
            assert torch.equal(found, expected) and torch.equal(values, flat[found])
        assert torch.equal(out, flat)
        flat[:: 2**20 // 4096] = 0.1
