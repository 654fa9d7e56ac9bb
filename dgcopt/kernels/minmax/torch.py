"""256 levels between the smallest and the largest value of a row."""

from __future__ import annotations

import torch
from torch import Tensor

from ..floats import Put, finite, put
from ..memory.torch import mix
from ..parts import Mixture

__all__ = ["minmax_codes", "minmax_ends", "minmax_of_mean", "put_minmax"]

_TOP = 255
_EPSILON = 1e-7
_MOST = 2.0**127


def minmax_ends(rows: Tensor, mixture: Mixture | None = None) -> Tensor:
    """The smallest and the largest of each row of values, float32 `[rows, 2]`.

    NaN and Inf count as zero, -0 is written as 0. If there is a mixture, rows become that before, as one flat tensor;
    they must lie one behind the other.
    """
    if mixture is not None:
        mix(rows.view(-1), mixture)
    return torch.stack(finite(rows).aminmax(dim=1), 1) + 0.0


def minmax_codes(rows: Tensor, ends: Tensor, codes: Tensor) -> None:
    """Write the level of each value, uint8, into the rows of `codes`; see `dgcopt.coding.minmax`."""
    scale, upper = _levels(ends)
    levels = (finite(rows) * scale).round_().minimum(upper) - (upper - _TOP)
    codes.copy_(levels.clamp_(0, _TOP))


def put_minmax(codes: Tensor, ends: Tensor, out: Tensor, how: Put, mixture: Mixture | None = None) -> None:
    """Let the values that flat `codes` between two ends stand for take effect on `out`.

    If there is a mixture, `out` becomes that after it.
    """
    (scale,), (upper,) = _levels(ends.unsqueeze(0))
    put((codes.float() + (upper - _TOP)) / scale, out, how)
    if mixture is not None:
        mix(out, mixture)


def minmax_of_mean(codes: Tensor, ends: Tensor, divisor: int, out: Tensor) -> Tensor:
    """Sum the decoded rows of `codes` in order, over `divisor`; return the ends, and write the sum's codes to `out`."""
    mean = torch.empty(len(out), dtype=torch.float32, device=out.device)
    for rank, (theirs, of) in enumerate(zip(codes, ends, strict=True)):
        put_minmax(theirs, of, mean, "add" if rank else "set")
    rows = mean.div_(divisor).unsqueeze(0)
    ends = minmax_ends(rows)
    minmax_codes(rows, ends, out.unsqueeze(0))
    return ends[0]


def _levels(ends: Tensor) -> tuple[Tensor, Tensor]:
    """Return the factor of each row's values, and its highest level. The largest value times the factor is finite."""
    low, high = ends.split(1, dim=1)
    scale = torch.full_like(high, _TOP) / (high - low + _EPSILON)  # a number over a tensor is rounded twice
    scale = scale.minimum(torch.full_like(high, _MOST) / low.abs().maximum(high.abs()))
    return scale, (high * scale).round()
