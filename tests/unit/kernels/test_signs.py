"""Signs and what they stand for: the same bits in C as in torch."""

from __future__ import annotations

import pytest
import torch
from hypothesis import strategies as st

from dgcopt import kernels
from dgcopt.kernels import Mixture
from tests.support.oracle import (
    KINDS,
    all_implementations,
    assert_same_bits,
    block_counts,
    built,
    hows,
    native,
    numbers,
    places,
    some_mixture,
    specification,
)


@all_implementations(
    numel=st.integers(0, 300),
    zero_is_minus=st.booleans(),
    kind=st.sampled_from(KINDS),
    shift=st.integers(0, 3),
    seed=st.integers(0, 2**20),
)
def test_pack_signs(of, numel, zero_is_minus, kind, shift, seed):
    values = numbers(numel + shift, torch.float32, kind, seed)[shift:]
    assert torch.equal(
        of.pack_signs(values, zero_is_minus), specification.pack_signs(values, zero_is_minus=zero_is_minus)
    )


@all_implementations(
    blocks=block_counts,
    tensors=st.integers(1, 5),
    kind=st.sampled_from(KINDS),
    how=hows,
    mixed=st.booleans(),
    shift=st.integers(0, 3),
    seed=st.integers(0, 2**20),
)
def test_split_and_put_signs(of, blocks, tensors, kind, how, mixed, shift, seed):
    values = numbers(64 * blocks + shift, torch.float32, kind, seed)[shift:]
    place = places(blocks, tensors, seed)
    packed, sums = of.split_signs(values)
    for mine, other in zip((packed, sums), specification.split_signs(values), strict=True):
        assert torch.equal(mine, other)
    other_values, total, other_total = values.flip(0), torch.empty_like(values), torch.empty_like(values)
    mixture = some_mixture(len(values), kind, seed) if mixed else None
    ours, theirs = values.clone(), values.clone()
    of_sum = of.split_sum(ours, other_values, total, mixture)
    for mine, other in zip(of_sum, specification.split_sum(theirs, other_values, other_total, mixture), strict=True):
        assert torch.equal(mine, other)
    assert_same_bits(total, other_total)
    assert_same_bits(ours, theirs)
    above, below, minuses = of.tensor_sums(sums, place, tensors)
    for mine, other in zip((above, below, minuses), specification.tensor_sums(sums, place, tensors), strict=True):
        assert_same_bits(mine, other)
    above, below = above.float(), below.float()
    five = torch.cat((sums, sums[:2].flip(1)))
    assert_same_bits(of.tensor_sums(five, place, tensors), specification.tensor_sums(five, place, tensors))
    ours, theirs = values.clone(), values.clone()
    of.put_signs(packed, above, below, place, ours, how, mixture)
    specification.put_signs(packed, above, below, place, theirs, how, mixture)
    assert_same_bits(ours, theirs)


@all_implementations(
    blocks=block_counts,
    tensors=st.integers(1, 5),
    ranks=st.integers(0, 4),
    kind=st.sampled_from(KINDS),
    shift=st.integers(0, 3),
    seed=st.integers(0, 2**20),
)
def test_split_sum_of_signs(of, blocks, tensors, ranks, kind, shift, seed):
    generator = torch.Generator().manual_seed(seed)
    base, place = numbers(64 * blocks + shift, torch.float32, kind, seed)[shift:], places(blocks, tensors, seed)
    packed = [torch.randint(256, (8 * blocks + 3,), generator=generator, dtype=torch.uint8)[3:] for _ in range(ranks)]
    scales = numbers(ranks * tensors, torch.float32, "normal", seed).view(ranks, tensors)
    lengths = torch.randint(65, (blocks,), generator=generator)
    ours, theirs = torch.empty_like(base), torch.empty_like(base)
    message = of.split_sum_of_signs(base, packed, scales, place, lengths, ours)
    expected = specification.split_sum_of_signs(base, packed, scales, place, lengths, theirs)
    for mine, other in zip(message, expected, strict=True):
        assert torch.equal(mine, other)
    assert_same_bits(ours, theirs)


