"""The inner loops of compression: what passes over as many elements as there are parameters.

Each has one signature and several implementations that give the same bits: torch/ is the specification, and runs
everywhere; native/ is C for the CPU. Files are named after what they do: memory, selection, packing, rice, signs,
trits; blocks is what those have in common that quantise.
"""

from . import native, torch
from .kernel import Kernel
from .native import instructions, takes_flat, takes_float32, takes_floats
from .torch import LARGEST, PER_BYTE, Groups, Momentum, Put, finite, put, spread

__all__ = [
    "LARGEST",
    "PER_BYTE",
    "Groups",
    "Kernel",
    "Momentum",
    "Put",
    "accumulate",
    "add_up",
    "advance",
    "finite",
    "instructions",
    "majority",
    "pack_signs",
    "pack_small",
    "pack_trits",
    "put",
    "put_signs",
    "put_trits",
    "rice_measure",
    "rice_pack",
    "rice_unpack",
    "select",
    "split",
    "spread",
    "unpack_small",
    "unpack_trits",
]

accumulate = Kernel(torch.accumulate, (takes_floats, native.accumulate))
advance = Kernel(torch.advance, (takes_floats, native.advance))
select = Kernel(torch.select, (takes_floats, native.select))
pack_small = Kernel(torch.pack_small, (takes_flat, native.pack_small))
unpack_small = Kernel(torch.unpack_small, (takes_flat, native.unpack_small))
rice_measure = Kernel(torch.rice_measure, (takes_flat, native.rice_measure))
rice_pack = Kernel(torch.rice_pack, (takes_flat, native.rice_pack))
rice_unpack = Kernel(torch.rice_unpack, (takes_flat, native.rice_unpack))
add_up = Kernel(torch.add_up, (takes_float32, native.add_up))
pack_signs = Kernel(torch.pack_signs, (takes_float32, native.pack_signs))
split = Kernel(torch.split, (takes_float32, native.split))
put_signs = Kernel(torch.put_signs, (takes_float32, native.put_signs))
majority = Kernel(torch.majority, (takes_flat, native.majority))
pack_trits = Kernel(torch.pack_trits, (takes_flat, native.pack_trits))
unpack_trits = Kernel(torch.unpack_trits, (takes_flat, native.unpack_trits))
put_trits = Kernel(torch.put_trits, (takes_float32, native.put_trits))
