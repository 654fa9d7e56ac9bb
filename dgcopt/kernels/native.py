"""The inner loops in C (native.c), through ctypes: each one pass over memory, where torch's take several.

The library is built when dgcopt is installed, if there is a C compiler. Without it, on a processor that it has no loops
for, or with DGCOPT_KERNELS=torch, everything runs in torch, to the same bits. Loops let go of the GIL, and share their
work between as many threads as torch has in this process.
"""

from __future__ import annotations

import ctypes
import functools
import logging
import os
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import torch
from torch import Tensor
from torch.autograd.graph import increment_version

from ..errors import ConfigError
from ..flat.segments import BLOCK
from .torch import Groups, Momentum

__all__ = [
    "accumulate",
    "advance",
    "instructions",
    "pack_small",
    "rice_measure",
    "rice_pack",
    "rice_unpack",
    "select",
    "takes_bytes",
    "takes_memory",
    "takes_selection",
    "unpack_small",
]

log = logging.getLogger("dgcopt")

_LIBRARY = Path(__file__).with_name("libdgcopt.so")
_TYPES = {torch.float32: "f32", torch.bfloat16: "bf16"}
_SHARE = 2**16
"""Elements that are worth a thread of their own."""

_MOMENTUM, _DAMPENED, _NESTEROV, _COMMIT = 1, 2, 4, 8


@functools.cache
def _library() -> tuple[ctypes.CDLL, str] | None:
    """The library and the instruction set to use; None if they cannot be used; the log says why, once."""
    choice = os.environ.get("DGCOPT_KERNELS", "")
    if choice not in ("", "native", "torch"):
        raise ConfigError(f'DGCOPT_KERNELS must be "native" or "torch", not {choice!r}')
    if choice == "torch":
        return None
    try:
        library = ctypes.CDLL(str(_LIBRARY))
        library.dgcopt_cpu.restype = ctypes.c_char_p
        variant = library.dgcopt_cpu().decode()
        problem = "" if variant else "this processor lacks AVX2 and FMA, or NEON"
    except OSError:
        problem = "they were not built: install a C compiler, and dgcopt again"
    if problem and choice == "native":
        raise ConfigError(f"DGCOPT_KERNELS=native, but the native kernels cannot be used: {problem}")
    if problem:
        log.info("dgcopt: compression runs in torch, without the native kernels: %s", problem)
        return None
    return library, variant


def instructions() -> str:
    """The instruction set of the loops in use, "avx512", "avx2" or "neon"; empty if torch is used."""
    found = _library()
    return found[1] if found is not None else ""


@functools.cache
def _function(name: str, arguments: tuple[type, ...]) -> Callable[..., int]:
    found = _library()
    assert found is not None
    library, variant = found
    function = getattr(library, f"{name}_{variant}")
    function.argtypes, function.restype = arguments, ctypes.c_int
    return function


def _is_flat(tensor: Tensor) -> bool:
    return tensor.is_cpu and tensor.layout == torch.strided and tensor.is_contiguous()


def takes_memory(memory: Tensor, g: Tensor | None) -> bool:
    """Whether there are loops for memory and gradients of these types."""
    tensors = (memory,) if g is None else (memory, g)
    return all(_is_flat(tensor) and tensor.dtype in _TYPES for tensor in tensors) and _library() is not None


def takes_selection(flat: Tensor) -> bool:
    """Whether there are loops for a tensor of this type."""
    return _is_flat(flat) and flat.dtype in _TYPES and _library() is not None


def takes_bytes(tensor: Tensor) -> bool:
    """Whether there are loops for bytes or integers in such a tensor."""
    return _is_flat(tensor) and _library() is not None


_Pointer, _Length, _Float, _Int = ctypes.c_void_p, ctypes.c_int64, ctypes.c_float, ctypes.c_int


