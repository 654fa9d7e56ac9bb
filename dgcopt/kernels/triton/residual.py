"""The sum of a gradient and a residual, with statistics of each block, in Triton."""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor
from torch.autograd.graph import increment_version

from ..blocks import BLOCK, bits_of
from .floats import UNFUSED, magnitudes
from .lengths import blocks_of, check_length
from .sums import ROWS, sum_of_rows

__all__ = ["add_and_maxima", "add_and_norms", "block_maxima"]


@triton.jit
def _add_and(
    g, e, decay, out, numbers, blocks, ADDS: tl.constexpr, NORMS: tl.constexpr, BLOCK: tl.constexpr, ROWS: tl.constexpr
):
    rows = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    at, there = rows[:, None] * BLOCK + tl.arange(0, BLOCK)[None, :], (rows < blocks)[:, None]
    v = tl.load(g + at, mask=there, other=0)
    if ADDS:
        v = tl.fma(tl.load(e + at, mask=there, other=0), tl.full(at.shape, decay, tl.float32), v)
        tl.store(out + at, v, mask=there)
    if NORMS:
        found = sum_of_rows(tl.abs(v), ROWS, 6)
    else:
        found = tl.max(magnitudes(v), 1).to(numbers.dtype.element_ty)
    tl.store(numbers + rows, found, mask=rows < blocks)


def add_and_maxima(g: Tensor, e: Tensor, decay: float, out: Tensor) -> Tensor:
    """See `dgcopt.kernels.torch.add_and_maxima`."""
    increment_version(out)
    return _of_blocks(g, e, decay, out, out.new_empty(len(out) // BLOCK), adds=True, norms=False)


def add_and_norms(g: Tensor, e: Tensor, decay: float, out: Tensor) -> Tensor:
    """See `dgcopt.kernels.torch.add_and_norms`."""
    increment_version(out)
    return _of_blocks(g, e, decay, out, out.new_empty(len(out) // BLOCK), adds=True, norms=True)


def block_maxima(flat: Tensor, out: Tensor | None = None) -> Tensor:
    """See `dgcopt.kernels.torch.block_maxima`."""
    maxima = flat.new_empty(flat.numel() // BLOCK) if out is None else out
    return _of_blocks(flat, flat, 1.0, flat, maxima, adds=False, norms=False)


def _of_blocks(g: Tensor, e: Tensor, decay: float, out: Tensor, numbers: Tensor, adds: bool, norms: bool) -> Tensor:
    blocks = blocks_of(out)
    check_length(out.numel(), g, e)
    check_length(blocks, numbers)
    if blocks:
        operands = (g, e, float(decay), out, numbers if norms else bits_of(numbers), blocks)
        _add_and[(triton.cdiv(blocks, ROWS),)](*operands, ADDS=adds, NORMS=norms, BLOCK=BLOCK, ROWS=ROWS, **UNFUSED)
    return numbers
