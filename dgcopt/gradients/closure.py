"""The closure in the arguments of a step, as torch hands them to the hooks around it: the optimizer comes first."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeAlias

__all__ = ["Call", "Closure", "closure_of", "with_closure"]

Call: TypeAlias = tuple[tuple[Any, ...], dict[str, Any]]
"""Positional arguments and those by name."""

Closure: TypeAlias = Callable[[], Any]
"""Makes gradients anew, and returns the loss."""


def closure_of(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Closure | None:
    """What `step` was given, by place or by name."""
    return args[1] if len(args) > 1 else kwargs.get("closure")


def with_closure(args: tuple[Any, ...], kwargs: dict[str, Any], closure: Closure) -> Call:
    """The same call with another closure, which a pre-hook returns."""
    return ((args[0], closure, *args[2:]), kwargs) if len(args) > 1 else (args, {**kwargs, "closure": closure})
