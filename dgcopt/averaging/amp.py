"""Steps of `torch.amp.GradScaler`, made or skipped for Inf, with an optimizer whose weights are averaged."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor
from torch.optim import Optimizer

from ..flat.gradient import HiddenGradients, values_of

__all__ = ["ScaledSteps"]


class ScaledSteps:
    """Unscaling and skipping in place of `GradScaler.step`, so that a step skipped on some ranks counts on all."""

    def __init__(self, optimizer: Optimizer) -> None:
        self._optimizer = optimizer
        self._scales_itself = bool(vars(optimizer).get("_step_supports_amp_scaling"))
        vars(optimizer)["_step_supports_amp_scaling"] = True
        self._hidden = HiddenGradients()
        self._skips = False

    @torch.no_grad()
    def before_step(self, params: Iterable[Tensor]) -> None:
        """Unscale gradients, or hide them from a step that must be skipped."""
        if self._skips:  # an exception ended the skipped step: its gradients are stale
            self._hidden, self._skips = HiddenGradients(), False
        found, scale = (getattr(self._optimizer, name, None) for name in ("found_inf", "grad_scale"))
        if self._scales_itself or found is None:
            return
        graded = {param: param.grad for param in params if param.grad is not None}
        if found.item():
            self._skips = True
            self._hidden.hide(graded)
        elif scale is not None:
            for values in map(values_of, graded.values()):
                values.mul_(scale.double().reciprocal().float().to(values.device))
        vars(self._optimizer).update(found_inf=None, grad_scale=None)  # torch refuses them unless fused

    def after_step(self) -> None:
        """Show the gradients of a skipped step again."""
        if self._skips:
            self._skips = False
            self._hidden.show()
