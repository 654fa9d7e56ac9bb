"""Adding a gradient to what has not been sent."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from ..blocks import BLOCK, chunks
from ..parts import Parts
from .selection import block_maxima

__all__ = ["Momentum", "accumulate", "ahead", "decay", "look", "move_on"]


@dataclass(frozen=True)
class Momentum:
    """How SGD treats momentum: u' = momentum u + (1 - dampening) g adds itself to v, or g + momentum u' by Nesterov."""

    momentum: float
    dampening: float = 0.0
    nesterov: bool = False

    def of(self, g: Tensor, u: Tensor, out: Tensor | None = None) -> Tensor:
        """u', from u."""
        if self.dampening:
            wide = u.to(torch.promote_types(g.dtype, u.dtype))
            return torch.add(wide * self.momentum, g, alpha=1 - self.dampening, out=out)
        return torch.add(g, u, alpha=self.momentum, out=out)


def accumulate(
    v: Tensor, u: Tensor | None, g: Tensor | Parts | None, maxima: Tensor, rule: Momentum | None, scale: float = 1.0
) -> None:
    """u <- u', v <- v + what g adds to it, g <- 0; and the block maxima of v.

    All are flat and begin on a block boundary, and so do parts of g; what lies between those stays, and blocks of which
    a part has none have no maxima. `maxima` has an element per block of 64, of the dtype of v. g is taken in float32 at
    least and multiplied by `scale` first; None counts as zero. Without a rule, or with momentum 0, g itself is added,
    and u stays.
    """
    for whole, blocks, part in _pieces(g, len(v)):
        mine, momentum, tops = v[whole], None if u is None else u[whole], maxima[blocks]
        for span in chunks(0, len(mine), v.device):
            torch.add(mine[span], _added(mine, momentum, part, span, rule, scale, commit=True), out=mine[span])
            _write_maxima(mine[span], tops, span)
            if part is not None:
                part[span].zero_()


def look(
    v: Tensor,
    u: Tensor | None,
    g: Tensor | Parts | None,
    maxima: Tensor,
    rule: Momentum | None,
    scale: float = 1.0,
    new: Tensor | None = None,
) -> None:
    """The block maxima that `accumulate` would give, and in `new`, if given, its v; nothing else is written."""
    for whole, blocks, part in _pieces(g, len(v)):
        mine, momentum, tops = v[whole], None if u is None else u[whole], maxima[blocks]
        for span in chunks(0, len(mine), v.device):
            made = (mine[span] + _added(mine, momentum, part, span, rule, scale)).to(v.dtype)
            _write_maxima(made, tops, span)
            if new is not None:
                new[whole][span] = made


def move_on(u: Tensor, g: Tensor | Parts | None, rule: Momentum, scale: float = 1.0) -> None:
    """u <- u', g <- 0: what is left of `accumulate` where `look` has written v."""
    for whole, _, part in _pieces(g, len(u)):
        mine = u[whole]
        for span in chunks(0, len(mine), u.device):
            _added(mine, mine, part, span, rule, scale, commit=True)
            if part is not None:
                part[span].zero_()


def ahead(
    v: Tensor,
    u: Tensor | None,
    g: Tensor | Parts | None,
    blocks: Tensor,
    rows: Tensor,
    rule: Momentum | None,
    scale: float = 1.0,
) -> None:
    """`rows`, `[len(blocks), 64]` of the dtype of v: what `accumulate` would make of some blocks of v.

    `blocks` are int64 numbers of blocks, ascending where g lies apart. What lies behind the end of v, or of a part, is
    zero.
    """
    rows.zero_()
    for whole, numbers, part in _pieces(g, len(v)):
        first, last = 0, len(blocks)
        if whole.stop - whole.start < len(v):
            ends = torch.tensor([numbers.start, numbers.stop], device=v.device)
            first, last = torch.searchsorted(blocks, ends).tolist()
        mine, momentum = v[whole], None if u is None else u[whole]
        for span in chunks(first, last, v.device):
            places = (blocks[span, None] - numbers.start) * BLOCK + torch.arange(BLOCK, device=v.device)
            there = places < len(mine)
            owned = places[there]
            here = [None if flat is None else flat.index_select(0, owned) for flat in (mine, momentum, part)]
            assert here[0] is not None
            added = _added(here[0], here[1], here[2], slice(0, len(owned)), rule, scale)
            rows[span][there] = (here[0] + added).to(v.dtype)


def _pieces(g: Tensor | Parts | None, numel: int) -> Iterator[tuple[slice, slice, Tensor | None]]:
    """Where each part of g lies, in elements and in blocks, and the part."""
    spans = g.spans if isinstance(g, Parts) else [(0, numel, g)]
    for start, stop, part in spans:
        yield slice(start, stop), slice(start // BLOCK, -(-stop // BLOCK)), part


def decay(weights: Sequence[Tensor], buffers: Sequence[Tensor], rule: Momentum, weight_decay: float, lr: float) -> None:
    """SGD's step of the weight-decay term alone, for weights w of one dtype, and a buffer b of each.

    b <- m b + (1 - dampening) wd w, and w <- w - lr b; with Nesterov w <- w - lr (wd w + m b). In float32 at least.
    """
    for w, b in zip(weights, buffers, strict=True):
        wide = torch.promote_types(w.dtype, torch.float32)
        x, step = w.to(wide), b.to(wide) * rule.momentum
        step.add_(x, alpha=weight_decay * (1 - rule.dampening))
        b.copy_(step)
        w.copy_(torch.add(x, step * rule.momentum + x * weight_decay if rule.nesterov else step, alpha=-lr))


def _added(
    v: Tensor,
    u: Tensor | None,
    g: Tensor | None,
    span: slice,
    rule: Momentum | None,
    scale: float,
    commit: bool = False,
) -> Tensor:
    """What a span of g, in float32 at least, adds to v; with `commit`, u becomes u'."""
    dtype = torch.promote_types(v.dtype if g is None else g.dtype, torch.float32)
    x = v.new_zeros((), dtype=dtype).expand(span.stop - span.start) if g is None else g[span].to(dtype)
    if scale != 1:
        x = x * scale
    if rule is None or rule.momentum == 0:
        return x
    assert u is not None
    rounds = commit and torch.promote_types(dtype, u.dtype) != u.dtype
    after = rule.of(x, u[span], out=u[span] if commit and not rounds else None)
    if rounds:  # u, but not what it adds to v
        u[span] = after
    return torch.add(x, after, alpha=rule.momentum) if rule.nesterov else after


def _write_maxima(new: Tensor, maxima: Tensor, span: slice) -> None:
    whole = len(new) - len(new) % BLOCK
    first = span.start // BLOCK
    last = first + whole // BLOCK
    block_maxima(new[:whole], out=maxima[first:last])
    if whole < len(new):
        maxima[last:] = block_maxima(torch.nn.functional.pad(new[whole:], (0, BLOCK - len(new) % BLOCK)))
