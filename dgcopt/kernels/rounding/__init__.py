"""Unbiased stochastic rounding to levels (QSGD), powers of two (natural compression) and trits (TernGrad)."""

from ..kernel import Kernel
from . import native, torch
from .torch import PER_BYTE

__all__ = [
    "PER_BYTE",
    "majority",
    "put_levels",
    "put_powers",
    "put_trits",
    "round_levels",
    "round_powers",
    "round_trits",
]

majority = Kernel(torch.majority, native.majority)
put_levels = Kernel(torch.put_levels, native.put_levels)
put_powers = Kernel(torch.put_powers, native.put_powers)
put_trits = Kernel(torch.put_trits, native.put_trits)
round_levels = Kernel(torch.round_levels, native.round_levels)
round_powers = Kernel(torch.round_powers, native.round_powers)
round_trits = Kernel(torch.round_trits, native.round_trits)
