"""The library of loops in C (native.c), through ctypes: one pass over memory each, instead of several in torch.

The library is built when dgcopt is installed, if there is a C compiler. Without it, on an unknown processor, or with
DGCOPT_KERNELS=torch, everything runs in torch, with the same bits. Loops release the GIL, and use as many threads as
torch in this process.
"""

from __future__ import annotations

import ctypes
import functools
import hashlib
import logging
import os
import sys
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ...errors import ConfigError
from ..blocks import BLOCK, is_flat
from ..parts import Parts

__all__ = [
    "FLOATS",
    "Float",
    "Int",
    "Length",
    "Pointer",
    "array",
    "at",
    "check_alike",
    "check_bytes",
    "check_flat",
    "function",
    "in_use",
    "instructions",
    "pointers",
    "shared",
]

log = logging.getLogger("dgcopt")

_LIBRARY = Path(__file__).parent.with_name("libdgcopt.so")
REBUILD = "with a C compiler run `python setup.py build_ext --inplace --force` in the sources, or install dgcopt again"
_SHARE = 2**16
"""Least number of elements for a further thread."""

FLOATS = {torch.float32: "f32", torch.bfloat16: "bf16"}
"""The floating dtypes of the loops, and the endings of their names."""
Pointer, Length, Float, Int = ctypes.c_void_p, ctypes.c_int64, ctypes.c_float, ctypes.c_int


@functools.cache
def _library() -> tuple[ctypes.CDLL | None, str, str]:
    """Return the library or None, the instruction set, and the reason if there is none, which is logged once.

    A missing library that was expected is a warning.

    Raises ConfigError if DGCOPT_KERNELS asks for a library that is missing.
    """
    choice = os.environ.get("DGCOPT_KERNELS", "")
    if choice not in ("", "native", "torch"):
        raise ConfigError(f'DGCOPT_KERNELS must be "native" or "torch", not {choice!r}')
    if choice == "torch":
        return None, "", "DGCOPT_KERNELS says"
    level = logging.INFO
    try:
        library = ctypes.CDLL(str(_LIBRARY))
        if not _is_of_these_sources(library):
            level, problem = logging.WARNING, f"are older than their sources: {REBUILD}"
        else:
            variant = _text(library, "dgcopt_cpu")
            problem = "" if variant else "need a processor with AVX2 and FMA, or NEON"
    except OSError:
        if sys.platform == "linux":
            level, problem = logging.WARNING, f"are missing ({_LIBRARY}): {REBUILD}"
        else:
            problem = "are for Linux only; the bits are the same"
    if problem and choice == "native":
        raise ConfigError(f"DGCOPT_KERNELS=native, but the compiled loops {problem}")
    if problem:
        log.log(level, "dgcopt: compression runs in torch, to the same bits, as the compiled loops %s", problem)
        return None, "", f"the compiled loops {problem}"
    return library, variant, ""


def _text(library: ctypes.CDLL, function: str) -> str:
    text = getattr(library, function)
    text.restype = ctypes.c_char_p
    return str(text().decode())


def _is_of_these_sources(library: ctypes.CDLL) -> bool:
    """Return True if the library was built from the present sources, which an editable install may have changed."""
    source = Path(__file__).with_name("native.c")
    if not source.exists():
        return True
    try:
        built_from = _text(library, "dgcopt_sources")
    except AttributeError:
        return False
    sources = b"".join(path.read_bytes() for path in (source, *sorted(source.parents[1].rglob("*.h"))))
    return built_from in ("", hashlib.sha256(sources).hexdigest()[:16])


def instructions() -> str:
    """Return the instruction set of the loops in use, "avx512", "avx2" or "neon"; empty if torch is used."""
    return _library()[1]


def in_use() -> str:
    """Describe the kernels in use on a CPU, with the reason if they are not C. Raises ConfigError as they do."""
    _, variant, problem = _library()
    return f"native ({variant})" if variant else f"torch, as {problem}"


@functools.cache
def function(name: str, *arguments: type) -> Callable[..., int]:
    """Return the loop of that name for the instructions in use."""
    library, variant, _ = _library()
    assert library is not None
    loop = getattr(library, f"{name}_{variant}")
    loop.argtypes, loop.restype = arguments, ctypes.c_int
    return loop


def check_alike(layout: Callable[[Tensor], bool], *tensors: Tensor) -> None:
    """Raise ValueError unless tensors have one dtype that loops exist for, and a layout that a loop can run over."""
    dtypes = {x.dtype for x in tensors}
    if len(dtypes) != 1 or not dtypes <= FLOATS.keys() or not all(x.is_cpu and layout(x) for x in tensors):
        raise ValueError(f"tensors of one dtype are needed, each in one piece, not {sorted(map(str, dtypes))}")


def check_bytes(packed: Tensor, least: int) -> None:
    """Raise ValueError if there are fewer bytes than `least`."""
    if (
        packed.dtype != torch.uint8
        or packed.dim() != 1
        or len(packed) < least
        or not packed.is_cpu
        or not is_flat(packed)
    ):
        raise ValueError(f"at least {least} bytes are needed, not {tuple(packed.shape)} of {packed.dtype}")


def check_flat(numel: int, *tensors: Tensor, dtype: torch.dtype | None = None) -> None:
    """Raise ValueError for tensors of another length or dtype, which a loop would read or write out of bounds."""
    for tensor in tensors:
        if tensor.dim() != 1 or tensor.numel() != numel or not tensor.is_cpu or not is_flat(tensor):
            raise ValueError(f"a flat tensor of {numel} elements is needed, not {tuple(tensor.shape)}")
        if dtype is not None and tensor.dtype != dtype:
            raise ValueError(f"a tensor of {dtype} is needed, not of {tensor.dtype}")


def pointers(parts: Parts, dtype: torch.dtype) -> ctypes.Array[ctypes.c_void_p]:
    """Return the address of each part, None for a missing one. Raises ValueError for a part of another length."""
    check_flat(len(parts.tensors), parts.starts, parts.stops, dtype=torch.int64)
    for start, stop, part in parts.spans:
        if part is not None:
            check_flat(stop - start, part, dtype=dtype)
    return (Pointer * len(parts.tensors))(*[None if part is None else part.data_ptr() for part in parts.tensors])


def array(kind: type[Any], numbers: Sequence[int]) -> Any:
    """Return numbers or addresses as a C array."""
    return (kind * len(numbers))(*numbers)


def at(tensor: Tensor | None, start: int) -> int | None:
    """Return the address of an element."""
    return None if tensor is None else tensor.data_ptr() + start * tensor.element_size()


@functools.cache
def _pool(process: int, threads: int) -> ThreadPoolExecutor:
    return ThreadPoolExecutor(threads, thread_name_prefix="dgcopt-kernels")


def shared(loop: Callable[[int, int], None], numel: int) -> None:
    """Run `loop` over spans of blocks, in as many threads as torch has if there are enough elements."""
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
