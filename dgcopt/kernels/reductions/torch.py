"""Maxima, norms and sums of blocks of 64 values and of tensors; with them, the sum of gradient and residual."""

from __future__ import annotations

import torch
from torch import Tensor

from ..blocks import BLOCK, CHUNK, bits_of
from ..floats import finite

__all__ = [
    "STRETCH",
    "add_and_maxima",
    "add_and_norms",
    "block_maxima",
    "by_block",
    "norm_of",
    "sum_of_rows",
    "tensor_norms",
    "tensor_sums",
]


def block_maxima(flat: Tensor, out: Tensor | None = None) -> Tensor:
    """Return the largest magnitude of each block of 64. Shape `[numel / 64]`; NaN for a block with NaN.

    Computed on integers, whose row maxima are several times faster than those of floats.
    """
    maxima = torch.empty(flat.numel() // BLOCK, dtype=flat.dtype, device=flat.device) if out is None else out
    bits = bits_of(flat)
    torch.amax((bits & torch.iinfo(bits.dtype).max).view(-1, BLOCK), 1, out=bits_of(maxima))
    return maxima


STRETCH = 1024
"""Number of a tensor's blocks in a stretch, which is summed in order, beside other stretches."""


def sum_of_rows(rows: Tensor) -> Tensor:
    """The sum of each row, a power of two long: its second half is added to the first, until one number is left."""
    while rows.shape[1] > 1:
        first, second = rows.chunk(2, dim=1)
        rows = first + second
    return rows.squeeze(1)


def tensor_sums(numbers: Tensor, place: Tensor, count: int) -> Tensor:
    """Sums of blocks' numbers `[kinds, blocks]`, each of one of `count` tensors: float64 `[kinds, count]`.

    Block b is of the tensor `place[b]`, and places ascend. Each tensor's blocks are divided into stretches of `STRETCH`
    from its first block on. Numbers are added in order within stretches, in their own dtype, and then the sums of
    stretches in order, in float64: a float32 counts to 2^24.
    """
    blocks = torch.arange(len(place), device=place.device)
    first = torch.searchsorted(place, torch.arange(count, device=place.device))[place]
    stretch = (blocks - first) // STRETCH + first // STRETCH + place  # ascending by at most 2, each of one tensor
    stretches = len(place) // STRETCH + count
    sums = numbers.new_zeros(len(numbers), stretches).index_add_(1, stretch, numbers)
    of = place.new_zeros(stretches).scatter_(0, stretch, place)  # stretches without blocks have a sum of zero
    return sums.new_zeros(len(numbers), count, dtype=torch.float64).index_add_(1, of, sums.double())


def tensor_norms(values: Tensor, place: Tensor, count: int) -> tuple[Tensor, Tensor]:
    """The largest magnitude, float32, and the sum of squares, float64, of each of `count` tensors.

    Block b is of the tensor `place[b]`, and places ascend. Squares are added up within blocks, as in `sum_of_rows`, and
    then as in `tensor_sums`. NaN and Inf count as zero.
    """
    rows = finite(values).view(-1, BLOCK)
    squares = sum_of_rows(rows.double().square_())
    most = rows.new_zeros(count).scatter_reduce_(0, place, rows.abs().amax(1), "amax")
    return most, tensor_sums(squares.view(1, -1), place, count).view(-1)


def by_block(numbers: Tensor, place: Tensor) -> Tensor:
    """The number at `place[b]` for every element of block b. Shape `[64 * blocks]`."""
    return numbers.index_select(0, place).repeat_interleave(BLOCK)


def add_and_maxima(g: Tensor, e: Tensor, decay: float, out: Tensor) -> Tensor:
    """Write g + decay * e to `out`, of the dtype of e; returns its block maxima."""
    return block_maxima(torch.add(g, e, alpha=decay, out=out))


def add_and_norms(g: Tensor, e: Tensor, decay: float, out: Tensor) -> Tensor:
    """Write g + decay * e to `out`, of the dtype of e; returns the L1 norm of each block. Shape `[numel / 64]`."""
    return sum_of_rows(torch.add(g, e, alpha=decay, out=out).abs().view(-1, BLOCK))


def norm_of(x: Tensor) -> Tensor:
    """Return the Euclidean norm, in float32 at least.

    On a CPU of parts: torch adds all squares up in float32, and finds 4% too little for 2^28 elements, 65% for 2^30.
    """
    wide = torch.promote_types(x.dtype, torch.float32)
    if not x.is_cpu or x.numel() <= CHUNK:
        return torch.linalg.vector_norm(x, dtype=wide)
    parts = [torch.linalg.vector_norm(part, dtype=wide) for part in x.reshape(-1).split(CHUNK)]
    return torch.linalg.vector_norm(torch.stack(parts), dtype=torch.float64).to(wide)
