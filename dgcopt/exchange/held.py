"""The one private attribute that dgcopt sets on a user's optimizer; all other attributes stay its own."""

from __future__ import annotations

import inspect
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from torch.optim import Optimizer

from ..errors import ConfigError

__all__ = ["Held", "check_names", "held", "hold", "unwrapped", "without"]

_NAME = "_dgcopt"
_MISSING = object()
_FRAMEWORKS = ("accelerate", "lightning", "lightning_fabric", "pytorch_lightning")
"""Frameworks that wrap optimizers in `.optimizer`, and call the inner `step` with its hooks."""


@dataclass(eq=False)
class Held:
    """The parts that dgcopt has added to one optimizer.

    Attributes:
        gradients: the part of `DistributedOptimizer`; None if it has not wrapped the optimizer.
        averaging: the part of an averaging algorithm, or None.
    """

    gradients: Any = None
    averaging: Any = None


def held(optimizer: Any) -> Held:
    """Return the parts that dgcopt has added to `optimizer`, or to the one that a framework has wrapped in it."""
    return getattr(unwrapped(optimizer), "__dict__", {}).get(_NAME) or Held()


def unwrapped(optimizer: Any) -> Any:
    """Return the optimizer inside the wrapper of Accelerate, Lightning or Fabric; any other object unchanged.

    Fabric's wrapper takes on the class of the optimizer inside: it has dgcopt's methods, but not its parts.
    """
    if type(optimizer).__module__.partition(".")[0] in _FRAMEWORKS:
        return getattr(optimizer, "optimizer", optimizer)
    return optimizer


def hold(optimizer: Optimizer, **parts: Any) -> None:
    """Add parts to `optimizer`."""
    kept = vars(optimizer).setdefault(_NAME, Held())
    for name, part in parts.items():
        setattr(kept, name, part)


def without(state: dict[str, Any]) -> dict[str, Any]:
    """Return the attributes of an optimizer without the parts that dgcopt has added."""
    return {name: value for name, value in state.items() if name != _NAME}


def check_names(optimizer: Optimizer, names: Iterable[str]) -> None:
    """Raise ConfigError if the optimizer has an attribute or method of its own by a name that wrapping adds."""
    for name in names:
        if inspect.getattr_static(optimizer, name, _MISSING) is not _MISSING:
            raise ConfigError(
                f"{type(optimizer).__name__} has an attribute {name!r} of its own, and wrapping would replace it by "
                f"dgcopt's. Rename it in a subclass, or wrap the optimizer inside it."
            )
