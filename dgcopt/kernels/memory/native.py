"""Adding a gradient to momentum and unsent gradient, in C."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import increment_version

from ..blocks import BLOCK, is_flat
from ..native.library import (
    FLOATS,
    Float,
    Int,
    Length,
    Pointer,
    array,
    at,
    check_alike,
    check_flat,
    function,
    pointers,
    shared,
)
from ..parts import Mixture, Parts, tensors_in
from .torch import Momentum

__all__ = [
    "MIXTURE",
    "accumulate",
    "decay",
    "mix",
    "preview_block_maxima",
    "preview_blocks",
    "update_momentum",
    "weights_of",
]

_MOMENTUM, _DAMPENED, _NESTEROV, _COMMIT, _LOOK, _BESIDE, _REST = (2**bit for bit in range(7))


def accumulate(
    v: Tensor, u: Tensor | None, g: Tensor | Parts | None, maxima: Tensor, rule: Momentum | None, scale: float = 1.0
) -> None:
    """See `accumulate` in torch.py."""
    _pass(v, v, u, g, maxima, rule, scale, _COMMIT)
    for changed in tensors_in((v, u if rule is not None and rule.momentum else None, g)):
        increment_version(changed)  # as torch's own operations do: autograd looks for it


def preview_block_maxima(
    v: Tensor,
    u: Tensor | None,
    g: Tensor | Parts | None,
    maxima: Tensor,
    rule: Momentum | None,
    scale: float = 1.0,
    new: Tensor | None = None,
) -> None:
    """See `preview_block_maxima` in torch.py."""
    if new is None:
        _pass(v, v, u, g, maxima, rule, scale, _LOOK)
    else:
        check_flat(v.numel(), new, dtype=v.dtype)
        _pass(v, new, u, g, maxima, rule, scale, _BESIDE)
        increment_version(new)


def update_momentum(u: Tensor, g: Tensor | Parts | None, rule: Momentum, scale: float = 1.0) -> None:
    """See `update_momentum` in torch.py."""
    _pass(u, u, u, g, None, rule, scale, _COMMIT | _REST)
    for changed in tensors_in((u if rule.momentum else None, g)):
        increment_version(changed)


def _pass(
    v: Tensor,
    new: Tensor,
    u: Tensor | None,
    g: Tensor | Parts | None,
    maxima: Tensor | None,
    rule: Momentum | None,
    scale: float,
    does: int,
) -> None:
    if maxima is not None and (maxima.dtype != v.dtype or len(maxima) != -(-len(v) // BLOCK) or not is_flat(maxima)):
        raise ValueError(f"{len(v)} elements have {-(-len(v) // BLOCK)} block maxima, not {len(maxima)}")
    momentum, m, keep, mode = _checked(v, u, rule)
    parts, places = _parts(g, v.numel())
    loop = function(f"accumulate_{_of(parts, v)}", *[Pointer] * 6, Length, Pointer, *[Length] * 2, *[Float] * 3, Int)

    def span(start: int, stop: int) -> None:
        operands = (at(v, 0), at(new, 0), at(momentum, 0), *places, at(v if maxima is None else maxima, 0))
        loop(*operands, start, stop, m, keep, scale, mode | does)

    shared(span, v.numel())


def preview_blocks(
    v: Tensor,
    u: Tensor | None,
    g: Tensor | Parts | None,
    blocks: Tensor,
    rows: Tensor,
    rule: Momentum | None,
    scale: float = 1.0,
) -> None:
    """See `preview_blocks` in torch.py."""
    momentum, m, keep, mode = _checked(v, u, rule)
    check_flat(blocks.numel(), blocks, dtype=torch.int64)
    if rows.dtype != v.dtype or rows.shape != (blocks.numel(), BLOCK) or not is_flat(rows):
        raise ValueError(
            f"{blocks.numel()} blocks need as many rows of {BLOCK}, not {tuple(rows.shape)} of {rows.dtype}"
        )
    parts, places = _parts(g, v.numel())
    loop = function(f"ahead_{_of(parts, v)}", *[Pointer] * 5, Length, Pointer, Length, Pointer, *[Float] * 3, Int)
    flat = rows.view(-1)

    def span(start: int, stop: int) -> None:
        chosen = (at(blocks, start // BLOCK), (stop - start) // BLOCK, at(flat, start))
        if loop(at(v, 0), at(momentum, 0), *places, *chosen, m, keep, scale, mode):
            raise ValueError(f"blocks must lie within the {v.numel()} elements that there are")

    shared(span, flat.numel())


def decay(weights: Sequence[Tensor], buffers: Sequence[Tensor], rule: Momentum, weight_decay: float, lr: float) -> None:
    """See `decay` in torch.py."""
    numels = [w.numel() for w in weights]
    check_alike(is_flat, *weights, *buffers)
    if numels != [b.numel() for b in buffers]:
        raise ValueError("weights and buffers of the same lengths are needed")
    loop = function(f"decay_{FLOATS[weights[0].dtype]}", *[Pointer] * 3, *[Length] * 3, *[Float] * 4, Int)
    places = [array(Pointer, [x.data_ptr() for x in tensors]) for tensors in (weights, buffers)]
    lengths = array(Length, numels)
    settings = (rule.momentum, weight_decay * (1 - rule.dampening), weight_decay, -lr, int(rule.nesterov))

    def span(start: int, stop: int) -> None:
        loop(*places, lengths, len(numels), start, stop, *settings)

    shared(span, sum(numels))
    increment_version((*weights, *buffers))


def _checked(v: Tensor, u: Tensor | None, rule: Momentum | None) -> tuple[Tensor, float, float, int]:
    """Return momentum as the loops take it: its tensor, or any other if there is none; its numbers and its mode."""
    if rule is None or rule.momentum == 0:
        check_flat(v.numel(), v)
        return v, 0.0, 1.0, 0
    assert u is not None
    check_flat(v.numel(), v, u, dtype=v.dtype)
    mode = _MOMENTUM | (_DAMPENED if rule.dampening else 0) | (_NESTEROV if rule.nesterov else 0)
    return u, rule.momentum, 1 - rule.dampening, mode


def _parts(g: Tensor | Parts | None, numel: int) -> tuple[Parts, tuple[Any, int, int, int]]:
    """Return the gradient in parts, and their addresses. Raises ValueError for parts that do not fit."""
    if not isinstance(g, Parts):
        g = Parts([g], torch.tensor([0]), torch.tensor([numel]))
    end = 0
    for start, stop, _ in g.spans:
        if not end <= start <= stop <= numel or start % BLOCK:
            raise ValueError(f"a part from {start} to {stop} does not fit: after {end}, up to {numel}, by {BLOCK}")
        end = stop
    return g, (pointers(g, _dtype(g)), g.starts.data_ptr(), g.stops.data_ptr(), len(g.tensors))


def _dtype(parts: Parts) -> torch.dtype:
    return next((part.dtype for part in parts.tensors if part is not None), torch.float32)


def _of(parts: Parts, v: Tensor) -> str:
    return f"{FLOATS[_dtype(parts)]}_{FLOATS[v.dtype]}"


MIXTURE = (Pointer, Length, Float, Float)
"""The C types of a mixture's arguments."""


