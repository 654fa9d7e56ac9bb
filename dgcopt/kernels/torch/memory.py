"""Adding a gradient to what has not been sent."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from ...flat.segments import BLOCK, block_maxima, chunks

__all__ = ["Momentum", "accumulate", "advance"]


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
    old: Tensor,
    new: Tensor,
    u: Tensor | None,
    g: Tensor | None,
    maxima: Tensor,
    rule: Momentum | None,
    scale: float = 1.0,
    commit: bool = False,
) -> None:
    """new <- old + what g adds to v; its block maxima.

    All are flat and begin on a block boundary. `old` and `new` may be one; `maxima` has an element per block of 64,
    of their dtype. g is taken in float32 at least and multiplied by `scale` first; None counts as zero. Without a rule,
    or with momentum 0, g itself is added. With `commit` u becomes u' and g zero, else both stay.
    """
    for span in chunks(0, len(new), new.device):
        x = _scaled(g, span, old, scale)
        increment = x if rule is None or rule.momentum == 0 else _increment(x, u, span, rule, commit)
        torch.add(old[span], increment, out=new[span])
        whole = span.stop - span.stop % BLOCK
        first, last = span.start // BLOCK, whole // BLOCK
        block_maxima(new[span.start : whole], out=maxima[first:last])
        if whole < span.stop:
            maxima[last:] = block_maxima(torch.nn.functional.pad(new[whole : span.stop], (0, BLOCK - len(new) % BLOCK)))
        if commit and g is not None:
            g[span].zero_()


def advance(u: Tensor, g: Tensor | None, rule: Momentum, scale: float = 1.0) -> None:
    """u <- u', and g <- 0: what `accumulate` leaves to do without `commit`. Only where momentum is not 0."""
    for span in chunks(0, len(u), u.device):
        rule.of(_scaled(g, span, u, scale), u[span], out=u[span])
        if g is not None:
            g[span].zero_()


def _scaled(g: Tensor | None, span: slice, like: Tensor, scale: float) -> Tensor:
    """In float32 at least."""
    dtype = torch.promote_types(like.dtype if g is None else g.dtype, torch.float32)
    if g is None:
        return like.new_zeros((), dtype=dtype).expand(span.stop - span.start)
    x = g[span].to(dtype)
    return x if scale == 1 else x * scale


def _increment(x: Tensor, u: Tensor | None, span: slice, rule: Momentum, commit: bool) -> Tensor:
    assert u is not None
    rounds = commit and torch.promote_types(x.dtype, u.dtype) != u.dtype
    after = rule.of(x, u[span], out=u[span] if commit and not rounds else None)
    if rounds:  # u, but not what it adds to v
        u[span] = after
    return torch.add(x, after, alpha=rule.momentum) if rule.nesterov else after
