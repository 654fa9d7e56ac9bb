"""The discrete cosine transform of a matrix, tile by tile, and its inverse; and products of thin matrices.

By Lee's recursion ("A new algorithm to compute the discrete cosine transform", 1984): one of n numbers takes two of
n / 2, and those of an odd length are sums in order. Every operation is rounded by itself, so that all processors get
the same bits, while those of a matrix product depend on the library and on its blocks.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Literal

import torch
from torch import Tensor, mul

from ..blocks import BLOCK, CHUNK
from ..floats import Put, put

__all__ = ["Matrices", "dct", "inverse_dct", "put_product", "waves", "waves_of_sides"]


@dataclass(frozen=True, eq=False)
class Matrices:
    """Matrices in a flat tensor: start, rows and columns of each, in order, none empty."""

    shapes: Sequence[tuple[int, int, int]]

    def tiles(self) -> Iterator[tuple[int, int]]:
        """Yield start and stop of each tile's frequencies: only a matrix's last tile may end within a block."""
        for start, rows, columns in self.shapes:
            for top in range(0, rows, BLOCK):
                height = min(BLOCK, rows - top)
                first = start + top * columns
                for left in range(0, columns, BLOCK):
                    yield first + height * left, first + height * min(left + BLOCK, columns)

    def tiles_on(self, device: torch.device) -> Tensor:
        """Return each tile's start, row stride, height, width, and start of its frequencies.

        int64 `[5, tiles]`, on the device.
        """
        if device not in self._tiles_on:
            tiles = [
                (first + left, columns, height, min(BLOCK, columns - left), first + height * left)
                for first, height, columns in self._strips
                for left in range(0, columns, BLOCK)
            ]
            self._tiles_on[device] = torch.tensor(tiles, dtype=torch.int64).view(-1, 5).T.contiguous().to(device)
        return self._tiles_on[device]

    @cached_property
    def _tiles_on(self) -> dict[torch.device, Tensor]:
        return {}

    @cached_property
    def table(self) -> Tensor:
        """The shapes of strips of tiles, one tile high: int64 on the CPU, `[strips, 3]`."""
        return torch.tensor(self._strips, dtype=torch.int64).view(-1, 3)

    @property
    def _strips(self) -> list[tuple[int, int, int]]:
        return [
            (start + top * columns, min(BLOCK, rows - top), columns)
            for start, rows, columns in self.shapes
            for top in range(0, rows, BLOCK)
        ]


def dct(flat: Tensor, matrices: Matrices, out: Tensor) -> None:
    """Write the orthonormal DCT-II along both sides of every tile of 64 by 64 to `out`, at the matrix's place.

    Tiles are ordered row by row, each one column by column; those at the right and lower edges may be smaller.
    """
    for tiles, frequencies in _regions(flat, matrices, out):
        found = _forward(_forward(tiles.movedim(1, 0)).movedim(3, 0))  # width, height, tiles down and across
        frequencies.copy_(found.permute(2, 3, 0, 1))


def inverse_dct(frequencies: Tensor, matrices: Matrices, flat: Tensor, how: Put | Literal["sign"]) -> None:
    """Combine the inverse `dct` of frequencies with `flat`; "sign" sets it to the signs."""
    for tiles, of_tiles in _regions(flat, matrices, frequencies):
        found = _inverse(_inverse(of_tiles.permute(2, 3, 0, 1)).movedim(1, 0))  # height, width, tiles down and across
        made = found.permute(2, 0, 3, 1)
        put(made.sign() if how == "sign" else made, tiles, "set" if how == "sign" else how)


def _regions(flat: Tensor, matrices: Matrices, frequencies: Tensor) -> Iterator[tuple[Tensor, Tensor]]:
    """Tiles of one size, `[tiles down, height, across, width]`, and their frequencies, `[down, across, width, height]`.

    Of each matrix first whole tiles, then those at the right edge, those at the lower edge, and that in the corner; on
    a CPU so few at a time that they stay in its cache.
    """
    for start, rows, columns in matrices.shapes:
        matrix = flat[start : start + rows * columns].view(rows, columns)
        step = max(1, CHUNK // (BLOCK * columns)) * BLOCK if flat.device.type == "cpu" else rows
        for top, bottom, height in _cuts(rows, step):
            strips = frequencies[start + top * columns : start + bottom * columns].view(-1, height * columns)
            for left, right, width in _cuts(columns, columns):
                tiles = matrix[top:bottom, left:right].unflatten(1, (-1, width)).unflatten(0, (-1, height))
                yield tiles, strips[:, height * left : height * right].unflatten(1, (-1, width, height))


def _cuts(n: int, step: int) -> Iterator[tuple[int, int, int]]:
    """Yield start, stop and width of cuts of n elements: runs of 64s, at most `step` of them, and the remainder."""
    whole = n // BLOCK * BLOCK
    for first in range(0, whole, max(step, BLOCK)):
        yield first, min(first + max(step, BLOCK), whole), BLOCK
    if n > whole:
        yield whole, n, n - whole


@functools.cache
def waves(n: int, dtype: torch.dtype, device: torch.device) -> Tensor:
    """Return the factors of both directions for n numbers: n that make the transform orthonormal; then, for n, n / 2
    ... while they are even, 1 / (2 cos(pi (2 i + 1) / 2n)) for every i below n / 2; and for an odd rest above 1,
    cos(pi k (2 j + 1) / 2n) for every k and j.
    """
    numbers = [math.sqrt((2 if k else 1) / n) for k in range(n)]
    while n % 2 == 0:
        numbers += [0.5 / math.cos(math.pi * (2 * i + 1) / (2 * n)) for i in range(n // 2)]
        n //= 2
    if n > 1:
        numbers += [_cosine(k * (2 * j + 1), n) for k in range(n) for j in range(n)]
    return torch.tensor(numbers, dtype=torch.float64).to(device, dtype)


@functools.cache
def waves_of_sides(device: torch.device) -> tuple[Tensor, Tensor]:
    """`waves` for tiles' sides of 64, 1, 2 ... 63 elements, one after the other, and their starts."""
    of_each = [waves(side or BLOCK, torch.float32, torch.device("cpu")) for side in range(BLOCK)]
    lengths = torch.tensor([len(numbers) for numbers in of_each])
    return torch.cat(of_each).to(device), (lengths.cumsum(0) - lengths).to(device)


