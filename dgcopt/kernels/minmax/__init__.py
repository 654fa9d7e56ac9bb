"""256 levels between the smallest and the largest value of a row (ByteGrad)."""

from ..blocks import is_in_rows
from ..kernel import Kernel
from . import native, torch

__all__ = ["minmax_codes", "minmax_ends", "minmax_of_mean", "put_minmax"]

minmax_codes = Kernel(torch.minmax_codes, native.minmax_codes, layout=is_in_rows)
minmax_ends = Kernel(torch.minmax_ends, native.minmax_ends, layout=is_in_rows)
minmax_of_mean = Kernel(torch.minmax_of_mean, native.minmax_of_mean, layout=is_in_rows)
put_minmax = Kernel(torch.put_minmax, native.put_minmax)
