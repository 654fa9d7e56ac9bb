"""256 levels between two ends: the same bits in C as in torch."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from dgcopt import kernels
from dgcopt.kernels import Mixture
from tests.support.oracle import (
    EXAMPLES,
    KINDS,
    Sizes,
    all_implementations,
    assert_same_bits,
    built,
    hows,
    native,
    numbers,
    some_mixture,
    specification,
)


@all_implementations(
    rows=st.integers(0, 4),
    numel=Sizes(st.integers(1, 300) | st.just(3000), st.just(140_001)),
    offset=st.sampled_from([0.0, 1.0, -3.7, 1e6, 1e30]),
    kind=st.sampled_from(KINDS),
    how=hows,
    mixed=st.booleans(),
    shift=st.integers(0, 3),
    seed=st.integers(0, 2**20),
)
def test_minmax(of, rows, numel, offset, kind, how, mixed, shift, seed):
    flat = numbers(rows * (numel + shift), torch.float32, kind, seed) + offset
    values = flat.view(rows, numel + shift)[:, shift:]
    ends = of.minmax_ends(values)
    assert_same_bits(ends, specification.minmax_ends(values))
    if mixed and rows:
        mine, other = (values.clone(memory_format=torch.contiguous_format) for _ in range(2))
        mixture = some_mixture(rows * numel, kind, seed)
        assert_same_bits(of.minmax_ends(mine, mixture), specification.minmax_ends(other, mixture))
        assert_same_bits(mine, other)
    mixture = some_mixture(numel, kind, seed) if mixed else None
    ours, theirs = (torch.empty(rows, 8 + numel, dtype=torch.uint8)[:, 8:] for _ in range(2))
    of.minmax_codes(values, ends, ours)
    specification.minmax_codes(values, ends, theirs)
    assert torch.equal(ours, theirs)
    for row, of_row, its_ends in zip(values, ours, ends, strict=True):
        mine, other = row.clone(), row.clone()
        of.put_minmax(of_row, its_ends, mine, how, mixture)
        specification.put_minmax(of_row, its_ends, other, how, mixture)
        assert_same_bits(mine, other)
    if not rows:
        return
    for divisor in (1, 3):
        mine, other = torch.empty(numel, dtype=torch.uint8), torch.empty(numel, dtype=torch.uint8)
        assert_same_bits(
            of.minmax_of_mean(ours, ends, divisor, mine), specification.minmax_of_mean(ours, ends, divisor, other)
        )
        assert torch.equal(mine, other)


@built
@settings(max_examples=EXAMPLES, deadline=None)
@given(
    exponent=st.integers(-40, 100),
    narrower=st.integers(0, 26),
    how=st.sampled_from(["set", "add"]),
    kind=st.sampled_from(KINDS),
    seed=st.integers(0, 2**20),
)
def test_every_code_between_any_ends(exponent, narrower, how, kind, seed):
    """C multiplies by a reciprocal where that is enough, and compares whole numbers where values are not too large."""
    values = numbers(1100, torch.float32, kind, seed).unsqueeze(0)
    codes = torch.arange(256, dtype=torch.uint8)
    generator = torch.Generator().manual_seed(seed)
    for _ in range(20):
        first, second = (torch.randn(2, generator=generator) * 2.0**exponent).clamp(-(2.0**100), 2.0**100).tolist()
        ends = torch.tensor(sorted((first, first + (second - first) * 2.0**-narrower)))
        mine, other = torch.zeros(256), torch.zeros(256)
        native.put_minmax(codes, ends, mine, how)
        specification.put_minmax(codes, ends, other, how)
        assert_same_bits(mine, other)
        ours, theirs = (torch.empty(values.shape, dtype=torch.uint8) for _ in range(2))
        native.minmax_codes(values, ends.unsqueeze(0), ours)
        specification.minmax_codes(values, ends.unsqueeze(0), theirs)
        assert torch.equal(ours, theirs)


@built
def test_levels_of_which_the_reciprocal_is_not_enough():
    """1 / (128 - 2^-17) as two floats: by both of them, 11 levels are a unit off."""
    ends, codes = torch.tensor([[-5.0, 5.0], [-1.94921875, 0.04296875]]), torch.arange(256, dtype=torch.uint8)
    mine, other = torch.empty(256), torch.empty(256)
    native.put_minmax(codes, ends[1], mine, "set")
    specification.put_minmax(codes, ends[1], other, "set")
    assert_same_bits(mine, other)
    for code in range(256):
        both, out = torch.tensor([[7], [code]], dtype=torch.uint8), torch.empty(1, dtype=torch.uint8)
        assert_same_bits(native.minmax_of_mean(both, ends, 1, out), specification.minmax_of_mean(both, ends, 1, out))


def test_codes_by_hand():
    values, codes = torch.tensor([[0.0, 255, 100.25, -0.0], [0, 510, 0, 0]]), torch.empty(2, 4, dtype=torch.uint8)
    ends, mean = kernels.minmax_ends(values), torch.empty(4, dtype=torch.uint8)
    kernels.minmax_codes(values, ends, codes)
    assert ends.tolist() == [[0, 255], [0, 510]] and codes.tolist() == [[0, 255, 100, 0], [0, 255, 0, 0]]
    momentum = Mixture(0.5, 2.0, [2, 5], [torch.tensor([1.0]), torch.tensor([0.25, 1.0])])
    mixed = values.clone()
    assert kernels.minmax_ends(mixed, momentum).tolist() == [[0, 255], [0, 255.5]]
    assert mixed.tolist() == [[0, 255, 52.125, 0], [0, 255.5, 2, 0]]
    kernels.put_minmax(codes[1], ends[1], mixed[1], "set", momentum.within(4, 8).inverse)
    assert mixed[1].tolist() == [0, (510 - 0.5) / 0.5, -2 / 0.5, 0]
    of_mean = kernels.minmax_of_mean(codes, ends, 3, mean)
    assert of_mean.tolist() == [0, 255] and mean.tolist() == [0, 255, 33, 0]


@built
def test_operands_that_do_not_fit_are_refused():
    with pytest.raises(ValueError, match="flat tensor of 2"):
        native.minmax_codes(torch.zeros(1, 3), torch.zeros(1, 3), torch.zeros(1, 3, dtype=torch.uint8))
    with pytest.raises(ValueError, match=r"\(1, 3\), are needed, not \(1, 2\)"):
        native.minmax_codes(torch.zeros(1, 3), torch.zeros(1, 2), torch.zeros(1, 2, dtype=torch.uint8))
    with pytest.raises(ValueError, match="neither a mean"):
        native.minmax_of_mean(
            torch.zeros(0, 3, dtype=torch.uint8), torch.zeros(0, 2), 1, torch.zeros(3, dtype=torch.uint8)
        )
    with pytest.raises(ValueError, match="flat tensor of 3"):
        native.put_minmax(torch.zeros(2, dtype=torch.uint8), torch.zeros(2), torch.zeros(3), "set")
    with pytest.raises(ValueError, match="2 elements from 2 on are not among those from 0 to 3"):
        native.minmax_ends(torch.zeros(1, 3), Mixture(1.0, 1.0, [2], [torch.zeros(2)]))
    with pytest.raises(ValueError, match="smallest"):
        native.minmax_ends(torch.zeros(1, 0))
