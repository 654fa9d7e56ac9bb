"""Modules of torch's DistributedDataParallel, to which nothing leads from a parameter or a communication hook."""

from __future__ import annotations

import gc
from typing import Any

from torch import Tensor
from torch.nn.parallel import DistributedDataParallel

__all__ = ["all_modules", "uncounted_parameters"]


def all_modules() -> list[DistributedDataParallel]:
    """All living ones, subclasses too: the garbage collector knows that each refers to its class.

    It looks through all that is alive, for milliseconds: so all classes are asked for at once.
    """
    classes: list[Any] = [DistributedDataParallel]
    for each in classes:  # which grows on the way
        classes += each.__subclasses__()
    return [each for each in gc.get_referrers(*classes) if type(each) in classes]


def uncounted_parameters(hook_state: Any) -> set[Tensor]:
    """The parameters of a first backward pass in which every bucket is said to be the first, and none the last.

    With `static_graph` DDP calls the hook for all buckets at the end of its first pass, and does not count them (torch
    2.13, `Reducer::delay_all_reduce`). Empty where it counts them.
    """
    for module in all_modules():
        if module.static_graph and any(state is hook_state for _, state in module._comm_hooks):
            ignored = module.parameters_to_ignore
            named = module.module.named_parameters()
            return {param for name, param in named if param.requires_grad and name not in ignored}
    return set()
