"""Maxima, norms and sums of blocks of 64 values and of tensors; some with the sum of gradient and residual."""

from ..kernel import HALVES, Kernel
from . import native, torch
from .torch import by_block, norm_of

__all__ = ["add_and_maxima", "add_and_norms", "block_maxima", "by_block", "norm_of", "tensor_norms", "tensor_sums"]

add_and_maxima = Kernel(torch.add_and_maxima, native.add_and_maxima)
add_and_norms = Kernel(torch.add_and_norms, native.add_and_norms)
block_maxima = Kernel(torch.block_maxima, native.block_maxima, floats=HALVES)
tensor_norms = Kernel(torch.tensor_norms, native.tensor_norms)
tensor_sums = Kernel(torch.tensor_sums, native.tensor_sums)
