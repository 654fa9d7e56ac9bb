"""Adasum (Maleki et al., "Scaling Distributed Training with Adaptive Summation", MLSys 2021, arXiv:2006.02924)."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from ...collectives import AllReduce, Exchange, SendRecv
from ...errors import ConfigError
from ...flat.gradient import rounded
from ...kernels import peaks
from ..base import Compressor
from ..context import Context
from ..dense import NoCompression
from .base import Wrapper

__all__ = ["Adasum"]


@dataclass(eq=False)
class Adasum(Compressor):
    """Combines the updates of all ranks: orthogonal ones are summed, parallel ones are averaged.

    For two updates a and b of a parameter (section 3.1):

        Adasum(a, b) = (1 - a.b / 2|a|^2) a + (1 - a.b / 2|b|^2) b

    and for 2^n ranks recursively, neighbours first. It combines the updates that the wrapped optimizer makes from each
    rank's own gradient, so the learning rate needs no scaling with the world size.

    Args:
        dtype: float16 or bfloat16 on the wire, or None for the gradient's dtype.

    Costs log2(N) rounds of one bucket each and an allreduce of 4N bytes, by which all ranks abort the step if NaN or
    Inf has arrived on one. No overlap with backward. Raises ConfigError if the world size is not a power of two.
    """

    dtype: torch.dtype | None = None
    source = "update"

    @classmethod
    def carrying(cls, compressor: Compressor) -> Adasum:
        """Return Adasum in the wire dtype of `compressor`. Raises ConfigError for compressors that are not dense."""
        dtype = getattr(compressor, "dtype", None)  # of FP16 and BF16
        if isinstance(compressor, Wrapper) and dtype is not None and isinstance(compressor.inner, NoCompression):
            return cls(dtype)
        if isinstance(compressor, cls):
            return compressor
        if not isinstance(compressor, NoCompression):
            raise ConfigError(
                f"op Adasum combines whole updates and cannot carry {compressor!r}: use no compression, FP16 or BF16"
            )
        return cls()

    def exchange(self, grad: Tensor, ctx: Context) -> Exchange:
        if ctx.size & (ctx.size - 1):
            raise ConfigError(f"Adasum needs a number of ranks that is a power of two, not {ctx.size}")
        distance = 1
        damaged = torch.full((ctx.size,), torch.inf, device=grad.device)  # by sender: the distance it was noticed at
        while distance < ctx.size:
            neighbour = ctx.rank ^ distance
            mine = rounded(grad, self.dtype or grad.dtype)
            theirs = yield SendRecv(mine, to=neighbour, source=neighbour)
            damaged[neighbour] = torch.where(peaks([theirs])[0].isfinite(), torch.inf, distance)
            # same rounding and order on both ranks, for the same bits
            pair = (mine.to(grad.dtype), theirs.to(grad.dtype))
            a, b = pair if ctx.rank < neighbour else pair[::-1]
            for segment in ctx.segments:
                span = slice(segment.start, segment.stop)
                grad[span] = adasum(a[span], b[span])
            distance *= 2
        if ctx.size > 1:
            damaged = yield AllReduce(damaged, op="min")
            # later rounds pass NaN on: name only its first senders
            is_first = damaged.isfinite() & (damaged == damaged.amin())
            marks = torch.where(is_first | damaged.isnan(), torch.nan, 0.0)
            ctx.checks.check_finite(marks, marks.unsqueeze(1))
        return grad


def adasum(a: Tensor, b: Tensor) -> Tensor:
    """Return the formula above for two vectors; if one is zero, the other."""
    x, y = a.double(), b.double()
    dot, aa, bb = x.dot(y), x.dot(x), y.dot(y)
    left = torch.where(aa > 0, 1 - dot / (2 * aa), 1.0)
    right = torch.where(bb > 0, 1 - dot / (2 * bb), 1.0)
    return rounded(left * x + right * y, a.dtype)
