"""The arguments of an optimizer's step, which its pre-hooks may replace."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeAlias

from ..errors import ConfigError
from ..kernels.parts import tensors_in

__all__ = ["Call", "Closure", "check_arguments", "with_closure"]

Call: TypeAlias = tuple[tuple[Any, ...], dict[str, Any]]
"""Positional and keyword arguments; the first positional one is the optimizer."""

Closure: TypeAlias = Callable[[], Any]
"""Makes gradients anew, and returns the loss."""


def check_arguments(args: tuple[Any, ...], kwargs: dict[str, Any], rank: int) -> None:
    """Raise ConfigError if a step that averages gradients is given tensors: they are this rank's own."""
    if tensors_in([*args[1:], *kwargs.values()]):
        raise ConfigError(
            f"rank {rank}: {type(args[0]).__name__}.step() is given tensors, and only param.grad is averaged over "
            f"ranks. Assign gradients to param.grad; or call optimizer.synchronize(), average the tensors "
            f"(dgcopt.hvd.allreduce) and step inside optimizer.skip_synchronize()."
        )


def with_closure(args: tuple[Any, ...], kwargs: dict[str, Any], closure: Closure) -> Call:
    """Return the arguments of a step with another closure in place of its own."""
    return ((args[0], closure, *args[2:]), kwargs) if len(args) > 1 else (args, {**kwargs, "closure": closure})