@all_implementations(
    numel=st.one_of(st.integers(0, 300), st.just(140_001)),
    zero_is_minus=st.booleans(),
    kind=st.sampled_from(KINDS),
    shift=st.integers(0, 3),
    seed=st.integers(0, 2**20),
)
def test_mix_signs(of, numel, zero_is_minus, kind, shift, seed):
    x, y = (numbers(numel + shift, torch.float32, kind, seed + of)[shift:] for of in range(2))
    ours, theirs = torch.empty_like(x), torch.empty_like(x)
    packed = of.mix_signs(x, 0.9, y, 1 - 0.9, ours, zero_is_minus)
    assert torch.equal(packed, specification.mix_signs(x, 0.9, y, 1 - 0.9, theirs, zero_is_minus))
    assert_same_bits(ours, theirs)


def test_signs_by_hand():
    values = torch.zeros(128)
    values[:3] = torch.tensor([2.0, -3.0, 5.0])
    values[64] = -1
    packed, sums = kernels.split_signs(values)
    assert packed.tolist() == [2, *[0] * 7, 1, *[0] * 7]
    assert sums.tolist() == [[7, 0], [3, 1], [1, 1]]
    above, below, minuses = kernels.tensor_sums(sums, torch.tensor([1, 1]), 2).float()
    assert (above.tolist(), below.tolist(), minuses.tolist()) == ([0, 7], [0, 4], [0, 2])
    total = torch.empty(128)
    packed_of_sum, _ = kernels.split_sum(values, -2 * values, total)
    assert total[:3].tolist() == [-2, 3, -5] and packed_of_sum.tolist() == [5, *[0] * 15]
    momentum = Mixture(0.5, 2.0, [1], [torch.tensor([1.0, 2.0])])
    kernels.split_sum(x := values.clone(), -2 * values, total, momentum)
    assert x[:4].tolist() == [2, 0.5, 6.5, 0] and total[:3].tolist() == [-2, 6.5, -3.5]
    kernels.put_signs(packed, above, below, torch.tensor([1, 1]), x, "set", momentum.inverse)
    assert x[:4].tolist() == [7, (-4 - 2) / 0.5, (7 - 4) / 0.5, 7]
    out = torch.full((128,), 100.0)
    kernels.put_signs(packed, above, below, torch.tensor([1, 1]), out, "subtract")
    assert out[:4].tolist() == [93, 104, 93, 93]
    u, base, ranks = torch.empty(128), torch.full((128,), 0.5), [packed, packed_of_sum]
    signs, _ = kernels.split_sum_of_signs(
        base, ranks, torch.tensor([[1.0], [2.0]]), torch.tensor([0, 0]), torch.tensor([5, 0]), u
    )
    assert u[:6].tolist() == [-0.5, 1.5, -0.5, 3.5, 3.5, 0] and not u[6:].any() and signs.tolist() == [5, *[0] * 15]
    assert kernels.pack_signs(torch.tensor([0.0, -0.0, -1.0, 1.0]), zero_is_minus=True).tolist() == [7]
    assert kernels.mix_signs(values[:3], 0.5, values[:3], -2.0, total[:3]).tolist() == [5]
    assert total[:3].tolist() == [-3, 4.5, -7.5]


@built
def test_operands_that_do_not_fit_are_refused():
    one = torch.ones(1)
    with pytest.raises(ValueError, match="whole blocks"):
        native.split_signs(torch.zeros(65))
    with pytest.raises(ValueError, match="bytes are needed"):
        native.put_signs(torch.zeros(7, dtype=torch.uint8), one, one, torch.tensor([0]), torch.zeros(64), "set")
    with pytest.raises(ValueError, match="0 to 65 elements of 64"):
        flat, place = torch.zeros(128), torch.tensor([0, 0])
        native.split_sum_of_signs(flat, [], torch.zeros(0, 1), place, torch.tensor([0, 65]), flat)
    with pytest.raises(ValueError, match="65 elements from 0 on are not among those from 0 to 64"):
        flat = torch.zeros(64)
        native.split_sum(flat, flat, flat.clone(), Mixture(1.0, 1.0, [0], [torch.zeros(65)]))
    with pytest.raises(ValueError, match="places from 1 to 1"):
        native.put_signs(torch.zeros(8, dtype=torch.uint8), one, one, torch.tensor([1]), torch.zeros(64), "set")
    with pytest.raises(ValueError, match="flat tensor of 1 elements"):
        native.tensor_sums(torch.zeros(3, 1), torch.tensor([0, 0]), 1)
