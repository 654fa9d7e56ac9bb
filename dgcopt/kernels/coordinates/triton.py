"""Reads and writes at selected positions, and the positions' owners, in Triton; torch sorts by owner."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import triton
import triton.language as tl
from torch import Tensor
from torch.autograd.graph import increment_version

from ..parts import Parts
from ..rows import sent
from ..triton.floats import UNFUSED, rounded, wide
from ..triton.lengths import check_length
from ..triton.pieces import begins, piece_of
from .torch import MIX

__all__ = ["add_at", "by_owner", "clear_at", "gather", "of_owners", "step_at", "subtract_at"]

_SIZE = 256
"""Positions that one program works on."""


@triton.jit
def _positions(positions, count, SIZE: tl.constexpr):
    """The numbers of this program's positions, these, and whether they are there."""
    at = tl.program_id(0).to(tl.int64) * SIZE + tl.arange(0, SIZE)
    return at, tl.load(positions + at, mask=at < count, other=-1), at < count


@triton.jit
def _gather(flat, numel, positions, count, values, SIZE: tl.constexpr):
    at, position, there = _positions(positions, count, SIZE)
    x = tl.load(flat + position, mask=(position >= 0) & (position < numel), other=0)
    tl.store(values + at, x, mask=there)


@triton.jit
def _subtract(flat, numel, positions, count, values, SIZE: tl.constexpr):
    at, position, there = _positions(positions, count, SIZE)
    within = (position >= 0) & (position < numel)
    x = wide(tl.load(flat + position, mask=within, other=0)) - wide(tl.load(values + at, mask=there, other=0))
    tl.store(flat + position, rounded(x, flat.dtype.element_ty), mask=within)


@triton.jit
def _clear(flat, numel, positions, count, SIZE: tl.constexpr):
    _, position, _ = _positions(positions, count, SIZE)
    nothing = tl.zeros((SIZE,), flat.dtype.element_ty)
    tl.store(flat + position, nothing, mask=(position >= 0) & (position < numel))


@triton.jit
def _in_parts(position, addresses, starts, stops, parts):
    """Return the addresses of positions, their parts, and a mask of parts that exist."""
    part = piece_of(position, starts, parts)
    beyond = position - tl.load(starts + part)
    there = (beyond >= 0) & (position < tl.load(stops + part)) & (tl.load(addresses + part) != 0)
    return begins(addresses, part, tl.float32) + beyond, part, there


@triton.jit
def _add(addresses, starts, stops, parts, positions, order, values, count, sums, SIZE: tl.constexpr):
    """Of positions in order, whoever comes first adds for all that are equal, one after the other."""
    at, position, owned = _positions(positions, count, SIZE)
    to, _, there = _in_parts(position, addresses, starts, stops, parts)
    first = owned & ((at == 0) | (position != tl.load(positions + at - 1, mask=owned & (at > 0), other=0)))
    x = tl.load(to, mask=first & there, other=0)
    mine, adds = at, first
    while tl.max(adds.to(tl.int32), 0) > 0:
        value = tl.load(values + tl.load(order + mine, mask=adds, other=0), mask=adds, other=0)
        x = tl.where(adds & there, x + value, x)
        mine += 1
        adds = adds & (mine < count) & (tl.load(positions + mine, mask=mine < count, other=0) == position)
    tl.store(to, x, mask=first & there)
    mine, adds = at, first
    while tl.max(adds.to(tl.int32), 0) > 0:
        tl.store(sums + tl.load(order + mine, mask=adds, other=0), x, mask=adds)
        mine += 1
        adds = adds & (mine < count) & (tl.load(positions + mine, mask=mine < count, other=0) == position)


@triton.jit
def _stepped(addresses, starts, stops, parts, rates, positions, grads, count, after, SIZE: tl.constexpr):
    at, position, owned = _positions(positions, count, SIZE)
    to, part, there = _in_parts(position, addresses, starts, stops, parts)
    rate = tl.load(rates + part)
    w = tl.load(to, mask=owned & there, other=0)
    tl.store(after + at, tl.fma(tl.load(grads + at, mask=owned, other=0), rate, w), mask=owned)


@triton.jit
def _put(addresses, starts, stops, parts, positions, count, values, SIZE: tl.constexpr):
    at, position, owned = _positions(positions, count, SIZE)
    to, _, there = _in_parts(position, addresses, starts, stops, parts)
    tl.store(to, tl.load(values + at, mask=owned, other=0), mask=owned & there)


