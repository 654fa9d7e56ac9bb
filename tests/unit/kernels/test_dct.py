"""The cosine transform of tiles: the same in C as in torch, and right."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from oracle import EXAMPLES, KINDS, assert_same_bits, built, numbers

from dgcopt.kernels import native
from dgcopt.kernels import torch as specification

sides = st.one_of(st.integers(1, 80), st.sampled_from([128, 147, 200]))


@built
@settings(max_examples=EXAMPLES, deadline=None)
@given(
    rows=sides,
    columns=sides,
    kind=st.sampled_from(KINDS),
    how=st.sampled_from(["set", "add", "subtract"]),
    shift=st.integers(0, 3),
    seed=st.integers(0, 2**20),
)
def test_dct(rows, columns, kind, how, shift, seed):
    matrix = numbers(rows * columns + shift, torch.float32, kind, seed)[shift:].view(rows, columns)
    ours, theirs = torch.full((2, matrix.numel() + shift), math.nan)[:, shift:]
    native.dct(matrix, ours)
    specification.dct(matrix, theirs)
    assert_same_bits(ours, theirs)
    frequencies = numbers(rows * columns + shift, torch.float32, kind, seed + 1)[shift:]
    back = [matrix.clone(), matrix.clone()]
    native.inverse_dct(frequencies, back[0], how)
    specification.inverse_dct(frequencies, back[1], how)
    assert_same_bits(*back)


@pytest.mark.parametrize("shape", [(1, 1), (1, 64), (64, 64), (70, 67), (3, 200), (128, 63)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_frequencies_are_what_their_definition_says(shape, dtype):
    matrix = torch.randn(shape, generator=torch.Generator().manual_seed(7)).to(dtype)
    found, start = torch.empty(matrix.numel(), dtype=dtype), 0
    specification.dct(matrix, found)
    for strip in matrix.split(64):
        for tile in strip.split(64, dim=1):
            down, across = (cosines(n) for n in tile.shape)
            expected = (down @ tile.double() @ across.T).T.flatten()
            error = (found[start : start + tile.numel()] - expected).norm() / expected.norm()
            assert error < 20 * torch.finfo(dtype).eps
            start += tile.numel()
    again = torch.empty_like(matrix)
    specification.inverse_dct(found, again, "set")
    assert (again - matrix).norm() / matrix.norm() < 20 * torch.finfo(dtype).eps


def cosines(n):
    """The orthonormal DCT-II as a matrix."""
    k, j = torch.arange(n).unsqueeze(1), torch.arange(n)
    waves = torch.cos(math.pi / (2 * n) * (k * (2 * j + 1) % (4 * n)).double()) * math.sqrt(2 / n)
    waves[0] /= math.sqrt(2)
    return waves


@built
def test_what_is_no_matrix_of_that_size_is_refused():
    with pytest.raises(ValueError, match="a matrix of float32"):
        native.dct(torch.zeros(64), torch.zeros(64))
    with pytest.raises(ValueError, match="flat tensor of 128"):
        native.inverse_dct(torch.zeros(64), torch.zeros(2, 64), "set")
