"""Adding a gradient to what has not been sent, in C."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.autograd.graph import increment_version

from ..blocks import BLOCK
from ..torch import Momentum
from .library import FLOATS, Float, Int, Length, Pointer, at, check_flat, function, is_flat, shared

__all__ = ["accumulate", "ahead", "decay", "look"]

_MOMENTUM, _DAMPENED, _NESTEROV, _COMMIT, _LOOK = 1, 2, 4, 8, 16


def accumulate(
    v: Tensor, u: Tensor | None, g: Tensor | None, maxima: Tensor, rule: Momentum | None, scale: float = 1.0
) -> None:
    """See `dgcopt.kernels.torch.accumulate`."""
    _pass(v, u, g, maxima, rule, scale, _COMMIT)
    for changed in (v, u if rule is not None and rule.momentum else None, g):
        if changed is not None:
            increment_version(changed)  # as torch's own operations do: autograd looks for it


def look(
    v: Tensor, u: Tensor | None, g: Tensor | None, maxima: Tensor, rule: Momentum | None, scale: float = 1.0
) -> None:
    """See `dgcopt.kernels.torch.look`."""
    _pass(v, u, g, maxima, rule, scale, _LOOK)


def _pass(
    v: Tensor, u: Tensor | None, g: Tensor | None, maxima: Tensor, rule: Momentum | None, scale: float, does: int
) -> None:
    if maxima.dtype != v.dtype or maxima.numel() != -(-v.numel() // BLOCK) or not is_flat(maxima):
        raise ValueError(f"{v.numel()} elements have {-(-v.numel() // BLOCK)} block maxima, not {maxima.numel()}")
    momentum, m, keep, mode = _checked(v, u, g, rule)
    loop = function(f"accumulate_{_of(g, v)}", *[Pointer] * 4, Length, Float, Float, Float, Int)

    def span(start: int, stop: int) -> None:
        places = (at(v, start), at(momentum, start), at(g, start), at(maxima, start // BLOCK))
        loop(*places, stop - start, m, keep, scale, mode | does)

    shared(span, v.numel())


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
    momentum, m, keep, mode = _checked(v, u, g, rule)
    check_flat(blocks.numel(), blocks, dtype=torch.int64)
    if rows.dtype != v.dtype or rows.shape != (blocks.numel(), BLOCK) or not is_flat(rows):
        raise ValueError(
            f"{blocks.numel()} blocks need as many rows of {BLOCK}, not {tuple(rows.shape)} of {rows.dtype}"
        )
    loop = function(f"ahead_{_of(g, v)}", *[Pointer] * 3, Length, Pointer, Length, Pointer, Float, Float, Float, Int)
    flat = rows.view(-1)

    def span(start: int, stop: int) -> None:
        first = start // BLOCK
        chosen = (at(blocks, first), (stop - start) // BLOCK, at(flat, start))
        if loop(at(v, 0), at(momentum, 0), at(g, 0), v.numel(), *chosen, m, keep, scale, mode):
            raise ValueError(f"blocks must lie within the {v.numel()} elements that there are")

    shared(span, flat.numel())


def decay(w: Tensor, b: Tensor, rule: Momentum, weight_decay: float, lr: float) -> None:
    """See `dgcopt.kernels.torch.decay`."""
    check_flat(w.numel(), w, b, dtype=torch.float32)
    loop = function("decay", Pointer, Pointer, Length, Float, Float, Float, Float, Int)
    settings = (rule.momentum, weight_decay * (1 - rule.dampening), weight_decay, -lr, int(rule.nesterov))

    def span(start: int, stop: int) -> None:
        loop(at(w, start), at(b, start), stop - start, *settings)

    shared(span, w.numel())
    increment_version(w)
    increment_version(b)


def _checked(v: Tensor, u: Tensor | None, g: Tensor | None, rule: Momentum | None) -> tuple[Tensor, float, float, int]:
    """What the loops need to know of momentum: where it is, or anything in its place; its numbers and its mode."""
    if g is not None:
        check_flat(v.numel(), g)
    if rule is None or rule.momentum == 0:
        check_flat(v.numel(), v)
        return v, 0.0, 1.0, 0
    assert u is not None
    check_flat(v.numel(), v, u, dtype=v.dtype)
    mode = _MOMENTUM | (_DAMPENED if rule.dampening else 0) | (_NESTEROV if rule.nesterov else 0)
    return u, rule.momentum, 1 - rule.dampening, mode


def _of(g: Tensor | None, v: Tensor) -> str:
    return f"{'f32' if g is None else FLOATS[g.dtype]}_{FLOATS[v.dtype]}"