def accumulate(
    old: Tensor,
    new: Tensor,
    u: Tensor | None,
    g: Tensor | None,
    maxima: Tensor,
    rule: Momentum | None,
    scale: float = 1.0,
    commit: bool = False,
) -> None:
    """See `dgcopt.kernels.torch.accumulate`."""
    moves = rule is not None and rule.momentum != 0
    assert not moves or u is not None
    momentum = u if u is not None and moves else old
    _check(len(new), old.dtype, old, new, momentum, *(() if g is None else (g,)), of=(old, new, momentum))
    if maxima.dtype != new.dtype or len(maxima) != -(-len(new) // BLOCK) or not _is_flat(maxima):
        raise ValueError(f"{len(new)} elements have {-(-len(new) // BLOCK)} block maxima, not {len(maxima)}")
    mode = _COMMIT if commit else 0
    if rule is not None and moves:
        mode |= _MOMENTUM | (_DAMPENED if rule.dampening else 0) | (_NESTEROV if rule.nesterov else 0)
    m, keep = (rule.momentum, 1 - rule.dampening) if rule is not None else (0.0, 1.0)
    gradient = "f32" if g is None else _TYPES[g.dtype]
    function = _function(
        f"accumulate_{gradient}_{_TYPES[new.dtype]}", (*[_Pointer] * 5, _Length, _Float, _Float, _Float, _Int)
    )

    def loop(start: int, stop: int) -> None:
        function(
            *(_at(tensor, start) for tensor in (old, new, momentum, g)),
            *(_at(maxima, start // BLOCK), stop - start, m, keep, scale, mode),
        )

    _share(loop, len(new))
    for changed in (new, u if commit and moves else None, g if commit else None):
        if changed is not None:
            increment_version(changed)  # as torch's own operations do: autograd looks for it


def advance(u: Tensor, g: Tensor | None, rule: Momentum, scale: float = 1.0) -> None:
    """See `dgcopt.kernels.torch.advance`."""
    _check(len(u), u.dtype, u, *(() if g is None else (g,)), of=(u,))
    gradient = "f32" if g is None else _TYPES[g.dtype]
    function = _function(f"advance_{gradient}_{_TYPES[u.dtype]}", (_Pointer, _Pointer, _Length, *[_Float] * 3, _Int))

    def loop(start: int, stop: int) -> None:
        settings = (rule.momentum, 1 - rule.dampening, scale, int(rule.dampening != 0))
        function(_at(u, start), _at(g, start), stop - start, *settings)

    _share(loop, len(u))
    for changed in (u, g):
        if changed is not None:
            increment_version(changed)


def select(flat: Tensor, maxima: Tensor, groups: Groups) -> Tensor:
    """See `dgcopt.kernels.torch.select`."""
    if maxima.dtype != flat.dtype or len(maxima) != len(flat) // BLOCK or not _is_flat(maxima):
        raise ValueError(f"{len(flat)} elements have {len(flat) // BLOCK} block maxima, not {len(maxima)}")
    starts, stops, pieces, counts = groups.table
    if len(stops) and int(stops.amax()) > len(flat):
        raise ValueError(f"groups reach beyond the {len(flat)} elements that there are")
    positions = torch.empty(sum(groups.counts), dtype=torch.int64)
    function = _function(f"select_{_TYPES[flat.dtype]}", (*[_Pointer] * 6, _Length, _Pointer))
    at = [tensor.data_ptr() for tensor in (flat, maxima, starts, stops, pieces, counts)]
    if function(*at, len(counts), positions.data_ptr()):
        raise MemoryError("there is no memory left to select in")
    return positions


def pack_small(fields: Tensor, width: int) -> Tensor:
    """See `dgcopt.kernels.torch.pack_small`."""
    _check(len(fields), torch.uint8, fields, of=(fields,))
    packed = torch.empty(-(-len(fields) // 8) * width, dtype=torch.uint8)
    function = _function("pack_small", (_Pointer, _Length, _Int, _Pointer))
    function(fields.data_ptr(), len(fields), width, packed.data_ptr())
    return packed


def unpack_small(packed: Tensor, count: int, width: int) -> Tensor:
    """See `dgcopt.kernels.torch.unpack_small`."""
    _check_bytes(packed, -(-count // 8) * width)
    fields = torch.empty(count, dtype=torch.uint8)
    function = _function("unpack_small", (_Pointer, _Length, _Int, _Pointer))
    function(packed.data_ptr(), count, width, fields.data_ptr())
    return fields


def rice_measure(indices: Tensor, b: int) -> tuple[int, int]:
    """See `dgcopt.kernels.torch.rice_measure`."""
    _check(len(indices), torch.int64, indices, of=(indices,))
    measures = torch.empty(2, dtype=torch.int64)
    function = _function("rice_measure", (_Pointer, _Length, _Int, _Pointer))
    function(indices.data_ptr(), len(indices), b, measures.data_ptr())
    smallest, quotients = measures.tolist()
    return smallest, quotients


def rice_pack(indices: Tensor, b: int, nbytes: int) -> Tensor:
    """See `dgcopt.kernels.torch.rice_pack`."""
    _check(len(indices), torch.int64, indices, of=(indices,))
    start = _remainder_bytes(len(indices), b)
    packed = torch.zeros(nbytes, dtype=torch.uint8)
    function = _function("rice_pack", (_Pointer, _Length, _Int, _Pointer, _Length, _Length))
    if start > nbytes or function(indices.data_ptr(), len(indices), b, packed.data_ptr(), start, 8 * (nbytes - start)):
        raise ValueError(f"{len(indices)} indices do not fit into {nbytes} bytes")
    return packed


def rice_unpack(packed: Tensor, count: int, b: int, numel: int) -> Tensor | None:
    """See `dgcopt.kernels.torch.rice_unpack`."""
    start = _remainder_bytes(count, b)
    _check_bytes(packed, start)
    indices = torch.empty(count, dtype=torch.int64)
    function = _function("rice_unpack", (_Pointer, _Length, _Int, _Length, _Length, _Length, _Pointer))
    damaged = function(packed.data_ptr(), count, b, start, len(packed), numel, indices.data_ptr())
    return None if damaged else indices


def _remainder_bytes(count: int, b: int) -> int:
    whole, rest = divmod(b, 8)
    return count * whole + -(-count // 8) * rest


def _check_bytes(packed: Tensor, least: int) -> None:
    if packed.dtype != torch.uint8 or packed.dim() != 1 or len(packed) < least or not _is_flat(packed):
        raise ValueError(f"at least {least} bytes are needed, not {tuple(packed.shape)} of {packed.dtype}")


def _check(numel: int, dtype: torch.dtype, *tensors: Tensor, of: tuple[Tensor, ...]) -> None:
    """Raises ValueError before a loop could read or write what is not there."""
    for tensor in tensors:
        if tensor.dim() != 1 or len(tensor) != numel or not _is_flat(tensor):
            raise ValueError(f"a flat tensor of {numel} elements is needed, not {tuple(tensor.shape)}")
    if any(tensor.dtype != dtype for tensor in of):
        raise ValueError(f"all memory must be of {dtype}")


def _at(tensor: Tensor | None, start: int) -> int | None:
    return None if tensor is None else tensor.data_ptr() + start * tensor.element_size()


@functools.cache
def _pool(process: int, threads: int) -> ThreadPoolExecutor:
    return ThreadPoolExecutor(threads, thread_name_prefix="dgcopt-kernels")


def _share(loop: Callable[[int, int], None], numel: int) -> None:
    """Run `loop` over spans of blocks, in as many threads as torch has, if there is enough to do."""
    threads = min(torch.get_num_threads(), numel // _SHARE)
    if threads <= 1:
        loop(0, numel)
        return
    step = -(-numel // (threads * BLOCK)) * BLOCK
    spans = [(start, min(start + step, numel)) for start in range(0, numel, step)]
    others = [_pool(os.getpid(), torch.get_num_threads() - 1).submit(loop, *span) for span in spans[1:]]
    loop(*spans[0])
    for other in others:
        other.result()
