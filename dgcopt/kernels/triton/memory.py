"""Adding a gradient to what has not been sent, on a GPU: each operation is one pass, and waits for nothing."""

from __future__ import annotations

from typing import Any

import triton
import triton.language as tl
from torch import Tensor
from torch.autograd.graph import increment_version

from ..blocks import BLOCK, bits_of
from ..torch import Momentum
from .floats import UNFUSED, magnitudes, rounded, wide
from .lengths import check_length

__all__ = ["accumulate", "ahead", "decay", "look", "move_on"]

_ROWS = 32
"""Blocks of 64 that one program works on."""

_SIZE = 2048
"""Elements that one program works on."""


@triton.jit
def _added(
    u,
    g,
    at,
    there,
    m,
    keep,
    scale,
    HAS_G: tl.constexpr,
    MOVES: tl.constexpr,
    DAMPENED: tl.constexpr,
    NESTEROV: tl.constexpr,
):
    """What g adds to v, and u'."""
    if HAS_G:
        x = wide(tl.load(g + at, mask=there, other=0)) * scale
    else:
        x = tl.zeros(at.shape, tl.float32)
    step = x
    after = x
    if MOVES:
        before = wide(tl.load(u + at, mask=there, other=0))
        if DAMPENED:
            after = tl.fma(x, tl.full(at.shape, keep, tl.float32), before * m)
        else:
            after = tl.fma(before, tl.full(at.shape, m, tl.float32), x)
        step = after
        if NESTEROV:
            step = tl.fma(after, tl.full(at.shape, m, tl.float32), x)
    return step, after


@triton.jit
def _blocks(
    v,
    u,
    g,
    maxima,
    beside,
    numel,
    m,
    keep,
    scale,
    WRITES: tl.constexpr,
    BESIDE: tl.constexpr,
    HAS_G: tl.constexpr,
    MOVES: tl.constexpr,
    DAMPENED: tl.constexpr,
    NESTEROV: tl.constexpr,
    BLOCK: tl.constexpr,
    ROWS: tl.constexpr,
):
    rows = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    at = rows[:, None] * BLOCK + tl.arange(0, BLOCK)[None, :]
    there = at < numel
    step, after = _added(u, g, at, there, m, keep, scale, HAS_G, MOVES, DAMPENED, NESTEROV)
    new = rounded(wide(tl.load(v + at, mask=there, other=0)) + step, v.dtype.element_ty)
    new = tl.where(there, new, tl.zeros(at.shape, v.dtype.element_ty))
    tl.store(maxima + rows, tl.max(magnitudes(new), 1).to(maxima.dtype.element_ty), mask=rows * BLOCK < numel)
    if BESIDE:
        tl.store(beside + at, new, mask=there)
    if WRITES:
        tl.store(v + at, new, mask=there)
        if MOVES:
            tl.store(u + at, rounded(after, u.dtype.element_ty), mask=there)
        if HAS_G:
            tl.store(g + at, tl.zeros(at.shape, g.dtype.element_ty), mask=there)


@triton.jit
def _some_blocks(
    v,
    u,
    g,
    blocks,
    rows,
    number,
    numel,
    m,
    keep,
    scale,
    HAS_G: tl.constexpr,
    MOVES: tl.constexpr,
    DAMPENED: tl.constexpr,
    NESTEROV: tl.constexpr,
    BLOCK: tl.constexpr,
    ROWS: tl.constexpr,
):
    place = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    block = tl.load(blocks + place, mask=place < number, other=0)
    at = block[:, None] * BLOCK + tl.arange(0, BLOCK)[None, :]
    there = (place < number)[:, None] & (at < numel)
    step, _ = _added(u, g, at, there, m, keep, scale, HAS_G, MOVES, DAMPENED, NESTEROV)
    new = rounded(wide(tl.load(v + at, mask=there, other=0)) + step, v.dtype.element_ty)
    new = tl.where(there, new, tl.zeros(at.shape, v.dtype.element_ty))
    to = place[:, None] * BLOCK + tl.arange(0, BLOCK)[None, :]
    tl.store(rows + to, new, mask=(place < number)[:, None])


@triton.jit
def _moves(
    u,
    g,
    numel,
    m,
    keep,
    scale,
    HAS_G: tl.constexpr,
    MOVES: tl.constexpr,
    DAMPENED: tl.constexpr,
    NESTEROV: tl.constexpr,
    BLOCK: tl.constexpr,
    ROWS: tl.constexpr,
):
    at = tl.program_id(0).to(tl.int64) * ROWS * BLOCK + tl.arange(0, ROWS * BLOCK)
    _, after = _added(u, g, at, at < numel, m, keep, scale, HAS_G, MOVES, DAMPENED, NESTEROV)
    if MOVES:
        tl.store(u + at, rounded(after, u.dtype.element_ty), mask=at < numel)
    if HAS_G:
        tl.store(g + at, tl.zeros(at.shape, g.dtype.element_ty), mask=at < numel)


