"""SGD's step at the coordinates that arrived, for gradients that are zero elsewhere."""

from __future__ import annotations

from collections.abc import Iterable

import torch
import torch.optim.optimizer as torch_optimizer
from torch import Tensor
from torch.optim import SGD, Optimizer

from ..flat.gradient import Touched
from ..flat.local_shard import as_stepped
from ..kernels import step_at

__all__ = ["step_touched"]


@torch.no_grad()
def step_touched(optimizer: Optimizer, touched: Iterable[Touched]) -> list[Tensor]:
    """Take SGD's step, w <- w - lr g, at the `touched` positions only.

    Only for SGD itself, where it has neither momentum nor weight decay to apply (DGC takes its momentum over), and
    where nobody else is to see the gradients before the step. Returns the parameters that are done.
    """
    of_all = getattr(torch_optimizer, "_global_optimizer_pre_hooks", {})
    touched = list(touched)
    if not touched or of_all or len(getattr(optimizer, "_optimizer_step_pre_hooks", {})) > 1:  # one is dgcopt's own
        return []
    more = ("momentum", "weight_decay", "differentiable", "fused")  # a fused kernel may round differently
    rate = {
        param: float(group["lr"]) * (1 if group["maximize"] else -1)
        for group in optimizer.param_groups
        if isinstance(optimizer, SGD) and not any(group.get(setting) for setting in more)
        for param in group["params"]
    }
    done = []
    for left in touched:
        count = len(left.bucket.segments)
        weights: list[Tensor | None] = [None] * count
        rates = [0.0] * count
        for place, segment in left.unchanged():
            flat = segment.flatten(segment.param)
            param = segment.param if segment.param in rate else as_stepped(segment.param)
            if param in rate and flat.data_ptr() == segment.param.data_ptr():
                weights[place], rates[place] = flat, rate[param]
                done.append(segment.param)
        step_at(left.bucket.parts(weights), rates, left.positions, left.values)
    return done
