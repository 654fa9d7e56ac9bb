"""A kernel: one operation, implemented in torch, in C and in Triton."""

from __future__ import annotations

import functools
import importlib
import logging
from collections.abc import Callable, Iterable, Sequence
from typing import Any, Generic, ParamSpec, TypeVar

import torch
from torch import Tensor

from .blocks import is_flat
from .native import library
from .parts import tensors_in
from .triton.available import has_triton

__all__ = ["FLOAT32", "HALVES", "Kernel"]

FLOAT32 = (torch.float32,)
HALVES = (torch.float32, torch.bfloat16, torch.float16)
"""Floating dtypes of operations on gradients and memory in any precision; the loops in C have no float16."""

log = logging.getLogger("dgcopt")

P = ParamSpec("P")
R = TypeVar("R")


class Kernel(Generic[P, R]):
    """An operation. A call runs the implementation for its tensors' device and dtype; all give the same bits.

    C runs on CPU tensors, Triton on tensors of one CUDA device, and the specification on all others. Tensors in lists
    must have one dtype.

    Args:
        specification: the implementation in torch.
        native: the implementation in C, of the same name in the family's native.py.
        floats: floating dtypes of the tensors; other floats run in torch. Integers are not checked.
        layout: predicate of a tensor's layout in memory.
        operands: function of the arguments that returns those to check; all by default.
        triton: True if the family's triton.py has the operation, or a predicate of the arguments that it takes.
    """

    def __init__(
        self,
        specification: Callable[P, R],
        native: Callable[P, R],
        *,
        floats: Sequence[torch.dtype] = FLOAT32,
        layout: Callable[[Tensor], bool] = is_flat,
        operands: Callable[..., Iterable[Any]] | None = None,
        triton: bool | Callable[..., bool] = True,
    ) -> None:
        self.specification, self.native = specification, native
        self.floats, self.layout, self.operands, self.in_triton = floats, layout, operands, triton
        functools.update_wrapper(self, specification)

    def __call__(self, *args: P.args, **kwargs: P.kwargs) -> R:
        return self.implementation(*args, *kwargs.values())(*args, **kwargs)

    def implementation(self, *arguments: Any) -> Callable[P, R]:
        """Return the implementation that runs on the arguments."""
        operands = self._operands(arguments)
        tensors = tensors_in(operands)
        if tensors and tensors[0].is_cpu:
            if library.instructions() and self._fits(operands, tensors, library.FLOATS):
                return self.native
        elif any(x.is_cuda for x in tensors) and has_triton() and self.in_triton:
            if len({x.device for x in tensors}) == 1 and self.takes_triton(*arguments):
                return self.triton
            _warn_of_torch(self.specification.__name__, tensors)
        return self.specification

    def takes_triton(self, *arguments: Any) -> bool:
        """True if the implementation in Triton takes the arguments, wherever they lie."""
        if not (self.in_triton is True or (callable(self.in_triton) and self.in_triton(*arguments))):
            return False
        operands = self._operands(arguments)
        return self._fits(operands, tensors_in(operands), HALVES)

    def _operands(self, arguments: tuple[Any, ...]) -> Iterable[Any]:
        return arguments if self.operands is None else self.operands(*arguments)

    def _fits(self, operands: Iterable[Any], tensors: list[Tensor], floats: Iterable[torch.dtype]) -> bool:
        """True if all tensors lie on one type of device, and have the layout and the dtypes of the operation."""
        is_cpu, layout = bool(tensors) and tensors[0].is_cpu, self.layout
        for x in tensors:
            if x.is_cpu is not is_cpu or not layout(x):
                return False
            if x.is_floating_point() and not (x.dtype in self.floats and x.dtype in floats):
                return False
        listed = [some for some in operands if isinstance(some, list | tuple)]
        return not listed or len({x.dtype for some in listed for x in tensors_in(some)}) <= 1

    @functools.cached_property
    def triton(self) -> Callable[P, R]:
        """The implementation in Triton, imported on first use, on the device of its first tensor."""
        family = self.specification.__module__.rpartition(".")[0]
        inner: Callable[P, R] = getattr(importlib.import_module(f"{family}.triton"), self.specification.__name__)

        @functools.wraps(self.specification)
        def run(*args: P.args, **kwargs: P.kwargs) -> R:
            with torch.cuda.device_of(tensors_in(args)[0]):
                return inner(*args, **kwargs)

        return run


def _warn_of_torch(operation: str, tensors: Iterable[Tensor]) -> None:
    """Log a warning, once per operation, that CUDA tensors run in eager torch although there is a kernel."""
    if operation in _warned:
        return
    _warned.add(operation)
    log.warning(
        "dgcopt: %s runs in eager torch, several times slower than its CUDA kernel, which does not take these tensors: "
        "%s. Train in float32, bfloat16 or float16, with contiguous tensors on one device",
        *(operation, ", ".join(sorted({f"{x.dtype} on {x.device}".removeprefix("torch.") for x in tensors}))),
    )


_warned: set[str] = set()
"""Operations that a warning was logged for."""
