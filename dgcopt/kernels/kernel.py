"""A kernel: one operation, of which there may be several implementations."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Generic, ParamSpec, TypeVar

from .cuda import warn_of_torch

__all__ = ["Kernel"]

P = ParamSpec("P")
R = TypeVar("R")


class Kernel(Generic[P, R]):
    """Calls the first implementation that takes the arguments: all give the same bits.

    Args:
        specification: the implementation in torch, which takes any arguments.
        others: implementations, each after a function that says of the arguments whether they suit it.
    """

    def __init__(self, specification: Callable[P, R], *others: tuple[Callable[..., bool], Callable[P, R]]) -> None:
        self.specification = specification
        self.others = others
        functools.update_wrapper(self, specification)

    def __call__(self, *args: P.args, **kwargs: P.kwargs) -> R:
        for takes, run in self.others:
            if takes(*args, *kwargs.values()):
                return run(*args, **kwargs)
        warn_of_torch(self.specification.__name__, (*args, *kwargs.values()))
        return self.specification(*args, **kwargs)
