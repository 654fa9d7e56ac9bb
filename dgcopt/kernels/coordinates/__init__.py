"""Reads and writes of flat tensors at selected positions, and the ranks that own the positions."""

from ..kernel import HALVES, Kernel
from . import native, torch
from .torch import owner_of, position_of

__all__ = [
    "add_at",
    "by_owner",
    "clear_at",
    "gather",
    "of_owners",
    "owner_of",
    "position_of",
    "step_at",
    "subtract_at",
]

add_at = Kernel(torch.add_at, native.add_at)
by_owner = Kernel(torch.by_owner, native.by_owner)
clear_at = Kernel(torch.clear_at, native.clear_at, floats=HALVES)
gather = Kernel(torch.gather, native.gather, floats=HALVES)
of_owners = Kernel(torch.of_owners, native.of_owners, operands=lambda places, *_: [places])  # counts are on the CPU
step_at = Kernel(torch.step_at, native.step_at)
subtract_at = Kernel(torch.subtract_at, native.subtract_at, floats=HALVES)
