"""Scaled copies of gradients, and their largest magnitudes."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from ..blocks import bits_of, chunks

__all__ = ["copy_scaled", "peaks"]


def copy_scaled(grads: Sequence[Tensor], outs: Sequence[Tensor], scale: float) -> Tensor:
    """Every out <- scale g, rounded once, and zero behind it; all are flat.

    Returns the largest magnitude of each g, in float32 at least: NaN if it holds one. Shape `[len(grads)]`.
    """
    peaks = []
    for g, out in zip(grads, outs, strict=True):
        tops = [bits_of(g.new_zeros(()))]
        for span in chunks(0, len(g), g.device):
            bits = bits_of(g[span])
            tops.append((bits & torch.iinfo(bits.dtype).max).amax())
            torch.mul(g[span], scale, out=out[span])
        out[len(g) :].zero_()
        peaks.append(torch.stack(tops).amax().view(g.dtype))
    return torch.stack(peaks).to(torch.promote_types(peaks[0].dtype, torch.float32))


def peaks(tensors: Sequence[Tensor]) -> Tensor:
    """The largest magnitude of each tensor, in float32 at least: NaN if it holds one. Shape `[len(tensors)]`.

    Tensors are of one dtype and device, and of any shape.
    """
    ends = [end for x in tensors for end in (x.aminmax() if x.numel() else (x.new_zeros(()), x.new_zeros(())))]
    magnitudes = torch.stack(ends).abs().view(-1, 2)
    return magnitudes.amax(1).to(torch.promote_types(magnitudes.dtype, torch.float32))