def gather(flat: Tensor, positions: Tensor) -> Tensor:
    """See `gather` in torch.py."""
    values = flat.new_empty(len(positions))
    if len(positions):
        _gather[_grid(positions)](flat, len(flat), positions, len(positions), values, SIZE=_SIZE, **UNFUSED)
    return values


def subtract_at(flat: Tensor, positions: Tensor, values: Tensor) -> None:
    """See `subtract_at` in torch.py."""
    check_length(len(positions), values)
    if len(positions):
        _subtract[_grid(positions)](flat, len(flat), positions, len(positions), values, SIZE=_SIZE, **UNFUSED)
    increment_version(flat)


def clear_at(flat: Tensor, positions: Tensor) -> None:
    """See `clear_at` in torch.py."""
    if len(positions):
        _clear[_grid(positions)](flat, len(flat), positions, len(positions), SIZE=_SIZE, **UNFUSED)
    increment_version(flat)


def add_at(parts: Parts, positions: Tensor, values: Tensor) -> Tensor:
    """See `add_at` in torch.py."""
    check_length(len(positions), values)
    sums = torch.zeros_like(values)
    if len(positions):
        ascending, order = positions.sort(stable=True)
        operands = (*_table(parts, positions.device), ascending, order, values, len(positions), sums)
        _add[_grid(positions)](*operands, SIZE=_SIZE, **UNFUSED)
    _are_changed(parts)
    return sums


def step_at(weights: Parts, rates: Sequence[float], positions: Tensor, grads: Tensor) -> None:
    """See `step_at` in torch.py. All are read before any is written, as a position may be named twice."""
    check_length(len(positions), grads)
    if len(rates) != len(weights.tensors):
        raise ValueError(f"{len(weights.tensors)} parts need as many rates, not {len(rates)}")
    if len(positions):
        after, count = torch.empty_like(grads), len(positions)
        table = _table(weights, positions.device)
        numbers = sent(torch.tensor(rates, dtype=torch.float32), positions.device)
        _stepped[_grid(positions)](*table, numbers, positions, grads, count, after, SIZE=_SIZE, **UNFUSED)
        _put[_grid(positions)](*table, positions, count, after, SIZE=_SIZE, **UNFUSED)
    _are_changed(weights)


def _grid(positions: Tensor) -> tuple[int]:
    return (triton.cdiv(len(positions), _SIZE),)


def _table(parts: Parts, device: torch.device) -> tuple[Tensor, Tensor, Tensor, int]:
    """Return the parts' addresses, 0 for a missing one, their starts and stops, and their number."""
    for start, stop, part in parts.spans:
        if part is not None and part.numel() != stop - start:
            raise ValueError(f"a flat tensor of {stop - start} elements is needed, not {tuple(part.shape)}")
    addresses = torch.tensor([0 if part is None else part.data_ptr() for part in parts.tensors])
    addresses, starts, stops = sent(torch.stack((addresses, parts.starts, parts.stops)), device).unbind()
    return addresses, starts, stops, len(parts.tensors)


def _are_changed(parts: Parts) -> None:
    for part in parts.tensors:
        if part is not None:
            increment_version(part)


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
def _owned_positions(places, owners, count, size, positions, SIZE: tl.constexpr):
    at = tl.program_id(0).to(tl.int64) * SIZE + tl.arange(0, SIZE)
    row = tl.load(places + at, mask=at < count, other=0)
    turned = tl.load(owners + at, mask=at < count, other=0) - _turn(row, size)
    tl.store(positions + at, row * size + tl.where(turned < 0, turned + size, turned), mask=at < count)


def by_owner(positions: Tensor, size: int) -> tuple[Tensor, Tensor, Tensor]:
    """See `by_owner` in torch.py."""
    owners, places, counts = torch.empty_like(positions), torch.empty_like(positions), positions.new_zeros(size)
    if len(positions):
        grid = (triton.cdiv(len(positions), _SIZE),)
        _owners[grid](positions, len(positions), size, owners, places, counts, SIZE=_SIZE, **UNFUSED)
    order = owners.argsort(stable=True)
    return order, places.index_select(0, order), counts.cpu()


def of_owners(places: Tensor, counts: Tensor, size: int) -> Tensor:
    """See `of_owners` in torch.py."""
    check_length(int(counts.sum()), places)
    positions = torch.empty_like(places)
    if len(places):
        owners = sent(torch.arange(len(counts)).repeat_interleave(counts), places.device)
        grid = (triton.cdiv(len(places), _SIZE),)
        _owned_positions[grid](places, owners, len(places), size, positions, SIZE=_SIZE, **UNFUSED)
    return positions
