"""The cosine transform of a matrix, its inverse, and products of thin matrices, in Triton: a program for each tile."""

from __future__ import annotations

from typing import Literal

import triton
import triton.language as tl
from torch import Tensor
from torch.autograd.graph import increment_version

from ..blocks import BLOCK
from ..floats import Put
from ..triton.floats import UNFUSED, put
from ..triton.lengths import check_length
from .torch import Matrices, waves_of_sides

__all__ = ["dct", "inverse_dct", "put_product"]


@triton.jit
def _along(x, AXIS: tl.constexpr, SIDE: tl.constexpr):
    """A number for each place of one side, for all places of the other."""
    return (x[:, None] if AXIS == 0 else x[None, :]) + tl.zeros((SIDE, SIDE), x.dtype)


@triton.jit
def _picked(x, places, AXIS: tl.constexpr, SIDE: tl.constexpr):
    """Load some places of a side; those beyond its end are undefined."""
    return tl.gather(x, _along(tl.minimum(tl.maximum(places, 0), SIDE - 1), AXIS, SIDE), AXIS)


@triton.jit
def _waves(waves, places, n, AXIS: tl.constexpr, SIDE: tl.constexpr):
    """Return the factors of places of a side of n."""
    return _along(tl.load(waves + places, mask=tl.arange(0, SIDE) < n, other=0), AXIS, SIDE)


@triton.jit
def _product(x, waves, n, length, down, across, AXIS: tl.constexpr, SIDE: tl.constexpr):
    """Each part of odd length times a matrix, summed in order."""
    i = tl.arange(0, SIDE)
    part, place = i // length * length, i % length
    total = x
    for k in range(length):
        term = _waves(waves, place * down + k * across, n, AXIS, SIDE) * _picked(x, part + k, AXIS, SIDE)
        total = tl.where(k == 0, term, total + term)
    return total


@triton.jit
def _analysed(x, n, waves, AXIS: tl.constexpr, SIDE: tl.constexpr):
    """The orthonormal DCT-II of the first n along an axis."""
    i = tl.arange(0, SIDE)
    length = n
    while length % 2 == 0:
        half = length // 2
        part, place = i // length * length, i % half
        first, last = (
            _picked(x, part + place, AXIS, SIDE),
            _picked(x, part + length - 1 - place, AXIS, SIDE),
        )
        turned = (first - last) * _waves(waves, 2 * n - length + place, n, AXIS, SIDE)
        x = tl.where(_along(i % length, AXIS, SIDE) < half, first + last, turned)
        length = half
    if length > 1:
        x = _product(x, waves + 2 * n - length, n, length, length, 1, AXIS, SIDE)
    while length < n:
        half = length
        length *= 2
        part, place, odd = i // length * length, i % length // 2, i % 2
        here = _picked(x, part + odd * half + place, AXIS, SIDE)
        behind = _picked(x, part + half + place + 1, AXIS, SIDE)
        x = tl.where(_along(((odd > 0) & (place + 1 < half)).to(tl.int32), AXIS, SIDE) > 0, here + behind, here)
    return x * _waves(waves, i, n, AXIS, SIDE)


@triton.jit
def _composed(x, n, waves, AXIS: tl.constexpr, SIDE: tl.constexpr):
    """The orthonormal DCT-III of the first n along an axis."""
    i = tl.arange(0, SIDE)
    x = x * _waves(waves, i, n, AXIS, SIDE)
    length = n
    while length % 2 == 0:
        half = length // 2
        part, place, odd = i // length * length, i % half, (i % length >= half).to(tl.int32)
        here = _picked(x, part + 2 * place + odd, AXIS, SIDE)
        before = _picked(x, part + 2 * place - 1, AXIS, SIDE)
        x = tl.where(_along(odd * place, AXIS, SIDE) > 0, here + before, here)
        length = half
    if length > 1:
        x = _product(x, waves + 2 * n - length, n, length, 1, length, AXIS, SIDE)
    while length < n:
        half = length
        length *= 2
        part = i // length * length
        place = tl.minimum(i % length, length - 1 - i % length)
        even = _picked(x, part + place, AXIS, SIDE)
        odd = _picked(x, part + half + place, AXIS, SIDE)
        odd = odd * _waves(waves, 2 * n - length + place, n, AXIS, SIDE)
        x = tl.where(_along(i % length, AXIS, SIDE) < half, even + odd, even - odd)
    return x


