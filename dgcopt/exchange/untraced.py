"""Functions that torch's compiler calls as they are."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

import torch

__all__ = ["untraced"]

Function = TypeVar("Function", bound=Callable[..., object])


def untraced(function: Function) -> Function:
    """Return `function` for `torch.compile` to call without tracing it, and without tracing anything that it calls.

    An exchange has no graph: it would be cut into hundreds of pieces. Loads the compiler, as torch's optimizers do.
    """
    return torch.compiler.disable(function)
