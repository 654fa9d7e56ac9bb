"""The inner loops in torch: what every other implementation must equal bit for bit; they run everywhere."""

from .blocks import LARGEST, Put, by_block, finite, put, sum_of_blocks, tensor_sums
from .chunks import Chunks, select_chunks
from .coordinates import clear_at, gather, positions_above, subtract_at
from .copying import copy_scaled
from .memory import Momentum, accumulate, ahead, decay, look
from .minmax import minmax_codes, minmax_ends, put_minmax
from .packing import pack, pack_small, unpack, unpack_small
from .rice import rice_measure, rice_pack, rice_unpack
from .rounding import (
    block_squares,
    draws,
    finite_maxima,
    halves,
    put_levels,
    put_powers,
    round_levels,
    round_powers,
    round_trits,
    tensor_maxima,
)
from .selection import Groups, block_maxima, candidate_blocks, select
from .signs import majority, pack_signs, put_signs, split_signs
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
    "ahead",
    "block_maxima",
    "block_squares",
    "by_block",
    "candidate_blocks",
    "clear_at",
    "copy_scaled",
    "decay",
    "draws",
    "finite",
    "finite_maxima",
    "gather",
    "halves",
    "in_blocks",
    "look",
    "majority",
    "minmax_codes",
    "minmax_ends",
    "nearest_levels",
    "of_levels",
    "of_steps",
    "pack",
    "pack_signs",
    "pack_small",
    "pack_trits",
    "positions_above",
    "put",
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
    "sum_of_blocks",
    "sums_above",
    "tensor_maxima",
    "tensor_sums",
    "unpack",
    "unpack_small",
    "unpack_trits",
]