@triton.jit
def _decay(w, b, numel, m, adds, weight_decay, minus_lr, NESTEROV: tl.constexpr, SIZE: tl.constexpr):
    at = tl.program_id(0).to(tl.int64) * SIZE + tl.arange(0, SIZE)
    x = tl.load(w + at, mask=at < numel, other=0)
    step = tl.fma(x, tl.full(at.shape, adds, tl.float32), tl.load(b + at, mask=at < numel, other=0) * m)
    tl.store(b + at, step, mask=at < numel)
    if NESTEROV:
        step = step * m + x * weight_decay
    tl.store(w + at, tl.fma(step, tl.full(at.shape, minus_lr, tl.float32), x), mask=at < numel)


def accumulate(
    v: Tensor, u: Tensor | None, g: Tensor | None, maxima: Tensor, rule: Momentum | None, scale: float = 1.0
) -> None:
    """See `dgcopt.kernels.torch.accumulate`."""
    _pass(v, u, g, maxima, rule, scale, writes=True)


def look(
    v: Tensor,
    u: Tensor | None,
    g: Tensor | None,
    maxima: Tensor,
    rule: Momentum | None,
    scale: float = 1.0,
    new: Tensor | None = None,
) -> None:
    """See `dgcopt.kernels.torch.look`."""
    _pass(v, u, g, maxima, rule, scale, writes=False, new=new)


def move_on(u: Tensor, g: Tensor | None, rule: Momentum, scale: float = 1.0) -> None:
    """See `dgcopt.kernels.torch.move_on`."""
    if len(u):
        numbers, settings = _settings(g, rule, scale)
        _moves[(triton.cdiv(len(u), _ROWS * BLOCK),)](u, u if g is None else g, len(u), *numbers, **settings)
    increment_version([x for x in (u if rule.momentum else None, g) if x is not None])


def ahead(
    v: Tensor,
    u: Tensor | None,
    g: Tensor | None,
    blocks: Tensor,
    rows: Tensor,
    rule: Momentum | None,
    scale: float = 1.0,
) -> None:
    """See `dgcopt.kernels.torch.ahead`."""
    if len(blocks):
        numbers, settings = _settings(g, rule, scale)
        _some_blocks[(triton.cdiv(len(blocks), _ROWS),)](
            *(v, v if u is None else u, v if g is None else g, blocks, rows, len(blocks), len(v), *numbers),
            **settings,
        )
    increment_version(rows)


def decay(w: Tensor, b: Tensor, rule: Momentum, weight_decay: float, lr: float) -> None:
    """See `dgcopt.kernels.torch.decay`."""
    check_length(w.numel(), b)
    if w.numel():
        adds = weight_decay * (1 - rule.dampening)
        numbers = (float(rule.momentum), float(adds), float(weight_decay), -float(lr))
        modes = {"NESTEROV": rule.nesterov, "SIZE": _SIZE, **UNFUSED}
        _decay[(triton.cdiv(w.numel(), _SIZE),)](w, b, w.numel(), *numbers, **modes)
    increment_version((w, b))


def _pass(
    v: Tensor,
    u: Tensor | None,
    g: Tensor | None,
    maxima: Tensor,
    rule: Momentum | None,
    scale: float,
    writes: bool,
    new: Tensor | None = None,
) -> None:
    if len(v):
        numbers, settings = _settings(g, rule, scale)
        _blocks[(triton.cdiv(len(v), _ROWS * BLOCK),)](
            *(v, v if u is None else u, v if g is None else g, bits_of(maxima), v if new is None else new, len(v)),
            *numbers,
            **settings,
            WRITES=writes,
            BESIDE=new is not None,
        )
    moved = u if rule is not None and rule.momentum else None
    changed = (maxima, v, moved, g) if writes else (maxima, new)
    increment_version([x for x in changed if x is not None])  # as torch's own operations do: autograd looks for it


def _settings(g: Tensor | None, rule: Momentum | None, scale: float) -> tuple[tuple[float, ...], dict[str, Any]]:
    m, dampening, nesterov = (rule.momentum, rule.dampening, rule.nesterov) if rule is not None else (0.0, 0.0, False)
    modes = {"HAS_G": g is not None, "MOVES": m != 0, "DAMPENED": dampening != 0, "NESTEROV": nesterov}
    return (float(m), 1.0 - dampening, float(scale)), {
        **modes,
        "BLOCK": BLOCK,
        "ROWS": _ROWS,
        **UNFUSED,
    }
