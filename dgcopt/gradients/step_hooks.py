"""The arguments of an optimizer's step, which its pre-hooks may replace."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeAlias

__all__ = ["Call", "Closure", "with_closure"]

Call: TypeAlias = tuple[tuple[Any, ...], dict[str, Any]]
"""Positional and keyword arguments; the first positional one is the optimizer."""

Closure: TypeAlias = Callable[[], Any]
"""Makes gradients anew, and returns the loss."""


def with_closure(args: tuple[Any, ...], kwargs: dict[str, Any], closure: Closure) -> Call:
    """Return the arguments of a step with another closure in place of its own."""
    return ((args[0], closure, *args[2:]), kwargs) if len(args) > 1 else (args, {**kwargs, "closure": closure})
