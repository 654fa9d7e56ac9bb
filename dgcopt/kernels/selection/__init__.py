"""Exact selection of the largest magnitudes: of groups of spans, of chunks, or above a threshold."""

from ..kernel import HALVES, Kernel
from . import native, torch
from .groups import Chunks, Groups

__all__ = [
    "Chunks",
    "Groups",
    "add_and_select_above",
    "add_and_select_chunks",
    "largest_first",
    "select",
    "select_above",
    "select_ahead",
    "select_chunks",
]

_WIDEST = 2**14
"""Elements that one program in Triton can hold."""


def _hold_chunks(*arguments: object) -> bool:
    chunks = arguments[-1]
    return isinstance(chunks, Chunks) and all(stop - start <= _WIDEST for start, stop in chunks.spans)


add_and_select_above = Kernel(torch.add_and_select_above, native.add_and_select_above)
add_and_select_chunks = Kernel(torch.add_and_select_chunks, native.add_and_select_chunks, triton=_hold_chunks)
largest_first = Kernel(torch.largest_first, native.largest_first, floats=HALVES, triton=False)
select = Kernel(torch.select, native.select, floats=HALVES)
select_above = Kernel(torch.select_above, native.select_above)
select_ahead = Kernel(torch.select_ahead, native.select_ahead, floats=HALVES)
select_chunks = Kernel(torch.select_chunks, native.select_chunks, floats=HALVES, triton=_hold_chunks)
