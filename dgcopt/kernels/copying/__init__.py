"""Copies of gradients into buckets, and their largest magnitudes."""

from ..blocks import is_dense
from ..kernel import HALVES, Kernel
from . import native, torch

__all__ = ["copy_scaled", "peaks"]

copy_scaled = Kernel(torch.copy_scaled, native.copy_scaled, floats=HALVES)
peaks = Kernel(torch.peaks, native.peaks, floats=HALVES, layout=is_dense)
