"""The one private attribute that dgcopt sets on a user's optimizer, whose other attributes stay its own."""

from __future__ import annotations

import inspect
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from torch.optim import Optimizer

from ..errors import ConfigError

__all__ = ["Held", "check_names", "held", "hold", "without"]

_NAME = "_dgcopt"
_MISSING = object()


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
    """Return the parts that dgcopt has added to `optimizer`; none for an object that is not wrapped."""
    return getattr(optimizer, "__dict__", {}).get(_NAME) or Held()


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
