"""Signs in one bit each, and the means they stand for (signSGD, 1-bit SGD, 1-bit Adam)."""

from ..kernel import Kernel
from . import native, torch

__all__ = ["mix_signs", "pack_signs", "put_signs", "split_signs", "split_sum", "split_sum_of_signs"]

mix_signs = Kernel(torch.mix_signs, native.mix_signs)
pack_signs = Kernel(torch.pack_signs, native.pack_signs)
put_signs = Kernel(torch.put_signs, native.put_signs)
split_signs = Kernel(torch.split_signs, native.split_signs)
split_sum = Kernel(torch.split_sum, native.split_sum)
split_sum_of_signs = Kernel(torch.split_sum_of_signs, native.split_sum_of_signs)
