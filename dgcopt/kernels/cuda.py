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
from .parts import Mixture, Parts

__all__ = [
    "has_triton",
    "in_triton",
    "takes_cuda",
    "takes_cuda_chunks",
    "takes_cuda_copies",
    "takes_cuda_dense",
    "takes_cuda_float32",
    "takes_cuda_of_rows",
    "takes_cuda_parts",
    "takes_cuda_rows",
]

_WIDEST = 2**14
"""Elements that one program can hold."""

_OLDEST = (3, 6)
"""Triton before that makes zero of denormal quotients; and before 3.4 it knows no histogram of some elements."""

log = logging.getLogger("dgcopt")

P = ParamSpec("P")
R = TypeVar("R")


@functools.cache
def has_triton() -> bool:
    """Whether there is a Triton in which the kernels can be written; if not, one log line says why."""
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
    log.info("dgcopt: on CUDA compression runs in torch: its kernels need Triton %s or later, and %s", needed, problem)
    return False


def takes_cuda(*arguments: Any) -> bool:
    """Whether all tensors among the arguments lie flat on one CUDA device, and floats are of float32 or bfloat16."""
    return _takes(arguments, (torch.float32, torch.bfloat16))


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


def takes_cuda_copies(grads: Sequence[Tensor], outs: Sequence[Tensor], scale: float) -> bool:
    """The same as `takes_cuda`, of tensors of one dtype."""
    return len({x.dtype for x in (*grads, *outs)}) == 1 and takes_cuda(grads, outs)


def takes_cuda_dense(tensors: Sequence[Tensor]) -> bool:
    """The same as `takes_cuda`, of tensors of one dtype, whatever the order of their elements."""
    return len({x.dtype for x in tensors}) == 1 and _takes(tensors, (torch.float32, torch.bfloat16), is_dense)


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


def _in_rows(x: Tensor) -> bool:
    return x.is_contiguous() or x.stride(-1) == 1


def _tensors_in(arguments: Iterable[Any]) -> Iterator[Tensor]:
    for x in arguments:
        if isinstance(x, Tensor):
            yield x
        elif isinstance(x, list | tuple):
            yield from (each for each in x if isinstance(each, Tensor))
        elif isinstance(x, Mixture):
            yield from x.parts


def in_triton(
    specification: Callable[P, R], takes: Callable[..., bool] = takes_cuda_float32
) -> tuple[Callable[..., bool], Callable[P, R]]:
    """What has the same name in dgcopt.kernels.triton, on the device where its tensors are; and what it takes."""

    @functools.wraps(specification)
    def run(*args: P.args, **kwargs: P.kwargs) -> R:
        module = importlib.import_module(f"{__package__}.triton")
        with torch.cuda.device_of(next(_tensors_in(args))):
            return getattr(module, specification.__name__)(*args, **kwargs)

    return takes, run
