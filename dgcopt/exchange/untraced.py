"""Functions that torch's compiler calls without tracing them."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

import torch

__all__ = ["untraced"]

Function = TypeVar("Function", bound=Callable[..., object])


def untraced(function: Function) -> Function:
    """Return `function` for `torch.compile` to call without tracing it, and without tracing anything that it calls.

    Tracing an exchange would break the graph into hundreds of pieces. Loads the compiler, as torch's optimizers do.
    """
    return torch.compiler.disable(function)
