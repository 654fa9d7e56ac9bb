"""The inner loops in C, for a CPU; library.py says when they are used."""

from .library import instructions, takes_flat, takes_floats
from .memory import accumulate, advance
from .packing import pack_small, unpack_small
from .rice import rice_measure, rice_pack, rice_unpack
from .selection import select

__all__ = [
    "accumulate",
    "advance",
    "instructions",
    "pack_small",
    "rice_measure",
    "rice_pack",
    "rice_unpack",
    "select",
    "takes_flat",
    "takes_floats",
    "unpack_small",
]
