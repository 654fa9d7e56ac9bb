"""Random bits from a key and a position: random numbers, random positions, and a hash of a tensor's memory."""

from ..kernel import Kernel
from . import native, torch
from .torch import draws

__all__ = ["draw_from_spans", "draws", "hash_of"]

draw_from_spans = Kernel(torch.draw_from_spans, native.draw_from_spans)
hash_of = Kernel(torch.hash_of, native.hash_of, triton=False)
