"""Products of thin matrices, in Triton."""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor
from torch.autograd.graph import increment_version

from .floats import UNFUSED
from .lengths import check_length

__all__ = ["put_product"]

_ROWS, _COLUMNS = 16, 128
"""Of the tile that one program works on."""


@triton.jit
def _product(
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
    """See `dgcopt.kernels.torch.put_product`."""
    increment_version([out] if less is None else [out, less])
    (rows, rank), columns = left.shape, len(right)
    check_length(rows * columns, out, *([] if less is None else [less]))
    if len(out):
        grid = (triton.cdiv(columns, _COLUMNS) * triton.cdiv(rows, _ROWS),)  # a second dimension ends at 65,535
        operands = (left, right, out, out if less is None else less, rows, columns)
        _product[grid](*operands, RANK=rank, TAKES=less is not None, ROWS=_ROWS, COLUMNS=_COLUMNS, **UNFUSED)
