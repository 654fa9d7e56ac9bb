"""Integers in few bits: fields of one width, and Rice codes of ascending indices."""

from ..kernel import Kernel
from . import native, torch

__all__ = ["pack_small", "rice_measure", "rice_pack", "rice_unpack", "unpack_small"]

pack_small = Kernel(torch.pack_small, native.pack_small)
rice_measure = Kernel(torch.rice_measure, native.rice_measure)
rice_pack = Kernel(torch.rice_pack, native.rice_pack)
rice_unpack = Kernel(torch.rice_unpack, native.rice_unpack)
unpack_small = Kernel(torch.unpack_small, native.unpack_small)
