"""The inner loops in torch: what every other implementation must equal bit for bit; they run everywhere."""

from .memory import Momentum, accumulate, advance
from .packing import pack, pack_small, unpack, unpack_small
from .rice import rice_measure, rice_pack, rice_unpack
from .selection import Groups, select

__all__ = [
    "Groups",
    "Momentum",
    "accumulate",
    "advance",
    "pack",
    "pack_small",
    "rice_measure",
    "rice_pack",
    "rice_unpack",
    "select",
    "unpack",
    "unpack_small",
]
