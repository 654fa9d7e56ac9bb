"""The inner loops of compression: what passes over as many elements as there are parameters.

Each has one signature and several implementations that give the same bits: torch.py is the specification, and runs
everywhere; native.py is C for the CPU.
"""

from __future__ import annotations

from torch import Tensor

from . import native
from . import torch as specification
from .native import instructions
from .torch import Groups, Momentum

__all__ = [
    "Groups",
    "Momentum",
    "accumulate",
    "advance",
    "instructions",
    "pack_small",
    "rice_measure",
    "rice_pack",
    "rice_unpack",
    "select",
    "unpack_small",
]


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
    """Add a gradient to what has not been sent, with momentum correction; see `dgcopt.kernels.torch.accumulate`."""
    of = native if native.takes_memory(new, g) else specification
    of.accumulate(old, new, u, g, maxima, rule, scale, commit)


def advance(u: Tensor, g: Tensor | None, rule: Momentum, scale: float = 1.0) -> None:
    """Take a gradient into the momentum; see `dgcopt.kernels.torch.advance`."""
    of = native if native.takes_memory(u, g) else specification
    of.advance(u, g, rule, scale)


def select(flat: Tensor, maxima: Tensor, groups: Groups) -> Tensor:
    """The largest magnitudes of each group, exactly; see `dgcopt.kernels.torch.select`."""
    of = native if native.takes_selection(flat) else specification
    return of.select(flat, maxima, groups)


def pack_small(fields: Tensor, width: int) -> Tensor:
    """uint8 fields of a few bits side by side; see `dgcopt.kernels.torch.pack_small`."""
    return (native if native.takes_bytes(fields) else specification).pack_small(fields, width)


def unpack_small(packed: Tensor, count: int, width: int) -> Tensor:
    """What `pack_small` was given."""
    return (native if native.takes_bytes(packed) else specification).unpack_small(packed, count, width)


def rice_measure(indices: Tensor, b: int) -> tuple[int, int]:
    """What decides whether Rice codes fit; see `dgcopt.kernels.torch.rice_measure`."""
    return (native if native.takes_bytes(indices) else specification).rice_measure(indices, b)


def rice_pack(indices: Tensor, b: int, nbytes: int) -> Tensor:
    """Rice codes of ascending indices; see `dgcopt.kernels.torch.rice_pack`."""
    return (native if native.takes_bytes(indices) else specification).rice_pack(indices, b, nbytes)


def rice_unpack(packed: Tensor, count: int, b: int, numel: int) -> Tensor | None:
    """What `rice_pack` was given; None if the message is damaged."""
    return (native if native.takes_bytes(packed) else specification).rice_unpack(packed, count, b, numel)
