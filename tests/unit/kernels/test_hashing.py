"""Random bits and positions: they are random, and C and Triton give those of the specification."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from dgcopt import kernels
from dgcopt.compressors import Context, Memory, Place
from tests.support.oracle import EXAMPLES, all_implementations, built, keys, native, specification


@all_implementations(
    count=st.integers(0, 300),
    longest=st.sampled_from([1, 2, 10, 1000, 2**31 - 1]),
    key=st.integers(0, 2**64 - 1),
    seed=st.integers(0, 2**20),
)
def test_draw_from_spans(of, count, longest, key, seed):
    generator = torch.Generator().manual_seed(seed)
    lengths = torch.randint(1, longest + 1, (count,), generator=generator)
    starts = lengths.cumsum(0) - lengths
    drawn = of.draw_from_spans(starts, lengths, key)
    assert torch.equal(drawn, specification.draw_from_spans(starts, lengths, key))
    assert ((starts <= drawn) & (drawn < starts + lengths)).all()


def test_all_of_a_span_are_drawn_alike_often():
    count, length = 70_000, 7
    drawn = specification.draw_from_spans(torch.zeros(count).long(), torch.full((count,), length), 0x123456789ABCDEF0)
    deviation = (count * (1 / length) * (1 - 1 / length)) ** 0.5
    assert (torch.bincount(drawn, minlength=length) - count / length).abs().max() < 4 * deviation


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


@built
@settings(max_examples=EXAMPLES, deadline=None)
@given(
    count=st.integers(0, 40) | st.integers(16_380, 16_390) | st.just(70_001),
    start=st.integers(0, 5),
    seed=st.integers(0, 99),
)
def test_hash_of(count, start, seed):
    generator = torch.Generator().manual_seed(seed)
    data = torch.randint(256, (start + count,), dtype=torch.uint8, generator=generator)[start:]
    assert torch.equal(native.hash_of(data), specification.hash_of(data))