def mix(x: Tensor, mixture: Mixture) -> None:
    """See `mix` in torch.py."""
    check_flat(len(x), x, dtype=torch.float32)
    weights = weights_of(mixture, len(x))
    loop = function("mix", Pointer, Length, Length, *MIXTURE)

    def span(start: int, stop: int) -> None:
        loop(x.data_ptr(), start, stop, *weights)

    shared(span, len(x))
    increment_version(x)


def weights_of(mixture: Mixture | None, numel: int) -> tuple[ctypes.Array[ctypes.c_int64], int, float, float]:
    """Return a mixture's arguments for loops: the address of each part, and its start and stop in x.

    Raises ValueError for a part that is not among the elements of x, or begins before the one ahead of it has ended.
    """
    if mixture is None:
        return (Length * 0)(), 0, 1.0, 0.0
    rows, end = [], 0
    for start, part in zip(mixture.starts, mixture.parts, strict=True):
        length = part.numel()
        check_flat(length, part, dtype=torch.float32)
        if not end <= start <= numel - length:
            raise ValueError(f"{length} elements from {start} on are not among those from {end} to {numel}")
        end = start + length
        rows += [part.data_ptr(), start, end]
    return (Length * len(rows))(*rows), len(mixture.parts), mixture.keep, mixture.add
