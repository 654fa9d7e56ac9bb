"""The inner loops of compression: operations on as many elements as the model has parameters.

Each has one signature and several implementations that give the same bits: torch/ is the specification, and runs
everywhere; native/ is C for the CPU; triton/ is for CUDA. Files are named after their operations:
copying, memory, mixing, residual, selection, threshold, chunks, dct, drawing, hashing, products, owners, packing, rice,
minmax, rounding, signs, trits, values; sums is common to the quantisers.
"""

from . import native, torch
from .blocks import BLOCK, CHUNK, bits_of, chunks, is_dense
from .cuda import (
    has_triton,
    in_triton,
    takes_cuda,
    takes_cuda_chunks,
    takes_cuda_dense,
    takes_cuda_of_rows,
    takes_cuda_pairs,
    takes_cuda_parts,
    takes_cuda_rows,
)
from .kernel import Kernel
from .native import in_use, instructions, takes_flat, takes_float32, takes_floats
from .parts import Mixture, Parts
from .rows import by_row, firsts, sent
from .torch import (
    LARGEST,
    PER_BYTE,
    SPAN,
    Chunks,
    Groups,
    Matrices,
    Momentum,
    Put,
    by_block,
    draws,
    finite,
    in_blocks,
    owner_of,
    position_of,
    put,
)

__all__ = [
    "BLOCK",
    "CHUNK",
    "LARGEST",
    "PER_BYTE",
    "SPAN",
    "Chunks",
    "Groups",
    "Kernel",
    "Matrices",
    "Mixture",
    "Momentum",
    "Parts",
    "Put",
    "accumulate",
    "add_and_maxima",
    "add_and_norms",
    "add_and_select_above",
    "add_and_select_chunks",
    "add_at",
    "bits_of",
    "block_maxima",
    "by_block",
    "by_owner",
    "by_row",
    "chunks",
    "clear_at",
    "copy_scaled",
    "dct",
    "decay",
    "draw_from_spans",
    "draws",
    "finite",
    "firsts",
    "gather",
    "has_triton",
    "hash_of",
    "in_blocks",
    "in_use",
    "instructions",
    "inverse_dct",
    "is_dense",
    "largest_first",
    "majority",
    "means",
    "minmax_codes",
    "minmax_ends",
    "minmax_of_mean",
    "mix",
    "mix_signs",
    "nearest_levels",
    "of_levels",
    "of_owners",
    "of_steps",
    "owner_of",
    "pack_signs",
    "pack_small",
    "peaks",
    "position_of",
    "preview_block_maxima",
    "preview_blocks",
    "put",
    "put_levels",
    "put_minmax",
    "put_powers",
    "put_product",
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
    "select_above",
    "select_ahead",
    "select_chunks",
    "sent",
    "split_signs",
    "split_sum",
    "split_sum_of_signs",
    "step_at",
    "subtract_at",
    "tensor_norms",
    "tensor_sums",
    "unpack_small",
    "update_momentum",
]

