"""Maxima, norms and sums of blocks and tensors: C and Triton give the bits of the specification."""

from __future__ import annotations

import pytest
import torch
from hypothesis import strategies as st
from torch import Tensor

from dgcopt.kernels.reductions.torch import STRETCH, sum_of_rows
from tests.support.oracle import (
    KINDS,
    InTriton,
    Sizes,
    all_implementations,
    assert_same_bits,
    block_counts,
    built,
    in_triton,
    native,
    numbers,
    places,
    specification,
)

COUNTS = (3, 1024, 0, 1025, 2100, 1)


def in_order(x: Tensor) -> float:
    total = torch.zeros((), dtype=x.dtype)
    for each in x:
        total = total + each
    return total.item()


each_implementation = pytest.mark.parametrize(
    "of",
    [
        pytest.param(specification, id="torch"),
        pytest.param(native, id="native", marks=built),
        pytest.param(InTriton(), id="triton", marks=in_triton),
    ],
)


@each_implementation
def test_sums_are_of_stretches_in_order(of):
    place = torch.arange(len(COUNTS)).repeat_interleave(torch.tensor(COUNTS))
    rows = numbers(2 * len(place), torch.float32, "normal", 1).exp2().view(2, -1)
    values = numbers(64 * len(place), torch.float32, "normal", 2)
    squares = sum_of_rows(values.view(-1, 64).double().square())
    largest, norms = of.tensor_norms(values, place, len(COUNTS))
    found = of.tensor_sums(rows, place, len(COUNTS))
    for all_numbers, sums in ((rows[0], found[0]), (rows[1], found[1]), (squares, norms)):
        for mine, total in zip(all_numbers.split(COUNTS), sums.tolist(), strict=True):
            parts = [in_order(stretch) for stretch in mine.split(STRETCH)]
            assert total == in_order(torch.tensor(parts, dtype=torch.float64))
    expected = [mine.abs().amax().item() if len(mine) else 0.0 for mine in values.split([64 * n for n in COUNTS])]
    assert largest.tolist() == expected


@each_implementation
def test_more_elements_than_a_float32_counts(of):
    """Of stretches with 2^24, 1 and 2^24 of them."""
    counts = torch.zeros(1, 2 * STRETCH + 1)
    counts[0, [3, STRETCH, -1]] = torch.tensor([2.0**24, 1, 2.0**24])
    place = torch.zeros(counts.shape[1], dtype=torch.int64)
    total = of.tensor_sums(counts, place, 1)
    assert_same_bits(total, specification.tensor_sums(counts, place, 1))
    assert total.tolist() == [[2**25 + 1]]


def test_the_order_is_seen_by_this_test():
    """All numbers one after another have another sum."""
    x = numbers(2100, torch.float32, "normal", 1).exp2()
    assert in_order(x) != in_order(torch.tensor([in_order(part) for part in x.split(STRETCH)]))


@all_implementations(
    blocks=Sizes(st.integers(0, 5) | st.just(100), st.just(2000)),
    kind=st.sampled_from(KINDS),
    decay=st.sampled_from([1.0, 0.95, 0.3]),
    shift=st.integers(0, 3),
    seed=st.integers(0, 2**20),
)
def test_add_and(of, blocks, kind, decay, shift, seed):
    g, e = (numbers(64 * blocks + shift, torch.float32, kind, seed + i)[shift:] for i in range(2))
    sums = torch.full((4, 64 * blocks + shift), 7.0)[:, shift:]
    assert_same_bits(of.add_and_maxima(g, e, decay, sums[0]), specification.add_and_maxima(g, e, decay, sums[1]))
    assert_same_bits(of.add_and_norms(g, e, decay, sums[2]), specification.add_and_norms(g, e, decay, sums[3]))
    for each in sums[:3]:
        assert_same_bits(each, sums[3])
    assert_same_bits(of.block_maxima(sums[0]), specification.block_maxima(sums[0]))


@built
def test_half_a_block_is_refused():
    with pytest.raises(ValueError, match="flat tensor of 64"):
        native.add_and_norms(*torch.zeros(2, 70), 1.0, torch.zeros(70))


tensors = st.integers(1, 5)


@all_implementations(
    blocks=block_counts,
    tensors=tensors,
    kind=st.sampled_from(KINDS),
    shift=st.integers(0, 3),
    seed=st.integers(0, 2**20),
)
def test_norms(of, blocks, tensors, kind, shift, seed):
    values, place = numbers(64 * blocks + shift, torch.float32, kind, seed)[shift:], places(blocks, tensors, seed)
    (largest, squares), expected = (each.tensor_norms(values, place, tensors) for each in (of, specification))
    assert_same_bits(largest, expected[0])
    assert squares.dtype == torch.float64 and torch.equal(squares, expected[1])
