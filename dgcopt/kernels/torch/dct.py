"""The discrete cosine transform of a matrix, tile by tile, and its inverse, in one order of operations.

By Lee's recursion ("A new algorithm to compute the discrete cosine transform", 1984): one of n numbers takes two of
n / 2, and those of an odd length are sums in order. Every operation is rounded by itself, so that all processors get
the same bits, where those of a matrix product depend on the library and on its blocks.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Iterator

import torch
from torch import Tensor

from ..blocks import BLOCK
from .sums import Put, put

__all__ = ["dct", "inverse_dct", "waves"]


def dct(matrix: Tensor, out: Tensor) -> None:
    """The orthonormal DCT-II along both sides of every tile of 64 by 64, into the flat `out`.

    Tiles follow one another row by row, each column by column; those at the right and lower edges may be smaller.
    """
    for tiles, frequencies in _regions(matrix, out):
        found = _forward(_forward(tiles.movedim(1, 0)).movedim(3, 0))  # width, height, tiles down and across
        frequencies.copy_(found.permute(2, 3, 0, 1))


def inverse_dct(frequencies: Tensor, matrix: Tensor, how: Put) -> None:
    """Let the matrix whose `dct` these frequencies are take effect on `matrix`."""
    for tiles, of_tiles in _regions(matrix, frequencies):
        found = _inverse(_inverse(of_tiles.permute(2, 3, 0, 1)).movedim(1, 0))  # height, width, tiles down and across
        put(found.permute(2, 0, 3, 1), tiles, how)


def _regions(matrix: Tensor, frequencies: Tensor) -> Iterator[tuple[Tensor, Tensor]]:
    """Tiles of one size, `[tiles down, height, across, width]`, and their frequencies, `[down, across, width, height]`.

    First the whole tiles, then those at the right edge, those at the lower edge, and that in the corner.
    """
    rows, columns = matrix.shape
    for first, last, height in _cuts(rows):
        strips = frequencies[first * columns : last * columns].view(-1, height * columns)
        for left, right, width in _cuts(columns):
            tiles = matrix[first:last, left:right].unflatten(1, (-1, width)).unflatten(0, (-1, height))
            yield tiles, strips[:, height * left : height * right].unflatten(1, (-1, width, height))


def _cuts(n: int) -> Iterator[tuple[int, int, int]]:
    """From where to where n elements are cut, and into what: as many 64s as there are; and what is left over."""
    whole = n // BLOCK * BLOCK
    if whole:
        yield 0, whole, BLOCK
    if n > whole:
        yield whole, n, n - whole


@functools.cache
def waves(n: int, dtype: torch.dtype, device: torch.device) -> Tensor:
    """What both directions multiply by, for n numbers: what makes the transform orthonormal, n of them; then for n,
    n / 2 ... while they are even 1 / (2 cos(pi (2 i + 1) / 2n)) for every i below n / 2; and for what is left, if it is
    not 1, cos(pi k (2 j + 1) / 2n) for every k and j.
    """
    numbers = [math.sqrt((2 if k else 1) / n) for k in range(n)]
    while n % 2 == 0:
        numbers += [0.5 / math.cos(math.pi * (2 * i + 1) / (2 * n)) for i in range(n // 2)]
        n //= 2
    if n > 1:
        numbers += [_cosine(k * (2 * j + 1), n) for k in range(n) for j in range(n)]
    return torch.tensor(numbers, dtype=torch.float64).to(device, dtype)


def _cosine(turns: int, n: int) -> float:
    """cos(pi turns / 2n), exactly zero where it is: no more than its sign may be asked for."""
    turns %= 4 * n
    return 0.0 if turns in (n, 3 * n) else math.cos(math.pi * turns / (2 * n))


def _waves_like(x: Tensor) -> tuple[Tensor, Tensor]:
    """`waves` for the first dimension of `x`: those for the scale, and the others, of four dimensions."""
    numbers = waves(len(x), x.dtype, x.device).view(-1, 1, 1, 1)
    return numbers[: len(x)], numbers[len(x) :]


def _forward(x: Tensor) -> Tensor:
    """The orthonormal DCT-II along the first dimension."""
    scale, numbers = _waves_like(x)
    return _analysed(x, numbers) * scale


def _analysed(x: Tensor, numbers: Tensor) -> Tensor:
    """The sums over j of x[j] cos(pi k (2 j + 1) / 2n) for every k."""
    n, half = len(x), len(x) // 2
    if n % 2:
        return _product(numbers.view(n, n, 1, 1, 1), x) if n > 1 else x
    first, last = x[:half], x[half:].flip(0)
    even = _analysed(first + last, numbers[half:])
    odd = _analysed((first - last) * numbers[:half], numbers[half:])
    odd = torch.cat((odd[:-1] + odd[1:], odd[-1:]))
    return torch.stack((even, odd), 1).flatten(0, 1)


def _inverse(x: Tensor) -> Tensor:
    """The orthonormal DCT-III along the first dimension, which undoes `_forward`."""
    scale, numbers = _waves_like(x)
    return _composed(x * scale, numbers)


def _composed(x: Tensor, numbers: Tensor) -> Tensor:
    """The sums over k of x[k] cos(pi k (2 j + 1) / 2n) for every j."""
    n, half = len(x), len(x) // 2
    if n % 2:
        return _product(numbers.view(n, n, 1, 1, 1).transpose(0, 1), x) if n > 1 else x
    odd = x[1::2]
    even = _composed(x[::2], numbers[half:])
    odd = _composed(torch.cat((odd[:1], odd[1:] + odd[:-1])), numbers[half:]) * numbers[:half]
    return torch.cat((even + odd, (even - odd).flip(0)))


def _product(matrix: Tensor, x: Tensor) -> Tensor:
    """`matrix`, `[n, n, 1, 1, 1]`, times x along its first dimension: sums in order."""
    total = matrix[:, 0] * x[0]
    for j in range(1, len(x)):
        total = total + matrix[:, j] * x[j]
    return total
