"""Stochastic rounding to levels, powers and trits: C and Triton give the bits of the specification."""

from __future__ import annotations

import pytest
import torch
from hypothesis import strategies as st

from dgcopt import kernels
from dgcopt.kernels.rounding.torch import pack_trits, unpack_trits
from tests.support.oracle import (
    KINDS,
    Sizes,
    all_implementations,
    assert_same_bits,
    block_counts,
    built,
    hows,
    keys,
    native,
    numbers,
    places,
    specification,
)

tensors = st.integers(1, 5)


@all_implementations(
    blocks=block_counts,
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
    blocks=block_counts,
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


def test_levels_and_powers_by_hand():
    values, place = torch.zeros(64), torch.zeros(1, dtype=torch.int64)
    values[:4] = torch.tensor([8.0, -8.0, 4.0, -2.0])
    largest, squares = kernels.tensor_norms(values, place, 2)
    assert largest.tolist() == [8, 0] and squares.tolist() == [148, 0]
    packed = kernels.round_levels(values, torch.tensor([8.0]), place, 4, key=1)  # none has to be rounded
    assert packed[:3].tolist() == [4 + 16 * (8 + 4), 2 + 16 * (8 + 1), 0]
    message = kernels.round_powers(values, key=1)
    assert message[:5].tolist() == [130, 130, 129, 128, 0] and message[64:].tolist() == [10, *[0] * 7]


@built
def test_levels_that_do_not_fit_are_refused():
    values, scales, place = torch.zeros(64), torch.ones(1), torch.tensor([0])
    with pytest.raises(ValueError, match="not of 8"):
        native.put_levels(torch.zeros(72, dtype=torch.uint8), 8, scales, place, values, "set")
    with pytest.raises(ValueError, match="not 128"):
        native.round_levels(values, scales, place, 128, 0)
    with pytest.raises(ValueError, match="places from 1 to 1"):
        native.round_levels(values, scales, place + 1, 7, 0)
    with pytest.raises(ValueError, match="bytes are needed"):
        native.put_powers(torch.zeros(71, dtype=torch.uint8), values, "set")


def test_every_byte():
    for byte in range(256):
        packed = torch.tensor([byte], dtype=torch.uint8)
        trits, out = unpack_trits(packed, 5), torch.zeros(5)
        right = specification.put_trits(packed, torch.ones(1), torch.zeros(1, dtype=torch.int64), out, "set")
        assert bool(right) == (byte < 243)
        if right:
            assert sum(3 ** (4 - i) * (t + 1) for i, t in enumerate(trits.tolist())) == byte
            assert pack_trits(trits).tolist() == [byte] and torch.equal(out, trits.float())


@all_implementations(
    blocks=block_counts,
    tensors=st.integers(1, 5),
    share=st.sampled_from([0.0, 0.3, 1.0, 4.0]),
    key=keys,
    kind=st.sampled_from(KINDS),
    shift=st.integers(0, 3),
    seed=st.integers(0, 2**20),
)
def test_round_trits(of, blocks, tensors, share, key, kind, shift, seed):
    values, place = numbers(64 * blocks + shift, torch.float32, kind, seed)[shift:], places(blocks, tensors, seed)
    scales = specification.tensor_norms(values, place, tensors)[0] * share
    packed = of.round_trits(values, scales, place, key)
    assert torch.equal(packed, specification.round_trits(values, scales, place, key))


@all_implementations(
    numel=Sizes(st.integers(0, 700) | st.just(6400), st.just(140_001)),
    tensors=st.integers(1, 5),
    more=st.integers(0, 9),
    how=hows,
    damaged=st.booleans(),
    shift=st.integers(0, 3),
    seed=st.integers(0, 2**20),
)
def test_put_trits(of, numel, tensors, more, how, damaged, shift, seed):
    generator = torch.Generator().manual_seed(seed)
    length = -(-numel // 5) + more
    packed = torch.randint(256 if damaged else 243, (length + shift,), generator=generator, dtype=torch.uint8)[shift:]
    scales, place = numbers(tensors, torch.float32, "normal", seed), places(-(-numel // 64), tensors, seed)
    ours = numbers(numel, torch.float32, "of all sizes", seed)
    theirs = ours.clone()
    right = of.put_trits(packed, scales, place, ours, how)
    assert right == specification.put_trits(packed, scales, place, theirs, how) == bool((packed < 243).all())
    if right:
        assert_same_bits(ours, theirs)


@all_implementations(
    voters=st.integers(1, 9),
    count=st.one_of(st.integers(0, 40), st.sampled_from([641, 1400])),
    alike=st.booleans(),
    seed=st.integers(0, 2**20),
)
def test_majority(of, voters, count, alike, seed):
    votes = torch.randint(256, (voters, count), generator=torch.Generator().manual_seed(seed), dtype=torch.uint8)
    if alike:
        votes[:] = votes[:1].clone()
    assert torch.equal(of.majority(votes), specification.majority(votes))


@built
def test_majority_of_very_many():
    votes = torch.randint(256, (1030, 3), generator=torch.Generator().manual_seed(0), dtype=torch.uint8)
    assert torch.equal(native.majority(votes), specification.majority(votes))


def test_trits_by_hand():
    values, place = torch.zeros(64), torch.zeros(1, dtype=torch.int64)
    values[:4] = torch.tensor([8.0, -8.0, 4.0, -2.0])
    packed = kernels.round_trits(values, torch.tensor([2.0]), place, key=1)  # none has to be rounded
    trits = unpack_trits(packed, 64)
    assert trits[:5].tolist() == [1, -1, 1, -1, 0]
    out = torch.full((6,), 10.0)
    assert kernels.put_trits(packed, torch.tensor([3.0]), place, out, "add") and out.tolist() == [13, 7, 13, 7, 10, 10]
    said = unpack_trits(kernels.majority(torch.tensor([[1], [3]], dtype=torch.uint8)), 8)
    assert said.tolist() == [-1, 0, *[1] * 6]


@built
def test_trits_that_do_not_fit_are_refused():
    scales, place, packed = torch.ones(1), torch.tensor([0]), torch.zeros(13, dtype=torch.uint8)
    with pytest.raises(ValueError, match="places from 1 to 1"):
        native.round_trits(torch.zeros(64), scales, place + 1, 0)
    with pytest.raises(ValueError, match="bytes are needed"):
        native.put_trits(packed[:12], scales, place, torch.zeros(64), "set")
    with pytest.raises(ValueError, match="a row of bytes"):
        native.majority(packed)
