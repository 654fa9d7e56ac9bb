"""Signs, one bit each: 1 for values below zero."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from ..blocks import BLOCK
from ..floats import Put, finite, put
from ..memory.torch import mix
from ..packing.torch import pack_small, unpack_small
from ..parts import Mixture
from ..reductions.torch import by_block, sum_of_rows

__all__ = ["mix_signs", "pack_signs", "put_signs", "split_signs", "split_sum", "split_sum_of_signs"]


def pack_signs(values: Tensor, zero_is_minus: bool = False) -> Tensor:
    """The signs of flat values as uint8, eight in a byte. NaN counts as above zero, and zero too unless told."""
    minus = values < 0
    return pack_small((minus | (values == 0) if zero_is_minus else minus).to(torch.uint8), 1)


def mix_signs(x: Tensor, keep: float, y: Tensor, add: float, out: Tensor, zero_is_minus: bool = False) -> Tensor:
    """`pack_signs` of keep * x + add * y, which it writes to `out`."""
    torch.mul(x, keep, out=out).add_(y, alpha=add)
    return pack_signs(out, zero_is_minus)


def split_signs(values: Tensor) -> tuple[Tensor, Tensor]:
    """The signs of values, whole blocks of them; and float32 `[3, blocks]`: the sum of those above zero, the sum of
    the magnitudes of those below, and how many are below. NaN and Inf count as zero."""
    v = finite(values)
    minus, sizes = v < 0, v.abs()
    parts = (torch.where(minus, 0, sizes), torch.where(minus, sizes, 0), minus.float())
    return pack_small(minus.to(torch.uint8), 1), torch.stack([sum_of_rows(part.view(-1, BLOCK)) for part in parts])


def split_sum(x: Tensor, y: Tensor, out: Tensor, mixture: Mixture | None = None) -> tuple[Tensor, Tensor]:
    """`split_signs` of x + y, which it writes to `out`. If there is a mixture, x becomes that before."""
    if mixture is not None:
        mix(x, mixture)
    return split_signs(torch.add(x, y, out=out))


def split_sum_of_signs(
    base: Tensor, packed: Sequence[Tensor], scales: Tensor, place: Tensor, lengths: Tensor, out: Tensor
) -> tuple[Tensor, Tensor]:
    """Write `base` plus several ranks' decoded signs, in their order, to `out`, and return its `split_signs`.

    In block b those of rank r stand for plus or minus `scales[r, place[b]]`. Only the first `lengths[b]` elements of a
    block count; the others become zero.
    """
    out.copy_(base)
    for signs, magnitudes in zip(packed, scales, strict=True):
        put_signs(signs, magnitudes, magnitudes, place, out, "add")
    out.view(-1, BLOCK)[torch.arange(BLOCK, device=out.device) >= lengths.unsqueeze(1)] = 0
    return split_signs(out)


def put_signs(
    packed: Tensor,
    above: Tensor,
    below: Tensor,
    place: Tensor,
    out: Tensor,
    how: Put,
    mixture: Mixture | None = None,
) -> None:
    """Combine `above[place[b]]` with elements of `out` that are plus in block b, and `-below[place[b]]` with others.

    If there is a mixture, `out` becomes that after it.
    """
    minus = unpack_small(packed, len(out), 1).bool()
    put(torch.where(minus, -by_block(below, place), by_block(above, place)), out, how)
    if mixture is not None:
        mix(out, mixture)
