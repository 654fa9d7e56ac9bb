"""Adding a gradient to momentum and unsent gradient: DGC's momentum correction; and momentum as a weighted sum."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from ..blocks import BLOCK, chunks
from ..parts import Mixture, Parts
from ..reductions.torch import block_maxima

__all__ = ["Momentum", "accumulate", "decay", "mix", "preview_block_maxima", "preview_blocks", "update_momentum"]


@dataclass(frozen=True)
class Momentum:
    """SGD's momentum rule: u' = momentum u + (1 - dampening) g is added to v, or g + momentum u' with Nesterov."""

    momentum: float
    dampening: float = 0.0
    nesterov: bool = False

    def of(self, g: Tensor, u: Tensor, out: Tensor | None = None) -> Tensor:
        """Return u' from u."""
        if self.dampening:
            wide = u.to(torch.promote_types(g.dtype, u.dtype))
            return torch.add(wide * self.momentum, g, alpha=1 - self.dampening, out=out)
        return torch.add(g, u, alpha=self.momentum, out=out)


def accumulate(
    v: Tensor, u: Tensor | None, g: Tensor | Parts | None, maxima: Tensor, rule: Momentum | None, scale: float = 1.0
) -> None:
    """Update u <- u', v <- v + (u' or Nesterov's addend), g <- 0, and write the block maxima of v.

    All are flat and begin on a block boundary, and so do parts of g. Elements between the parts are unchanged, and
    blocks without a part get no maxima. `maxima` has an element per block of 64, in the dtype of v. g is multiplied by
    `scale` first, in float32 at least; None counts as zero. Without a rule, or with momentum 0, g itself is added and u
    is unchanged.
    """
    for whole, blocks, part in _pieces(g, len(v)):
        mine, momentum, tops = v[whole], None if u is None else u[whole], maxima[blocks]
        for span in chunks(0, len(mine), v.device):
            torch.add(mine[span], _added(mine, momentum, part, span, rule, scale, commit=True), out=mine[span])
            _write_maxima(mine[span], tops, span)
            if part is not None:
                part[span].zero_()


def preview_block_maxima(
    v: Tensor,
    u: Tensor | None,
    g: Tensor | Parts | None,
    maxima: Tensor,
    rule: Momentum | None,
    scale: float = 1.0,
    new: Tensor | None = None,
) -> None:
    """Write the block maxima that `accumulate` would give, and to `new`, if given, its v; change nothing else."""
    for whole, blocks, part in _pieces(g, len(v)):
        mine, momentum, tops = v[whole], None if u is None else u[whole], maxima[blocks]
        for span in chunks(0, len(mine), v.device):
            made = (mine[span] + _added(mine, momentum, part, span, rule, scale)).to(v.dtype)
            _write_maxima(made, tops, span)
            if new is not None:
                new[whole][span] = made


def update_momentum(u: Tensor, g: Tensor | Parts | None, rule: Momentum, scale: float = 1.0) -> None:
    """Update u <- u' and g <- 0: the rest of `accumulate` after `preview_block_maxima` has written v."""
    for whole, _, part in _pieces(g, len(u)):
        mine = u[whole]
        for span in chunks(0, len(mine), u.device):
            _added(mine, mine, part, span, rule, scale, commit=True)
            if part is not None:
                part[span].zero_()


def preview_blocks(
    v: Tensor,
    u: Tensor | None,
    g: Tensor | Parts | None,
    blocks: Tensor,
    rows: Tensor,
    rule: Momentum | None,
    scale: float = 1.0,
) -> None:
    """Write some blocks of v to `rows`, `[len(blocks), 64]` in the dtype of v, as `accumulate` would update them.

    `blocks` are int64 numbers of blocks, ascending if g is in parts. Elements behind the end of v, or of a part, are
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
    """Yield the span of each part of g, in elements and in blocks, and the part."""
    spans = g.spans if isinstance(g, Parts) else [(0, numel, g)]
    for start, stop, part in spans:
        yield slice(start, stop), slice(start // BLOCK, -(-stop // BLOCK)), part


def decay(weights: Sequence[Tensor], buffers: Sequence[Tensor], rule: Momentum, weight_decay: float, lr: float) -> None:
    """Step the weight-decay term of SGD alone, for weights w of one dtype, each with a buffer b.

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
    """Return the addend of v from a span of g, in float32 at least; with `commit`, update u to u'."""
    dtype = torch.promote_types(v.dtype if g is None else g.dtype, torch.float32)
    x = v.new_zeros((), dtype=dtype).expand(span.stop - span.start) if g is None else g[span].to(dtype)
    if scale != 1:
        x = x * scale
    if rule is None or rule.momentum == 0:
        return x
    assert u is not None
    rounds = commit and torch.promote_types(dtype, u.dtype) != u.dtype
    after = rule.of(x, u[span], out=u[span] if commit and not rounds else None)
    if rounds:  # u, but not the addend of v
        u[span] = after
    return torch.add(x, after, alpha=rule.momentum) if rule.nesterov else after


def _write_maxima(new: Tensor, maxima: Tensor, span: slice) -> None:
    whole = len(new) - len(new) % BLOCK
    first = span.start // BLOCK
    last = first + whole // BLOCK
    block_maxima(new[:whole], out=maxima[first:last])
    if whole < len(new):
        maxima[last:] = block_maxima(torch.nn.functional.pad(new[whole:], (0, BLOCK - len(new) % BLOCK)))


def mix(x: Tensor, mixture: Mixture) -> None:
    """Put keep * x + add * y in the place of a flat x."""
    for start, part in zip(mixture.starts, mixture.parts, strict=True):
        x[start : start + len(part)].mul_(mixture.keep).add_(part, alpha=mixture.add)