@triton.jit
def _turn(
    flat, frequencies, tiles, number, waves, starts, HOW: tl.constexpr, FORWARD: tl.constexpr, SIDE: tl.constexpr
):
    mine = tiles + tl.program_id(0)
    start, columns, to = tl.load(mine), tl.load(mine + number), tl.load(mine + 4 * number)
    height, width = tl.load(mine + 2 * number).to(tl.int32), tl.load(mine + 3 * number).to(tl.int32)
    of_height, of_width = waves + tl.load(starts + height % SIDE), waves + tl.load(starts + width % SIDE)
    row, column = tl.arange(0, SIDE)[:, None], tl.arange(0, SIDE)[None, :]
    there = (row < height) & (column < width)
    at, frequency = start + row * columns + column, to + column * height + row
    if FORWARD:
        x = _analysed(tl.load(flat + at, mask=there, other=0), height, of_height, 0, SIDE)
        tl.store(frequencies + frequency, _analysed(x, width, of_width, 1, SIDE), mask=there)
    else:
        x = _composed(tl.load(frequencies + frequency, mask=there, other=0), width, of_width, 1, SIDE)
        x = _composed(x, height, of_height, 0, SIDE)
        if HOW == "sign":
            x = (x > 0).to(tl.float32) - (x < 0).to(tl.float32)
        put(x, flat, flat, at, there, HOW)


def dct(flat: Tensor, matrices: Matrices, out: Tensor) -> None:
    """See `dct` in torch.py."""
    increment_version(out)
    _each_tile(flat, matrices, out, "set", forward=True)


def inverse_dct(frequencies: Tensor, matrices: Matrices, flat: Tensor, how: Put | Literal["sign"]) -> None:
    """See `inverse_dct` in torch.py."""
    increment_version(flat)
    _each_tile(flat, matrices, frequencies, how, forward=False)


def _each_tile(flat: Tensor, matrices: Matrices, frequencies: Tensor, how: str, forward: bool) -> None:
    check_length(
        max((start + rows * columns for start, rows, columns in matrices.shapes), default=0), flat, frequencies
    )
    if matrices.shapes:
        tiles = matrices.tiles_on(flat.device)
        operands = (flat, frequencies, tiles, tiles.shape[1], *waves_of_sides(flat.device))
        _turn[(tiles.shape[1],)](*operands, HOW=how, FORWARD=forward, SIDE=BLOCK, **UNFUSED)


_ROWS, _COLUMNS = 16, 128
"""Edge of the tile of one program."""


@triton.jit
def _put_product(
    left,
    right,
    out,
    less,
    rows,
    columns,
    RANK: tl.constexpr,
    TAKES: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
):
    across = tl.cdiv(columns, COLUMNS)
    i = (tl.program_id(0) // across).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    j = tl.program_id(0) % across * COLUMNS + tl.arange(0, COLUMNS)
    total = tl.zeros((ROWS, COLUMNS), tl.float32)
    for k in tl.static_range(RANK):
        x = tl.load(left + i * RANK + k, mask=i < rows, other=0)[:, None]
        y = tl.load(right + j * RANK + k, mask=j < columns, other=0)[None, :]
        if k == 0:
            total = x * y
        else:
            total += x * y
    at = i[:, None] * columns + j[None, :]
    there = (i < rows)[:, None] & (j < columns)[None, :]
    tl.store(out + at, total, mask=there)
    if TAKES:
        tl.store(less + at, tl.load(less + at, mask=there, other=0) - total, mask=there)


def put_product(left: Tensor, right: Tensor, out: Tensor, less: Tensor | None) -> None:
    """See `put_product` in torch.py."""
    increment_version([out] if less is None else [out, less])
    (rows, rank), columns = left.shape, len(right)
    check_length(rows * columns, out, *([] if less is None else [less]))
    if len(out):
        grid = (triton.cdiv(columns, _COLUMNS) * triton.cdiv(rows, _ROWS),)  # a second dimension ends at 65,535
        operands = (left, right, out, out if less is None else less, rows, columns)
        _put_product[grid](*operands, RANK=rank, TAKES=less is not None, ROWS=_ROWS, COLUMNS=_COLUMNS, **UNFUSED)
