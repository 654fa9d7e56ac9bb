"""Modules of torch's DistributedDataParallel, to which nothing leads from a parameter or a communication hook."""

from __future__ import annotations

import gc
from typing import Any

from torch import Tensor
from torch.nn.parallel import DistributedDataParallel

__all__ = ["all_modules", "module_with", "uncounted_parameters"]


def all_modules() -> list[DistributedDataParallel]:
    """All living ones, subclasses too: the garbage collector knows that each refers to its class.

    It looks through all that is alive, for milliseconds: so all classes are asked for at once.
    """
    classes: list[Any] = [DistributedDataParallel]
    for each in classes:  # which grows on the way
        classes += each.__subclasses__()
    return [each for each in gc.get_referrers(*classes) if type(each) in classes]


def module_with(hook_state: Any) -> DistributedDataParallel | None:
    """The one where this state was registered; None if there is none, or a state of the user's around it."""
    having = (m for m in all_modules() if any(state is hook_state for _, state in m._comm_hooks))
    return next(having, None)


def uncounted_parameters(hook_state: Any) -> set[Tensor]:
    """The parameters of a first backward pass in which every bucket is said to be the first, and none the last.

    With `static_graph` DDP calls the hook for all buckets at the end of its first pass, and does not count them (torch
    2.13, `Reducer::delay_all_reduce`). Empty where it counts them.
    """
    module = module_with(hook_state)
    if module is None or not module.static_graph:
        return set()
    named, ignored = module.module.named_parameters(), module.parameters_to_ignore
    return {param for name, param in named if param.requires_grad and name not in ignored}