accumulate = Kernel(torch.accumulate, (takes_floats, native.accumulate), in_triton(torch.accumulate, takes_cuda))
decay = Kernel(torch.decay, (native.takes_decay, native.decay), in_triton(torch.decay, takes_cuda_pairs))
mix = Kernel(torch.mix, (takes_float32, native.mix), in_triton(torch.mix))
mix_signs = Kernel(torch.mix_signs, (takes_float32, native.mix_signs), in_triton(torch.mix_signs))
preview_block_maxima = Kernel(
    torch.preview_block_maxima,
    (takes_floats, native.preview_block_maxima),
    in_triton(torch.preview_block_maxima, takes_cuda),
)
update_momentum = Kernel(
    torch.update_momentum, (takes_floats, native.update_momentum), in_triton(torch.update_momentum, takes_cuda)
)
preview_blocks = Kernel(
    torch.preview_blocks, (takes_floats, native.preview_blocks), in_triton(torch.preview_blocks, takes_cuda)
)
block_maxima = Kernel(
    torch.block_maxima, (takes_floats, native.block_maxima), in_triton(torch.block_maxima, takes_cuda)
)
gather = Kernel(torch.gather, (takes_floats, native.gather), in_triton(torch.gather, takes_cuda))
subtract_at = Kernel(torch.subtract_at, (takes_floats, native.subtract_at), in_triton(torch.subtract_at, takes_cuda))
copy_scaled = Kernel(
    torch.copy_scaled, (native.takes_copies, native.copy_scaled), in_triton(torch.copy_scaled, takes_cuda_pairs)
)
add_at = Kernel(torch.add_at, (takes_float32, native.add_at), in_triton(torch.add_at, takes_cuda_parts))
step_at = Kernel(torch.step_at, (takes_float32, native.step_at), in_triton(torch.step_at, takes_cuda_parts))
add_and_maxima = Kernel(torch.add_and_maxima, (takes_float32, native.add_and_maxima), in_triton(torch.add_and_maxima))
add_and_norms = Kernel(torch.add_and_norms, (takes_float32, native.add_and_norms), in_triton(torch.add_and_norms))
dct = Kernel(torch.dct, (takes_float32, native.dct), in_triton(torch.dct))
draw_from_spans = Kernel(
    torch.draw_from_spans, (takes_flat, native.draw_from_spans), in_triton(torch.draw_from_spans, takes_cuda)
)
put_product = Kernel(torch.put_product, (takes_float32, native.put_product), in_triton(torch.put_product))
hash_of = Kernel(torch.hash_of, (takes_flat, native.hash_of))
inverse_dct = Kernel(torch.inverse_dct, (takes_float32, native.inverse_dct), in_triton(torch.inverse_dct))
peaks = Kernel(torch.peaks, (native.takes_dense, native.peaks), in_triton(torch.peaks, takes_cuda_dense))
clear_at = Kernel(torch.clear_at, (takes_floats, native.clear_at), in_triton(torch.clear_at, takes_cuda))
add_and_select_above = Kernel(
    torch.add_and_select_above, (takes_float32, native.add_and_select_above), in_triton(torch.add_and_select_above)
)
select_above = Kernel(torch.select_above, (takes_float32, native.select_above), in_triton(torch.select_above))
select = Kernel(torch.select, (takes_floats, native.select), in_triton(torch.select, takes_cuda))
select_ahead = Kernel(
    torch.select_ahead, (takes_floats, native.select_ahead), in_triton(torch.select_ahead, takes_cuda)
)
largest_first = Kernel(torch.largest_first, (takes_flat, native.largest_first))
pack_small = Kernel(torch.pack_small, (takes_flat, native.pack_small), in_triton(torch.pack_small, takes_cuda))
unpack_small = Kernel(torch.unpack_small, (takes_flat, native.unpack_small), in_triton(torch.unpack_small, takes_cuda))
by_owner = Kernel(torch.by_owner, (takes_flat, native.by_owner), in_triton(torch.by_owner, takes_cuda))
of_owners = Kernel(torch.of_owners, (takes_flat, native.of_owners), in_triton(torch.of_owners, takes_cuda_of_rows))
rice_measure = Kernel(torch.rice_measure, (takes_flat, native.rice_measure), in_triton(torch.rice_measure, takes_cuda))
rice_pack = Kernel(torch.rice_pack, (takes_flat, native.rice_pack), in_triton(torch.rice_pack, takes_cuda))
rice_unpack = Kernel(torch.rice_unpack, (takes_flat, native.rice_unpack), in_triton(torch.rice_unpack, takes_cuda))
tensor_norms = Kernel(torch.tensor_norms, (takes_float32, native.tensor_norms), in_triton(torch.tensor_norms))
tensor_sums = Kernel(torch.tensor_sums, (takes_float32, native.tensor_sums), in_triton(torch.tensor_sums))
minmax_codes = Kernel(
    torch.minmax_codes, (native.takes_rows, native.minmax_codes), in_triton(torch.minmax_codes, takes_cuda_rows)
)
minmax_ends = Kernel(
    torch.minmax_ends, (native.takes_rows, native.minmax_ends), in_triton(torch.minmax_ends, takes_cuda_rows)
)
minmax_of_mean = Kernel(
    torch.minmax_of_mean, (native.takes_rows, native.minmax_of_mean), in_triton(torch.minmax_of_mean, takes_cuda_rows)
)
put_minmax = Kernel(torch.put_minmax, (takes_float32, native.put_minmax), in_triton(torch.put_minmax))
add_and_select_chunks = Kernel(
    torch.add_and_select_chunks,
    (takes_float32, native.add_and_select_chunks),
    in_triton(torch.add_and_select_chunks, takes_cuda_chunks),
)
select_chunks = Kernel(
    torch.select_chunks, (takes_floats, native.select_chunks), in_triton(torch.select_chunks, takes_cuda_chunks)
)
nearest_levels = Kernel(torch.nearest_levels, (takes_float32, native.nearest_levels), in_triton(torch.nearest_levels))
of_levels = Kernel(torch.of_levels, (takes_float32, native.of_levels), in_triton(torch.of_levels))
of_steps = Kernel(torch.of_steps, (takes_float32, native.of_steps), in_triton(torch.of_steps))
round_steps = Kernel(torch.round_steps, (takes_float32, native.round_steps), in_triton(torch.round_steps))
means = Kernel(torch.means, (takes_float32, native.means), in_triton(torch.means))
pack_signs = Kernel(torch.pack_signs, (takes_float32, native.pack_signs), in_triton(torch.pack_signs))
split_signs = Kernel(torch.split_signs, (takes_float32, native.split_signs), in_triton(torch.split_signs))
split_sum = Kernel(torch.split_sum, (takes_float32, native.split_sum), in_triton(torch.split_sum))
split_sum_of_signs = Kernel(
    torch.split_sum_of_signs, (native.takes_signs, native.split_sum_of_signs), in_triton(torch.split_sum_of_signs)
)
put_signs = Kernel(torch.put_signs, (takes_float32, native.put_signs), in_triton(torch.put_signs))
put_levels = Kernel(torch.put_levels, (takes_float32, native.put_levels), in_triton(torch.put_levels))
put_powers = Kernel(torch.put_powers, (takes_float32, native.put_powers), in_triton(torch.put_powers))
round_levels = Kernel(torch.round_levels, (takes_float32, native.round_levels), in_triton(torch.round_levels))
round_powers = Kernel(torch.round_powers, (takes_float32, native.round_powers), in_triton(torch.round_powers))
round_trits = Kernel(torch.round_trits, (takes_float32, native.round_trits), in_triton(torch.round_trits))
majority = Kernel(torch.majority, (takes_flat, native.majority), in_triton(torch.majority, takes_cuda))
put_trits = Kernel(torch.put_trits, (takes_float32, native.put_trits), in_triton(torch.put_trits))
