"""Cosine transforms and thin products: C and Triton give the bits of the specification."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import strategies as st

from dgcopt.kernels import Matrices
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

few_sides = st.sampled_from([1, 2, 3, 7, 12, 21, 48, 64, 66])
sides = st.one_of(st.integers(1, 80), st.sampled_from([128, 147, 200]))


@all_implementations(
    sizes=Sizes(
        st.lists(st.tuples(few_sides, few_sides), min_size=1, max_size=2),
        st.lists(st.tuples(sides, sides), min_size=1, max_size=3),
    ),
    kind=st.sampled_from(KINDS),
    how=st.sampled_from(["set", "add", "subtract", "sign"]),
    shift=st.integers(0, 3),
    seed=st.integers(0, 2**20),
)
def test_dct(of, sizes, kind, how, shift, seed):
    shapes, end = [], 0
    for rows, columns in sizes:
        shapes.append((end, rows, columns))
        end += -(-rows * columns // 64) * 64
    matrices = Matrices(shapes)
    flat, frequencies = (numbers(end + shift, torch.float32, kind, seed + i)[shift:] for i in range(2))
    ours, theirs = torch.full((2, end + shift), 7.0)[:, shift:]
    of.dct(flat, matrices, ours)
    specification.dct(flat, matrices, theirs)
    assert_same_bits(ours, theirs)
    back = [flat.clone(), flat.clone()]
    of.inverse_dct(frequencies, matrices, back[0], how)
    specification.inverse_dct(frequencies, matrices, back[1], how)
    assert_same_bits(*back)


@pytest.mark.parametrize("shape", [(1, 1), (1, 64), (64, 64), (70, 67), (3, 200), (128, 63), (4000, 40)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_frequencies_are_what_their_definition_says(shape, dtype):
    matrix = torch.randn(shape, generator=torch.Generator().manual_seed(7)).to(dtype)
    found, matrices = torch.empty(matrix.numel(), dtype=dtype), Matrices([(0, *shape)])
    specification.dct(matrix.view(-1), matrices, found)
    tiles = [tile for strip in matrix.split(64) for tile in strip.split(64, dim=1)]
    for tile, (start, stop) in zip(tiles, matrices.tiles(), strict=True):
        down, across = (cosines(n) for n in tile.shape)
        expected = (down @ tile.double() @ across.T).T.flatten()
        assert (found[start:stop] - expected).norm() / expected.norm() < 20 * torch.finfo(dtype).eps
    again = torch.empty_like(found)
    specification.inverse_dct(found, matrices, again, "set")
    assert (again.view(shape) - matrix).norm() / matrix.norm() < 20 * torch.finfo(dtype).eps


def cosines(n):
    """The orthonormal DCT-II as a matrix."""
    k, j = torch.arange(n).unsqueeze(1), torch.arange(n)
    waves = torch.cos(math.pi / (2 * n) * (k * (2 * j + 1) % (4 * n)).double()) * math.sqrt(2 / n)
    waves[0] /= math.sqrt(2)
    return waves


@built
def test_a_matrix_beyond_the_end_is_refused():
    with pytest.raises(ValueError, match="beyond the 64"):
        native.dct(torch.zeros(64), Matrices([(0, 5, 13)]), torch.zeros(64))
    with pytest.raises(ValueError, match="flat tensor of 64"):
        native.inverse_dct(torch.zeros(63), Matrices([(0, 8, 8)]), torch.zeros(64), "set")


@all_implementations(
    rows=st.integers(0, 40),
    columns=st.one_of(st.integers(0, 40), st.sampled_from([64, 300])),
    rank=st.integers(1, 5),
    kind=st.sampled_from(KINDS),
    shift=st.integers(0, 3),
    taken_away=st.booleans(),
    seed=st.integers(0, 2**20),
)
def test_put_product(of, rows, columns, rank, kind, shift, taken_away, seed):
    left, right = (numbers(n * rank, torch.float32, kind, seed + n).view(n, rank) for n in (rows, columns))
    before = numbers(rows * columns + shift, torch.float32, kind, seed + 1)[shift:]
    outs, rests = torch.full((2, rows * columns), 7.0), [before.clone(), before.clone()]
    for each, out, less in zip((of, specification), outs, rests, strict=True):
        each.put_product(left, right, out, less if taken_away else None)
    assert_same_bits(*outs)
    assert_same_bits(*rests)
    if kind == "tied":
        assert torch.equal(outs[0].view(rows, columns), left @ right.T)


@built
def test_wrong_factors_are_refused():
    with pytest.raises(ValueError, match="not the factors"):
        native.put_product(torch.zeros(3, 2), torch.zeros(4, 1), torch.zeros(12), None)
    with pytest.raises(ValueError, match="flat tensor of 12"):
        native.put_product(torch.zeros(3, 1), torch.zeros(4, 1), torch.zeros(11), None)
