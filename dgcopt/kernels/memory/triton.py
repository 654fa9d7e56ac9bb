"""Adding a gradient to momentum and unsent gradient, in Triton: one pass each, without a wait."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import triton
import triton.language as tl
from torch import Tensor
from torch.autograd.graph import increment_version

from ..blocks import BLOCK, bits_of
from ..parts import Mixture
from ..triton.floats import UNFUSED, magnitudes, rounded, wide
from ..triton.lengths import check_length
from ..triton.pieces import Pieces, begins, tile_of
from .torch import Momentum

__all__ = ["accumulate", "decay", "mix", "preview_block_maxima", "preview_blocks", "update_momentum"]

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
    """Return the addend of v, and u'."""
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
def _decay_tile(w, b, there, m, adds, weight_decay, minus_lr, NESTEROV: tl.constexpr, DTYPE: tl.constexpr):
    x = wide(tl.load(w, mask=there, other=0))
    step = tl.fma(x, tl.full(x.shape, adds, tl.float32), wide(tl.load(b, mask=there, other=0)) * m)
    tl.store(b, rounded(step, DTYPE), mask=there)
    if NESTEROV:
        step = step * m + x * weight_decay
    tl.store(w, rounded(tl.fma(step, tl.full(x.shape, minus_lr, tl.float32), x), DTYPE), mask=there)


@triton.jit
def _decay(
    weights,
    numels,
    buffers,
    lengths,
    firsts,
    count,
    m,
    adds,
    weight_decay,
    minus_lr,
    NESTEROV: tl.constexpr,
    DTYPE: tl.constexpr,
    ALIGNED: tl.constexpr,
    SIZE: tl.constexpr,
):
    piece, start = tile_of(firsts, count, SIZE)
    numel, at = tl.load(numels + piece), start + tl.arange(0, SIZE)
    w, b = begins(weights, piece, DTYPE, ALIGNED) + at, begins(buffers, piece, DTYPE, ALIGNED) + at
    if start + SIZE <= numel:  # several elements at a time, as no mask depends on their place
        _decay_tile(w, b, tl.full((SIZE,), 1, tl.int1), m, adds, weight_decay, minus_lr, NESTEROV, DTYPE)
    else:
        _decay_tile(w, b, at < numel, m, adds, weight_decay, minus_lr, NESTEROV, DTYPE)


def accumulate(
    v: Tensor, u: Tensor | None, g: Tensor | None, maxima: Tensor, rule: Momentum | None, scale: float = 1.0
) -> None:
    """See `accumulate` in torch.py."""
    _pass(v, u, g, maxima, rule, scale, writes=True)


def preview_block_maxima(
    v: Tensor,
    u: Tensor | None,
    g: Tensor | None,
    maxima: Tensor,
    rule: Momentum | None,
    scale: float = 1.0,
    new: Tensor | None = None,
) -> None:
    """See `preview_block_maxima` in torch.py."""
    _pass(v, u, g, maxima, rule, scale, writes=False, new=new)


def update_momentum(u: Tensor, g: Tensor | None, rule: Momentum, scale: float = 1.0) -> None:
    """See `update_momentum` in torch.py."""
    if len(u):
        numbers, settings = _settings(g, rule, scale)
        _moves[(triton.cdiv(len(u), _ROWS * BLOCK),)](u, u if g is None else g, len(u), *numbers, **settings)
    increment_version([x for x in (u if rule.momentum else None, g) if x is not None])


def preview_blocks(
    v: Tensor,
    u: Tensor | None,
    g: Tensor | None,
    blocks: Tensor,
    rows: Tensor,
    rule: Momentum | None,
    scale: float = 1.0,
) -> None:
    """See `preview_blocks` in torch.py."""
    if len(blocks):
        numbers, settings = _settings(g, rule, scale)
        _some_blocks[(triton.cdiv(len(blocks), _ROWS),)](
            *(v, v if u is None else u, v if g is None else g, blocks, rows, len(blocks), len(v), *numbers),
            **settings,
        )
    increment_version(rows)


def decay(weights: Sequence[Tensor], buffers: Sequence[Tensor], rule: Momentum, weight_decay: float, lr: float) -> None:
    """See `decay` in torch.py. One launch for all."""
    for w, b in zip(weights, buffers, strict=True):
        check_length(w.numel(), b)
    pieces = Pieces.of(_SIZE, weights, buffers)
    if pieces.tiles:
        adds = weight_decay * (1 - rule.dampening)
        numbers = (float(rule.momentum), float(adds), float(weight_decay), -float(lr))
        _decay[(pieces.tiles,)](*pieces.operands, *numbers, NESTEROV=rule.nesterov, **pieces.modes, **UNFUSED)
    increment_version((*weights, *buffers))


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


@triton.jit
def _mix(flat, keep, part, add, numel, SIZE: tl.constexpr):
    at = tl.program_id(0).to(tl.int64) * SIZE + tl.arange(0, SIZE)
    x, y = tl.load(flat + at, mask=at < numel, other=0), tl.load(part + at, mask=at < numel, other=0)
    tl.store(flat + at, tl.fma(y, tl.full(at.shape, add, tl.float32), x * keep), mask=at < numel)


def mix(x: Tensor, mixture: Mixture) -> None:
    """See `mix` in torch.py."""
    increment_version(x)
    for start, part in zip(mixture.starts, mixture.parts, strict=True):
        if len(part):
            operands = (x.narrow(0, start, len(part)), float(mixture.keep), part, float(mixture.add), len(part))
            _mix[(triton.cdiv(len(part), _SIZE),)](*operands, SIZE=_SIZE, **UNFUSED)
