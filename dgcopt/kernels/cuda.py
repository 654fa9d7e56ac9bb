"""Which tensors Triton's kernels take; Triton itself is imported when the first of them comes."""

from __future__ import annotations

import functools
import importlib
import importlib.util
import os
from collections.abc import Callable
from typing import Any, ParamSpec, TypeVar

import torch
from torch import Tensor

from .parts import Parts

__all__ = ["in_triton", "takes_cuda"]

P = ParamSpec("P")
R = TypeVar("R")


@functools.cache
def _has_triton() -> bool:
    return os.environ.get("DGCOPT_KERNELS", "") != "torch" and importlib.util.find_spec("triton") is not None


def takes_cuda(*arguments: Any) -> bool:
    """Whether all tensors among the arguments lie flat on a CUDA device, and floats are of float32 or bfloat16."""
    tensors = [x for x in arguments if isinstance(x, Tensor)]
    in_one_piece = not any(isinstance(x, Parts) for x in arguments)
    return all(_is_flat(x) for x in tensors) and bool(tensors) and in_one_piece and _has_triton()


def _is_flat(x: Tensor) -> bool:
    known = not x.is_floating_point() or x.dtype in (torch.float32, torch.bfloat16)
    return x.is_cuda and known and x.is_contiguous()


def in_triton(specification: Callable[P, R]) -> Callable[P, R]:
    """What has the same name in dgcopt.kernels.triton."""

    def run(*args: P.args, **kwargs: P.kwargs) -> R:
        module = importlib.import_module(f"{__package__}.triton")
        return getattr(module, specification.__name__)(*args, **kwargs)

    return run
