"""Which tensors Triton's kernels take; Triton itself is imported when the first of them comes."""

from __future__ import annotations

import functools
import importlib
import importlib.util
import logging
import os
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, ParamSpec, TypeVar

import torch
from torch import Tensor

from .blocks import is_dense
from .parts import Parts, tensors_in

__all__ = [
    "has_triton",
    "in_triton",
    "takes_cuda",
    "takes_cuda_chunks",
    "takes_cuda_dense",
    "takes_cuda_float32",
    "takes_cuda_of_rows",
    "takes_cuda_pairs",
    "takes_cuda_parts",
    "takes_cuda_rows",
    "warn_of_torch",
]

_FLOATS = (torch.float32, torch.bfloat16, torch.float16)
"""The floating dtypes that there are kernels for."""

_WIDEST = 2**14
"""Elements that one program can hold."""

_OLDEST = (3, 6)
"""Triton before that makes zero of denormal quotients; and before 3.4 it knows no histogram of some elements."""

log = logging.getLogger("dgcopt")

P = ParamSpec("P")
R = TypeVar("R")


@functools.cache
def has_triton() -> bool:
    """True if there is a Triton in which the kernels can be written; if not, one warning says why."""
    if os.environ.get("DGCOPT_KERNELS", "") == "torch":
        return False
    needed = ".".join(map(str, _OLDEST))
    if importlib.util.find_spec("triton") is None:
        problem = "it is not installed"
    else:
        version = importlib.import_module("triton").__version__
        if tuple(map(int, version.split(".")[:2])) >= _OLDEST:
            return True
        problem = f"version {version} is installed"
    log.warning(
        "dgcopt: on CUDA compression runs in torch: its kernels need Triton %s or later, and %s", needed, problem
    )
    return False


def takes_cuda(*arguments: Any) -> bool:
    """Whether all tensors among the arguments lie flat on one CUDA device, and floats have no more than 32 bits."""
    return _takes(arguments, _FLOATS)


def takes_cuda_float32(*arguments: Any) -> bool:
    """Whether all tensors among the arguments lie flat on one CUDA device, and floats are of float32."""
    return _takes(arguments, (torch.float32,))


def takes_cuda_rows(*arguments: Any) -> bool:
    """The same of tensors of which each row lies in one piece."""
    return _takes(arguments, (torch.float32,), _in_rows)


def takes_cuda_of_rows(tensor: Tensor, counts: Tensor, *others: Any) -> bool:
    """The same as `takes_cuda`, with the counts of rows, which are on the CPU."""
    return counts.is_cpu and takes_cuda(tensor)


def takes_cuda_chunks(*arguments: Any) -> bool:
    """The same as `takes_cuda`, of chunks that one program can hold."""
    *others, chunks = arguments
    return takes_cuda(*others) and all(stop - start <= _WIDEST for start, stop in chunks.spans)


def takes_cuda_pairs(some: Sequence[Tensor], others: Sequence[Tensor], *numbers: Any) -> bool:
    """The same as `takes_cuda`, of tensors of one dtype."""
    return len({x.dtype for x in (*some, *others)}) == 1 and takes_cuda(some, others)


def takes_cuda_dense(tensors: Sequence[Tensor]) -> bool:
    """`takes_cuda`, for tensors of one dtype with elements in any order."""
    return len({x.dtype for x in tensors}) == 1 and _takes(tensors, _FLOATS, is_dense)


def takes_cuda_parts(parts: Parts, *others: Any) -> bool:
    """The same as `takes_cuda_float32`, of parts too."""
    return takes_cuda_float32([part for part in parts.tensors if part is not None], *others)


def _takes(
    arguments: Sequence[Any], floats: Sequence[torch.dtype], lies_well: Callable[[Tensor], bool] = Tensor.is_contiguous
) -> bool:
    if any(isinstance(x, Parts) for x in arguments):
        return False
    tensors = list(_tensors_in(arguments))
    for x in tensors:
        if not x.is_cuda or not lies_well(x) or (x.is_floating_point() and x.dtype not in floats):
            return False
    return len({x.device for x in tensors}) == 1 and has_triton()


def warn_of_torch(operation: str, arguments: Iterable[Any]) -> None:
    """Log a warning, once per operation, if CUDA tensors are left to eager torch although there are kernels."""
    tensors = list(_tensors_in(arguments))
    if operation not in _warned and any(x.is_cuda for x in tensors) and has_triton():
        _warned.add(operation)
        log.warning(
            "dgcopt: %s runs in eager torch, several times slower than its CUDA kernel, which does not take these "
            "tensors: %s. Train in float32, bfloat16 or float16, with contiguous tensors on one device",
            *(operation, ", ".join(sorted({f"{x.dtype} on {x.device}".removeprefix("torch.") for x in tensors}))),
        )


_warned: set[str] = set()
"""Operations that a warning was logged for."""


def _in_rows(x: Tensor) -> bool:
    return x.is_contiguous() or x.stride(-1) == 1


def _tensors_in(arguments: Iterable[Any]) -> Iterator[Tensor]:
    for x in arguments:
        yield from tensors_in(x if isinstance(x, list | tuple) else (x,))


def in_triton(
    specification: Callable[P, R], takes: Callable[..., bool] = takes_cuda_float32
) -> tuple[Callable[..., bool], Callable[P, R]]:
    """Return the operation of that name in dgcopt.kernels.triton, run on its tensors' device, and its condition."""

    @functools.wraps(specification)
    def run(*args: P.args, **kwargs: P.kwargs) -> R:
        module = importlib.import_module(f"{__package__}.triton")
        with torch.cuda.device_of(next(_tensors_in(args))):
            return getattr(module, specification.__name__)(*args, **kwargs)

    return takes, run
