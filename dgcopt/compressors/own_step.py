"""Which optimizers' `step()` may be called before the exchange, so that updates travel in place of gradients.

Known are torch's own optimizers, recognised by the function behind `step`: a subclass with a step of its own is not
one of them, and a wrapped optimizer still is.
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
"""Not ASGD, which averages each rank's own weights; nor Adafactor and Muon, whose updates are
of whole matrices: a compressed one is no such update."""


def steps_as(optimizer: Optimizer, *kinds: type[Optimizer]) -> bool:
    """Whether `step` is that of one of these classes, and not a subclass's own."""
    return any(_step_of(type(optimizer)) is _step_of(kind) for kind in kinds)


def updates_add_up(optimizer: Optimizer) -> bool:
    """Whether the weights depend on nothing but the sum of the updates made of them, coordinate by coordinate."""
    return steps_as(optimizer, *ELEMENTWISE)


def passes_over_missing_gradients(optimizer: Optimizer) -> bool:
    """Whether a step without any gradient is known to leave the weights alone, as it is for torch's own."""
    return getattr(_step_of(type(optimizer)), "__module__", "").startswith("torch.optim.")


def check_steps_alone(optimizer: Optimizer, what_for: str) -> None:
    """Raises ConfigError if `step()` is known to exchange weights with other ranks, as those of torch.distributed do.

    Other ranks' updates, which such a step brings in, would be taken for this rank's own.
    """
    if getattr(_step_of(type(optimizer)), "__module__", "").startswith("torch.distributed."):
        raise ConfigError(
            f"{type(optimizer).__name__}.step() exchanges weights with other ranks, so that no rank steps by itself, "
            f"but {what_for}: wrap the optimizer that is inside it, or let gradients travel"
        )


def _step_of(kind: type[Optimizer]) -> Any:
    """The function `step` as its class defines it, without the wrappers of torch and dgcopt."""
    return inspect.unwrap(kind.step)
