"""Owners of positions, in Triton; torch sorts them."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from ..rows import sent
from ..torch import MIX
from .floats import UNFUSED
from .lengths import check_length

__all__ = ["by_owner", "of_owners"]

_SIZE = 256
"""Positions that one program works on."""

_MIX: tl.constexpr = tl.constexpr(MIX)


@triton.jit
def _turn(row, size):
    return (((row * _MIX) & 0xFFFFFFFF) >> 16) % size


@triton.jit
def _owners(positions, count, size, owners, places, counts, SIZE: tl.constexpr):
    at = tl.program_id(0).to(tl.int64) * SIZE + tl.arange(0, SIZE)
    position = tl.load(positions + at, mask=at < count, other=0)
    row = position // size
    owner = (position - row * size + _turn(row, size)) % size
    tl.store(owners + at, owner, mask=at < count)
    tl.atomic_add(counts + owner, tl.full((SIZE,), 1, tl.int64), mask=at < count)
    tl.store(places + at, row, mask=at < count)


@triton.jit
def _positions(places, owners, count, size, positions, SIZE: tl.constexpr):
    at = tl.program_id(0).to(tl.int64) * SIZE + tl.arange(0, SIZE)
    row = tl.load(places + at, mask=at < count, other=0)
    turned = tl.load(owners + at, mask=at < count, other=0) - _turn(row, size)
    tl.store(positions + at, row * size + tl.where(turned < 0, turned + size, turned), mask=at < count)


def by_owner(positions: Tensor, size: int) -> tuple[Tensor, Tensor, Tensor]:
    """See `dgcopt.kernels.torch.by_owner`."""
    owners, places, counts = torch.empty_like(positions), torch.empty_like(positions), positions.new_zeros(size)
    if len(positions):
        grid = (triton.cdiv(len(positions), _SIZE),)
        _owners[grid](positions, len(positions), size, owners, places, counts, SIZE=_SIZE, **UNFUSED)
    order = owners.argsort(stable=True)
    return order, places.index_select(0, order), counts.cpu()


def of_owners(places: Tensor, counts: Tensor, size: int) -> Tensor:
    """See `dgcopt.kernels.torch.of_owners`."""
    check_length(int(counts.sum()), places)
    positions = torch.empty_like(places)
    if len(places):
        owners = sent(torch.arange(len(counts)).repeat_interleave(counts), places.device)
        grid = (triton.cdiv(len(places), _SIZE),)
        _positions[grid](places, owners, len(places), size, positions, SIZE=_SIZE, **UNFUSED)
    return positions
