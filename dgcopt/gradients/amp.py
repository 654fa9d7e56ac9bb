"""Automatic mixed precision: all ranks agree on an overflow before one rank's `torch.amp.GradScaler` looks for it."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor

from ..errors import ConfigError
from ..exchange.held import held
from ..flat.gradient import values_of
from .engine import Engine
from .introspection import scaler_flags
from .stepping import NOT_YET, Grads, Mode, Stepping

__all__ = ["agree_with_scaler"]


def agree_with_scaler(steps: Stepping) -> bool:
    """Agree on an overflow over ranks, before this rank's GradScaler looks for one; True if the step scales itself.

    If any rank has found NaN or Inf, every rank's scaler finds it too, skips the step and lowers its scale; or, if
    weights are averaged too (`dgcopt.averaging`), leaves it to that.
    """
    is_averaged = held(steps.optimizer).averaging is not None
    engine = steps.engine
    if engine is None or steps.mode is Mode.LOCAL:  # between averages of weights there is nothing to agree on
        return is_averaged
    engine.gradients.wait_for_vote()
    # gradients of `no_sync` passes, and those set by hand, are averaged by the step without having arrived before
    is_due = steps.mode in (Mode.EXCHANGE, Mode.ADD_UP) and any(param.grad is not None for param in steps.names)
    if is_due and steps.grads is Grads.VOID and not steps.saw_backward:
        steps.renew()
    flags = scaler_flags()
    if not engine.runner.can_ask:  # gradients of all are final if they are unscaled
        if is_due and (steps.grads in NOT_YET or engine.pending):
            if not flags:
                raise ConfigError(
                    f"rank {steps.comm.rank}: the gradients are still scaled, and the first simulated rank that "
                    f"steps sends those of all. Call scaler.unscale_(optimizer) on every rank before the first "
                    f"scaler.step(optimizer)"
                )
            steps.fix()
    elif is_due and steps.grads in NOT_YET and steps.exchange(Engine.skips_on_overflow):
        steps.skip()
    if steps.grads is Grads.VOID:
        _spoil_a_gradient(steps.names)
        for flag in flags:
            flag.fill_(1)
    return is_averaged


def _spoil_a_gradient(params: Iterable[Tensor]) -> None:
    """Give this rank's scaler a NaN to find, because another rank has one."""
    for param in params:
        values = values_of(param.grad) if param.grad is not None else torch.empty(0)
        if values.numel():
            values[(0,) * values.dim()] = torch.nan
            return
