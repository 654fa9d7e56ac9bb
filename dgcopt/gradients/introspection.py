"""Facts without a public interface in torch or Horovod, read from the garbage collector and from call stacks.

Every docstring says why no public interface suffices.
"""

from __future__ import annotations

import gc
import sys
import threading
from collections.abc import Collection, Iterable
from types import FrameType
from typing import Any

import torch
from torch import Tensor
from torch.nn.parallel import DistributedDataParallel

__all__ = [
    "all_ddp_modules",
    "backward_pass",
    "broadcasting_root",
    "ddp_module_without_data",
    "ddp_modules_of_hook",
    "is_sharded_elsewhere",
    "scaler_flags",
    "uncounted_parameters",
    "user_backward_call",
]

_BACKWARD = torch.autograd.backward.__code__
_NODE = torch.autograd.function.BackwardCFunction.apply.__code__
_SCALER_STEP = torch.amp.GradScaler.step.__code__


def is_sharded_elsewhere(params: Iterable[Tensor]) -> bool:
    """True if a living module that `fully_shard` has sharded has parameters of just these shapes.

    It replaces the parameters of a module, and neither they nor those before refer to it.
    """
    fsdp = sys.modules.get("torch.distributed.fsdp")
    shapes = sorted(tuple(param.shape) for param in params)
    return fsdp is not None and any(
        shapes == sorted(tuple(param.shape) for param in module.parameters() if hasattr(param, "device_mesh"))
        for module in _instances(fsdp.FSDPModule.__subclasses__())
    )


def _instances(classes: list[Any]) -> list[Any]:
    """Return all living instances of these classes and of their subclasses, of which no class keeps a list.

    The garbage collector knows that each refers to its class. It searches all living objects, which takes 0.1 s and
    more, so all classes are searched for at once, and not at all if there are none.
    """
    for each in classes:  # grows during the loop
        classes += each.__subclasses__()
    return [each for each in gc.get_referrers(*classes) if type(each) in classes] if classes else []


# -- modules of DistributedDataParallel ------------------------------------------------------------------------------


def all_ddp_modules() -> list[DistributedDataParallel]:
    """Return all living DistributedDataParallel modules, including subclasses.

    Neither a parameter nor a communication hook refers to its module, and torch keeps no list. A registry of our own
    would miss modules that exist before dgcopt is imported.
    """
    return _instances([DistributedDataParallel])


def ddp_modules_of_hook(hook_state: Any) -> list[DistributedDataParallel]:
    """Return the modules that have this hook state; none if it is wrapped in a user's state."""
    return [module for module in all_ddp_modules() if any(state is hook_state for _, state in module._comm_hooks)]


def uncounted_parameters(hook_state: Any, params: Iterable[Tensor]) -> set[Tensor]:
    """Return all parameters of a first backward pass in which each bucket is said to be the first and none the last.

    With `static_graph` DDP calls the hook for all buckets at the end of its first pass (torch 2.13,
    `Reducer::delay_all_reduce`). `params` are some of them, by which the module is found if the hook's state is wrapped
    in a user's. Empty if no module is.
    """
    modules = [m for m in all_ddp_modules() if m.static_graph and {*params} <= {*m.module.parameters()}]
    modules.sort(key=lambda m: all(state is not hook_state for _, state in m._comm_hooks))
    for module in modules:
        named, ignored = module.module.named_parameters(), module.parameters_to_ignore
        return {param for name, param in named if param.requires_grad and name not in ignored}
    return set()


def backward_pass() -> int:
    """Return the number of the running backward pass; -1 outside of any. Hooks of DDP are not told."""
    return torch._C._current_graph_task_id()


def ddp_module_without_data(params: Collection[Tensor]) -> DistributedDataParallel | None:
    """Return the module of `params` if its `join()` calls the hook for a rank that is out of data; else None.

    DDP gives its hooks no sign of that, but it calls them outside of any backward pass.
    """
    if backward_pass() >= 0:
        return None
    return next((module for module in all_ddp_modules() if {*params} <= {*module.parameters()}), None)


# -- callers ---------------------------------------------------------------------------------------------------------


def user_backward_call() -> FrameType | None:
    """Return the frame of the user's running `backward()`, not of one that an autograd function calls within it.

    Autograd numbers both alike. Hooks run on the stack of that call, or in a thread of autograd's own, as on CUDA.
    """
    stacks = sys._current_frames()
    for frame in (stacks.pop(threading.get_ident(), None), *stacks.values()):
        call = None
        while frame is not None:
            if frame.f_code is _BACKWARD:
                call = frame
            elif frame.f_code is _NODE:
                call = None
            frame = frame.f_back
        if call is not None:
            return call
    return None


def broadcasting_root() -> int | None:
    """Return the root rank if Horovod's `broadcast_optimizer_state` calls an optimizer's `state_dict()`; else None.

    Horovod calls it like any user, and its own broadcast hangs if ranks keep different memory for a parameter.
    """
    theirs = sys.modules.get("horovod.torch.functions")
    frame = sys._getframe(2)
    while frame.f_back is not None and (_is_torchs(frame) or frame.f_code.co_name == "state_dict"):
        frame = frame.f_back
    if theirs is None or frame.f_code is not theirs.broadcast_optimizer_state.__code__:
        return None
    return int(frame.f_locals["root_rank"])


def _is_torchs(frame: FrameType) -> bool:
    return str(frame.f_globals.get("__name__", "")).startswith("torch.")


# -- GradScaler ------------------------------------------------------------------------------------------------------


def scaler_flags() -> list[Tensor]:
    """Return the flags, one per device, by which a GradScaler in its `step` skips it, if it has unscaled before.

    `unscale_` checks for Inf before ranks can agree, and the optimizer has no reference to the scaler. Empty elsewhere.
    """
    frame: FrameType | None = sys._getframe(1)
    while frame is not None and frame.f_code is not _SCALER_STEP:
        frame = frame.f_back
    return [] if frame is None else [*frame.f_locals["optimizer_state"]["found_inf_per_device"].values()]
