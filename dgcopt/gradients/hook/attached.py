"""The optimizer behind DistributedDataParallel, with steps that a compressor takes over in part."""

from __future__ import annotations

import functools
import weakref
from collections.abc import Callable
from typing import Any
from weakref import WeakKeyDictionary, WeakSet

from torch import Tensor
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_post_hook

from ...compressors import Compressor
from ...errors import ConfigError
from ...exchange.untraced import untraced
from ...flat.gradient import HiddenGradients
from ..step_hooks import Call, Closure, with_closure

__all__ = ["AttachedOptimizer", "parameters_of"]


class AttachedOptimizer:
    """Runs `Compressor.before_step` and `after_step` around each step of an optimizer.

    Args:
        optimizer: the one that steps.
        compressor: takes over a part of its step.
        is_alone: returns True if there is only one rank, so that nothing is exchanged.
        averaged: returns the parameters that DDP has averaged so far.
        names: the names of all its parameters.

    Until it has stepped, another optimizer that steps the same parameters is a ConfigError. So is a parameter that no
    hook has averaged, if the compressor takes momentum over from it, or the step.

    Attributes:
        is_due: True if gradients have been exchanged since its last step.
    """

    def __init__(
        self,
        optimizer: Optimizer,
        compressor: Compressor,
        is_alone: Callable[[], bool],
        averaged: Callable[[], set[Tensor]],
        names: dict[Tensor, str],
    ) -> None:
        self.optimizer = optimizer
        self.compressor = compressor
        self.is_alone = is_alone
        self.averaged = averaged
        self.names = names
        self.is_due = False
        self._hidden = HiddenGradients()
        self._watch = register_optimizer_step_post_hook(functools.partial(_after_any_step, weakref.ref(self)))
        self._hooks = [
            optimizer.register_step_pre_hook(untraced(self._before_step)),
            optimizer.register_step_post_hook(untraced(self._after_step)),
            self._watch,
        ]
        weakref.finalize(self, self._watch.remove).atexit = False
        _OF.setdefault(optimizer, WeakSet()).add(self)

    @property
    def params(self) -> set[Tensor]:
        """All parameters of the optimizer, those of groups that were added since it was attached too."""
        return parameters_of(self.optimizer)

    def expect_step(self) -> None:
        """Record that gradients have been exchanged for a coming step."""
        self.is_due = True

    def detach(self) -> None:
        """Remove all hooks from the optimizer."""
        for hook in self._hooks:
            hook.remove()
        _OF[self.optimizer].discard(self)

    def notice(self, other: Optimizer) -> None:
        """Raise ConfigError if another optimizer of the same parameters has stepped in its place."""
        if other is not self.optimizer and not parameters_of(other).isdisjoint(self.averaged()):
            raise ConfigError(
                f"{type(other).__name__} has stepped parameters of DDP, but ddp_hook was given another optimizer, "
                f"which has never stepped: momentum that the compressor takes over would be applied twice. Give "
                f"ddp_hook the optimizer that steps, or call state.attach(optimizer) with it before the first backward "
                f"pass."
            )

    def _before_step(self, optimizer: Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Call | None:
        """Run `Compressor.before_step` once gradients exist: now, or after the closure."""
        self._watch.remove()
        closure = args[1] if len(args) > 1 else kwargs.get("closure")
        if closure is not None:
            return with_closure(args, kwargs, functools.partial(self._run_closure, closure))
        self._prepare_step()
        return None

    def _run_closure(self, closure: Closure) -> Any:
        loss = closure()
        self._prepare_step()
        return loss

    def _prepare_step(self) -> None:
        if self.is_alone():
            return
        if not self.averaged() and any(param.grad is not None for param in self.params):
            raise ConfigError(
                f"{type(self.optimizer).__name__} steps, but DDP has not called the hook that ddp_hook made for it, so "
                f"DDP averages gradients without {type(self.compressor).__name__}: call "
                f"ddp_model.register_comm_hook(state, hook) before the first backward pass"
            )
        others = self._not_averaged()
        before = self._settings_of(others)
        stepped = set(self.compressor.before_step(self.optimizer) or ())
        if before != self._settings_of(others) or not stepped.isdisjoint(others):
            self.compressor.after_step(self.optimizer)
            raise ConfigError(
                f"the optimizer given to ddp_hook steps parameter {self.names.get(others[0], '')!r} too, whose "
                f"gradient no ddp_hook averages, and {type(self.compressor).__name__} would take its momentum away. "
                f"Give all parameters that are not in DistributedDataParallel an optimizer of its own"
            )
        self._hidden.hide(stepped)

    def _not_averaged(self) -> list[Tensor]:
        """Return the parameters about to be stepped that no hook of this optimizer has averaged."""
        averaged = {param for attached in _OF[self.optimizer] for param in attached.averaged()}
        groups = self.optimizer.param_groups
        return [p for group in groups for p in group["params"] if p.grad is not None and p not in averaged]

    def _settings_of(self, params: list[Tensor]) -> list[list[Any]]:
        """Return the settings of their parameter groups."""
        wanted = set(params)
        return [
            [value for key, value in group.items() if key != "params"]
            for group in self.optimizer.param_groups
            if not wanted.isdisjoint(group["params"])
        ]

    def _after_step(self, optimizer: Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        self.is_due = False
        if not self.is_alone():
            self._hidden.show()
            self.compressor.after_step(self.optimizer)


_OF: WeakKeyDictionary[Optimizer, WeakSet[AttachedOptimizer]] = WeakKeyDictionary()
"""Several models in DDP may have one optimizer."""


def parameters_of(optimizer: Optimizer) -> set[Tensor]:
    """Return all parameters of an optimizer."""
    return {param for group in optimizer.param_groups for param in group["params"]}


def _after_any_step(attached: weakref.ref[AttachedOptimizer], other: Optimizer, args: Any, kwargs: Any) -> None:
    """Check every optimizer's step until the attached one has taken its first."""
    mine = attached()
    if mine is not None:
        mine.notice(other)
