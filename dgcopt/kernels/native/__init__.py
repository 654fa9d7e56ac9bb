"""The inner loops in C, for a CPU; library.py says when they are used."""

from .blocks import tensor_sums
from .chunks import select_chunks
from .coordinates import clear_at, gather, positions_above, subtract_at
from .copying import copy_scaled, takes_copies
from .library import instructions, takes_flat, takes_float32, takes_floats
from .memory import accumulate, ahead, decay, look
from .minmax import minmax_codes, minmax_ends, put_minmax
from .packing import pack_small, unpack_small
from .rice import rice_measure, rice_pack, rice_unpack
from .rounding import (
    block_squares,
    finite_maxima,
    put_levels,
    put_powers,
    round_levels,
    round_powers,
    round_trits,
    tensor_maxima,
)
from .selection import block_maxima, candidate_blocks, select
from .signs import majority, pack_signs, put_signs, split_signs
from .trits import pack_trits, put_trits, unpack_trits
from .values import nearest_levels, of_levels, of_steps, round_steps, sums_above

__all__ = [
    "accumulate",
    "ahead",
    "block_maxima",
    "block_squares",
    "candidate_blocks",
    "clear_at",
    "copy_scaled",
    "decay",
    "finite_maxima",
    "gather",
    "instructions",
    "look",
    "majority",
    "minmax_codes",
    "minmax_ends",
    "nearest_levels",
    "of_levels",
    "of_steps",
    "pack_signs",
    "pack_small",
    "pack_trits",
    "positions_above",
    "put_levels",
    "put_minmax",
    "put_powers",
    "put_signs",
    "put_trits",
    "rice_measure",
    "rice_pack",
    "rice_unpack",
    "round_levels",
    "round_powers",
    "round_steps",
    "round_trits",
    "select",
    "select_chunks",
    "split_signs",
    "subtract_at",
    "sums_above",
    "takes_copies",
    "takes_flat",
    "takes_float32",
    "takes_floats",
    "tensor_maxima",
    "tensor_sums",
    "unpack_small",
    "unpack_trits",
]
