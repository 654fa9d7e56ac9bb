"""Weighted sums, in C."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor
from torch.autograd.graph import increment_version

from .library import Float, Length, Pointer, check_flat, function, shared, takes_float32

__all__ = ["mix", "takes_parts", "unmix"]


def takes_parts(flat: Tensor, keep: float, starts: Sequence[int], parts: Sequence[Tensor], add: float) -> bool:
    """Whether loops can run over all of these tensors."""
    return takes_float32(flat, *parts)


def mix(flat: Tensor, keep: float, starts: Sequence[int], parts: Sequence[Tensor], add: float) -> None:
    """See `dgcopt.kernels.torch.mix`."""
    _run("mix", flat, keep, starts, parts, add)


def unmix(flat: Tensor, keep: float, starts: Sequence[int], parts: Sequence[Tensor], add: float) -> None:
    """See `dgcopt.kernels.torch.unmix`."""
    _run("unmix", flat, keep, starts, parts, add)


def _run(name: str, flat: Tensor, keep: float, starts: Sequence[int], parts: Sequence[Tensor], add: float) -> None:
    check_flat(len(flat), flat, dtype=torch.float32)
    rows = []
    for start, part in zip(starts, parts, strict=True):
        length = part.numel()
        check_flat(length, part, dtype=torch.float32)
        if not 0 <= start <= len(flat) - length:
            raise ValueError(f"{length} elements from {start} on are not among the {len(flat)} that there are")
        rows.append((part.data_ptr(), start, length))
    table = torch.tensor(rows, dtype=torch.int64)
    loop = function(name, Pointer, Float, Pointer, Length, Float, Length, Length)

    def span(start: int, stop: int) -> None:
        loop(flat.data_ptr(), keep, table.data_ptr(), len(rows), add, start, stop)

    shared(span, len(flat))
    increment_version(flat)
