"""Hooks around each step of an optimizer, with or without a closure, for a compressor that takes over part of it."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable
from typing import Any, TypeAlias

from torch import Tensor
from torch.optim import Optimizer

from ..compressors import Compressor
from ..flat.gradient import HiddenGradients

__all__ = ["Call", "Closure", "StepHooks"]

Call: TypeAlias = tuple[tuple[Any, ...], dict[str, Any]]
"""Positional and keyword arguments; the first positional one is the optimizer."""

Closure: TypeAlias = Callable[[], Any]
"""Makes gradients anew, and returns the loss."""


class StepHooks:
    """The hooks around the steps of one optimizer.

    Args:
        optimizer: the optimizer that steps.
        compressor: takes over a part of the step (`Compressor.before_step`).
    """

    def __init__(self, optimizer: Optimizer, compressor: Compressor) -> None:
        self.optimizer = optimizer
        self.compressor = compressor
        self._hidden = HiddenGradients()

    def before_step(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Call | None:
        """Prepare the step; if it has a closure, return arguments whose closure prepares it."""
        closure = args[1] if len(args) > 1 else kwargs.get("closure")
        if closure is None:
            self.prepare_step()
            return None
        prepared = functools.partial(self.run_closure, closure)
        return ((args[0], prepared, *args[2:]), kwargs) if len(args) > 1 else (args, {**kwargs, "closure": prepared})

    def prepare_step(self) -> None:
        """Act on the gradients of a step without a closure."""
        raise NotImplementedError

    def run_closure(self, closure: Closure) -> Any:
        """Run the closure of a step, act on its gradients, and return its loss."""
        loss = closure()
        self.prepare_step()
        return loss

    def take_over(self) -> Iterable[Tensor]:
        """Let the compressor take over its part of the step; return the parameters that it has stepped."""
        return self.compressor.before_step(self.optimizer) or ()

    def undo_changes(self) -> None:
        """Undo all temporary changes after a step."""
        self._hidden.show()
        self.compressor.after_step(self.optimizer)
