"""Optimizers that may step before the exchange, so that updates are sent instead of gradients.

torch's own optimizers are recognised by the function behind `step`: a subclass that overrides it is not recognised, a
wrapped optimizer is.
"""

from __future__ import annotations

import inspect
from typing import Any

from torch import optim
from torch.optim import Optimizer

from ..errors import ConfigError

__all__ = ["check_steps_alone", "passes_over_missing_gradients", "steps_as", "updates_add_up"]

ELEMENTWISE = (
    optim.Adadelta,
    optim.Adagrad,
    optim.Adam,
    optim.AdamW,
    optim.Adamax,
    optim.NAdam,
    optim.RAdam,
    optim.RMSprop,
    optim.Rprop,
    optim.SparseAdam,
)
"""Without ASGD, which averages each rank's own weights, and without Adafactor and Muon, whose updates
are not elementwise."""


def steps_as(optimizer: Optimizer, *kinds: type[Optimizer]) -> bool:
    """Return True if `step` is that of one of these classes, not a subclass's override."""
    return any(_step_of(type(optimizer)) is _step_of(kind) for kind in kinds)


def updates_add_up(optimizer: Optimizer) -> bool:
    """Return True if weights depend only on the elementwise sum of updates."""
    return steps_as(optimizer, *ELEMENTWISE)


def passes_over_missing_gradients(optimizer: Optimizer) -> bool:
    """Return True if a step without gradients is known not to change weights, as for torch's optimizers."""
    return getattr(_step_of(type(optimizer)), "__module__", "").startswith("torch.optim.")


def check_steps_alone(optimizer: Optimizer, what_for: str) -> None:
    """Raise ConfigError if `step()` is known to exchange weights with other ranks, as in torch.distributed.

    Other ranks' updates would count as this rank's own.
    """
    if getattr(_step_of(type(optimizer)), "__module__", "").startswith("torch.distributed."):
        raise ConfigError(
            f"{type(optimizer).__name__}.step() exchanges weights with other ranks, so no rank steps by itself, but "
            f"{what_for}. Wrap the optimizer inside it, or send gradients (source='gradient')"
        )


def _step_of(kind: type[Optimizer]) -> Any:
    """Return the function `step` of the class, without the wrappers of torch and dgcopt."""
    return inspect.unwrap(kind.step)
