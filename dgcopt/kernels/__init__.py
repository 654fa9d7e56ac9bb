"""The inner loops of compression: what passes over as many elements as there are parameters.

Each has one signature and several implementations that give the same bits: torch/ is the specification, and runs
everywhere; native/ is C for the CPU. Files are named after what they do: memory, selection, packing, rice.
"""

from . import native, torch
from .kernel import Kernel
from .native import instructions, takes_flat, takes_floats
from .torch import Groups, Momentum

__all__ = [
    "Groups",
    "Kernel",
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

accumulate = Kernel(torch.accumulate, (takes_floats, native.accumulate))
advance = Kernel(torch.advance, (takes_floats, native.advance))
select = Kernel(torch.select, (takes_floats, native.select))
pack_small = Kernel(torch.pack_small, (takes_flat, native.pack_small))
unpack_small = Kernel(torch.unpack_small, (takes_flat, native.unpack_small))
rice_measure = Kernel(torch.rice_measure, (takes_flat, native.rice_measure))
rice_pack = Kernel(torch.rice_pack, (takes_flat, native.rice_pack))
rice_unpack = Kernel(torch.rice_unpack, (takes_flat, native.rice_unpack))
