"""Rounding at random: the same bits in C and Triton as in torch, from numbers that look random."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from dgcopt import kernels
from dgcopt.compressors import Context, Memory, Place
from tests.support.oracle import (
    EXAMPLES,
    KINDS,
    Sizes,
    all_implementations,
    assert_same_bits,
    built,
    native,
    numbers,
    places,
    specification,
)

tensors = st.integers(1, 5)
blocks = Sizes(st.sampled_from([0, 1, 2, 3, 17, 40]), st.just(2200))
keys = st.one_of(st.integers(0, 2**64 - 1), st.sampled_from([0, 2**31, 2**32 - 1, 2**63, 2**64 - 1]))
hows = st.sampled_from(["set", "add", "subtract"])


def key_of(seed: int, step: int, index: int, rank: int) -> int:
    """As compressors have it."""
    return Context(Place(rank, 3, "average", step, None, [], index=index), Memory([])).key(seed)


def draw(i: int, key: int) -> int:
    """What the docstring says, in whole numbers."""
    x = (i * 0x9E3779B9 + key % 2**32) % 2**32
    x ^= x >> 16
    x = (x * 0x21F0AAAD + (key >> 32)) % 2**32
    x ^= x >> 15
    x = x * 0x735A2D97 % 2**32
    return x ^ x >> 15


@settings(max_examples=EXAMPLES, deadline=None)
@given(count=st.integers(0, 50), key=keys)
def test_draws(count, key):
    assert [x % 2**32 for x in kernels.draws(count, key).tolist()] == [draw(i, key) for i in range(count)]


@pytest.mark.parametrize("bit", range(32))
def test_every_bit_is_one_half_of_the_time_and_says_nothing_of_its_neighbours_or_of_other_keys(bit):
    count, near = 2**18, 4.5 / 2**9  # standard deviations of the mean of 2^18 signs

    def signs(key: int) -> torch.Tensor:
        return 1 - 2 * (kernels.draws(count, key) >> bit & 1).double()

    first, *others = (signs(key_of(0, step, 0, rank)) for step in range(3) for rank in range(3))
    assert first.mean().abs() < near
    for lag in (1, 2, 3, 64, 512, 1000):
        assert (first[:-lag] * first[lag:]).mean().abs() < near, lag
    for other in others:
        assert (first * other).mean().abs() < near
        assert (first[:-64] * other[64:]).mean().abs() < near


@all_implementations(
    blocks=blocks, tensors=tensors, kind=st.sampled_from(KINDS), shift=st.integers(0, 3), seed=st.integers(0, 2**20)
)
def test_norms(of, blocks, tensors, kind, shift, seed):
    values, place = numbers(64 * blocks + shift, torch.float32, kind, seed)[shift:], places(blocks, tensors, seed)
    (largest, squares), expected = (each.tensor_norms(values, place, tensors) for each in (of, specification))
    assert_same_bits(largest, expected[0])
    assert squares.dtype == torch.float64 and torch.equal(squares, expected[1])


@all_implementations(
    blocks=blocks,
    tensors=tensors,
    levels=st.sampled_from([1, 2, 5, 7, 100, 127]),
    share=st.sampled_from([0.0, 0.3, 1.0, 4.0]),
    key=keys,
    kind=st.sampled_from(KINDS),
    how=hows,
    shift=st.integers(0, 3),
    seed=st.integers(0, 2**20),
)
def test_levels(of, blocks, tensors, levels, share, key, kind, how, shift, seed):
    values, place = numbers(64 * blocks + shift, torch.float32, kind, seed)[shift:], places(blocks, tensors, seed)
    norms, _ = specification.tensor_norms(values, place, tensors)
    norms *= max(share, 1.0)  # a norm is at least as large as the largest
    packed = of.round_levels(values, norms, place, levels, key)
    assert torch.equal(packed, specification.round_levels(values, norms, place, levels, key))
    ours, theirs = values.clone(), values.clone()
    arguments = (packed, levels.bit_length(), norms * share, place)
    most = of.put_levels(*arguments, ours, how)
    assert most == specification.put_levels(*arguments, theirs, how) <= levels
    assert_same_bits(ours, theirs)


@all_implementations(
    blocks=blocks,
    key=keys,
    kind=st.sampled_from(KINDS),
    how=hows,
    shift=st.integers(0, 3),
    seed=st.integers(0, 2**20),
)
def test_powers(of, blocks, key, kind, how, shift, seed):
    values = numbers(64 * blocks + shift, torch.float32, kind, seed)[shift:]
    message = of.round_powers(values, key)
    assert torch.equal(message, specification.round_powers(values, key))
    ours, theirs = values.clone(), values.clone()
    assert of.put_powers(message, ours, how) == specification.put_powers(message, theirs, how) < 255
    assert_same_bits(ours, theirs)


def test_what_they_mean():
    values, place = torch.zeros(64), torch.zeros(1, dtype=torch.int64)
    values[:4] = torch.tensor([8.0, -8.0, 4.0, -2.0])
    largest, squares = kernels.tensor_norms(values, place, 2)
    assert largest.tolist() == [8, 0] and squares.tolist() == [148, 0]
    packed = kernels.round_levels(values, torch.tensor([8.0]), place, 4, key=1)  # none has to be rounded
    assert packed[:3].tolist() == [4 + 16 * (8 + 4), 2 + 16 * (8 + 1), 0]
    message = kernels.round_powers(values, key=1)
    assert message[:5].tolist() == [130, 130, 129, 128, 0] and message[64:].tolist() == [10, *[0] * 7]


@built
def test_what_does_not_fit_is_refused():
    values, scales, place = torch.zeros(64), torch.ones(1), torch.tensor([0])
    with pytest.raises(ValueError, match="not of 8"):
        native.put_levels(torch.zeros(72, dtype=torch.uint8), 8, scales, place, values, "set")
    with pytest.raises(ValueError, match="not 128"):
        native.round_levels(values, scales, place, 128, 0)
    with pytest.raises(ValueError, match="places from 1 to 1"):
        native.round_levels(values, scales, place + 1, 7, 0)
    with pytest.raises(ValueError, match="bytes are needed"):
        native.put_powers(torch.zeros(71, dtype=torch.uint8), values, "set")
