"""The inner loops in torch: what every other implementation must equal bit for bit; they run everywhere."""

from .blocks import LARGEST, Put, add_up, finite, put, spread, sum_of_blocks
from .chunks import Chunks, select_chunks
from .coordinates import clear_at, gather, positions_reaching, subtract_at
from .copying import copy_scaled
from .memory import Momentum, accumulate, ahead, decay, look
from .minmax import minmax_codes, minmax_ends, put_minmax
from .packing import pack, pack_small, unpack, unpack_small
from .rice import rice_measure, rice_pack, rice_unpack
from .rounding import (
    draws,
    halves,
    largest,
    most_of,
    put_levels,
    put_powers,
    round_levels,
    round_powers,
    round_trits,
    squares,
)
from .selection import Groups, block_maxima, reaching, select
from .signs import majority, pack_signs, put_signs, split
from .trits import PER_BYTE, pack_trits, put_trits, unpack_trits
from .values import in_blocks, nearest_levels, of_levels, of_steps, round_steps, sums_above

__all__ = [
    "LARGEST",
    "PER_BYTE",
    "Chunks",
    "Groups",
    "Momentum",
    "Put",
    "accumulate",
    "add_up",
    "ahead",
    "block_maxima",
    "clear_at",
    "copy_scaled",
    "decay",
    "draws",
    "finite",
    "gather",
    "halves",
    "in_blocks",
    "largest",
    "look",
    "majority",
    "minmax_codes",
    "minmax_ends",
    "most_of",
    "nearest_levels",
    "of_levels",
    "of_steps",
    "pack",
    "pack_signs",
    "pack_small",
    "pack_trits",
    "positions_reaching",
    "put",
    "put_levels",
    "put_minmax",
    "put_powers",
    "put_signs",
    "put_trits",
    "reaching",
    "rice_measure",
    "rice_pack",
    "rice_unpack",
    "round_levels",
    "round_powers",
    "round_steps",
    "round_trits",
    "select",
    "select_chunks",
    "split",
    "spread",
    "squares",
    "subtract_at",
    "sum_of_blocks",
    "sums_above",
    "unpack",
    "unpack_small",
    "unpack_trits",
]