def _cosine(turns: int, n: int) -> float:
    """Return cos(pi turns / 2n), exact if it is zero."""
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
    """The sums over j of x[j] cos(pi k (2 j + 1) / 2n) for every k: all halves, quarters ... at once."""
    parts = x.unsqueeze(0)
    while parts.shape[1] % 2 == 0:
        half = parts.shape[1] // 2
        first, last = parts[:, :half], parts[:, half:].flip(1)
        parts = torch.stack((first + last, (first - last) * numbers[:half]), 1).flatten(0, 1)
        numbers = numbers[half:]
    parts = _product(numbers, parts, 0)
    while len(parts) > 1:
        even, odd = parts.unflatten(0, (-1, 2)).unbind(1)
        odd = torch.cat((odd[:, :-1] + odd[:, 1:], odd[:, -1:]), 1)
        parts = torch.stack((even, odd), 2).flatten(1, 2)
    return parts.squeeze(0)


def _inverse(x: Tensor) -> Tensor:
    """The orthonormal DCT-III along the first dimension, which undoes `_forward`."""
    scale, numbers = _waves_like(x)
    return _composed(x * scale, numbers)


def _composed(x: Tensor, numbers: Tensor) -> Tensor:
    """The sums over k of x[k] cos(pi k (2 j + 1) / 2n) for every j: all halves, quarters ... at once."""
    parts, factors = x.unsqueeze(0), []
    while parts.shape[1] % 2 == 0:
        half, odd = parts.shape[1] // 2, parts[:, 1::2]
        odd = torch.cat((odd[:, :1], odd[:, 1:] + odd[:, :-1]), 1)
        parts = torch.stack((parts[:, ::2], odd), 1).flatten(0, 1)
        factors.append(numbers[:half])
        numbers = numbers[half:]
    parts = _product(numbers, parts, 1)
    for factor in reversed(factors):
        even, odd = parts.unflatten(0, (-1, 2)).unbind(1)
        odd = odd * factor
        parts = torch.cat((even + odd, (even - odd).flip(1)), 1)
    return parts.squeeze(0)


def _product(numbers: Tensor, parts: Tensor, dim: int) -> Tensor:
    """Each part, of odd length n, times the matrix of `numbers`, summed in order along its dimension 1 - `dim`."""
    n = parts.shape[1]
    if n == 1:
        return parts
    columns = numbers.view(n, n, 1, 1, 1).unbind(1 - dim)
    total = columns[0] * parts[:, :1]
    for j in range(1, n):
        total = total + columns[j] * parts[:, j : j + 1]
    return total


def put_product(left: Tensor, right: Tensor, out: Tensor, less: Tensor | None) -> None:
    """Write left @ right.T, row by row, to the flat `out`, and take it away from the flat `less`, if any.

    Each is rounded by itself, one column of both after the other, so that all processors get the same bits.
    """
    matrix = out.view(len(left), len(right))
    mul(left[:, :1], right[:, 0], out=matrix)
    for k in range(1, left.shape[1]):
        matrix += left[:, k : k + 1] * right[:, k]
    if less is not None:
        less -= out
