"""Any compressor inside torch's DistributedDataParallel, as a communication hook.

DDP calls the hook once per bucket, in one order on all ranks, while backward runs. Each call takes the bucket's
gradients and starts their exchange up to its first collective. The call for the last bucket finishes the step: a vote
(`dgcopt.exchange.vote`), then all exchanges in bucket order (`dgcopt.exchange.scheduler`), then the results in DDP's
own memory.
"""

from collections.abc import Callable, Iterable, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.futures import Future
from torch.optim import Optimizer

from ...comm import Comm, current_comm
from ...errors import ConfigError
from ...exchange.parameters import given_names
from .state import HookState

if TYPE_CHECKING or torch.distributed.is_available():
    from torch.distributed import GradBucket
else:
    GradBucket = Any

__all__ = ["HookState", "ddp_hook", "exchange_bucket"]

Hook = Callable[[HookState, GradBucket], Future[Tensor]]


def ddp_hook(
    compressor: HookState | Any = None,
    optimizer: Optimizer | None = None,
    named_parameters: Iterable[tuple[str, Tensor]] | None = None,
    comm: Comm | None = None,
    scaler: Any = None,
    may_differ: Sequence[str] = (),
) -> tuple[HookState, Hook]:
    """Return the arguments of DistributedDataParallel's `register_comm_hook`: DDP then sends gradients by `compressor`.

        ddp_model.register_comm_hook(*dgcopt.ddp_hook(dgcopt.DGC(ratio=0.001), optimizer))

    Args:
        compressor: the compressor of gradients, copied; None sends them uncompressed. Or a restored `HookState`, which
            receives by this call the arguments that a pickle cannot hold.
        optimizer: the optimizer that steps the model's parameters, not wrapped by dgcopt. With it, DGC takes momentum
            and weight decay over from SGD, as in its paper. Without it, DGC is plain error feedback in front of the
            optimizer's own momentum. If the optimizer is made later, call `state.attach(optimizer)`.
        named_parameters: `model.named_parameters()`, for errors and stored state that name parameters. None numbers
            them, by the optimizer's groups or else in the order in which DDP's first buckets hold them.
        comm: the wire; None is the one of `dgcopt.init()`. It must join the ranks of DDP's process group.
        scaler: the `torch.amp.GradScaler` of the loop. With it memory holds unscaled gradients; without it residuals
            are wrong by a factor after each change of the scale.
        may_differ: settings of the optimizer's parameter groups, such as `("lr",)`, that differ between ranks on
            purpose. All others are compared at every step; tensors on an accelerator before the first step only.

    Costs the compressor's cost, a message of 44 bytes per step for the vote, and one pass over the gradients to check
    that they are finite. If they are not finite on some rank, every rank's gradients become NaN, so that all scalers
    skip the step, and no memory changes. In DDP's `join()` averages divide by all ranks or, with
    `divide_by_initial_world_size=False`, by those with data. In a single process DDP is unchanged. A parameter that
    is unused on all ranks keeps its value and its residual if its `grad` is None; if that is zero, as after
    `zero_grad(set_to_none=False)`, it takes its step, as in dense training.

    Raises ConfigError for compressors that send updates (DDP exchanges gradients), a distributed optimizer, or names
    that do not fit. In backward passes: MismatchError, on all ranks, if they differ in compressor, settings or
    parameters; errors of the wire, such as TimeoutExceeded, naming rank and bucket; ConfigError if a restored state
    does not belong to this rank or model, or if the wire has another number of ranks than DDP's process group.
    """
    if scaler is not None and not hasattr(scaler, "get_scale"):
        raise ConfigError(f"scaler must be the loop's torch.amp.GradScaler, not {scaler!r:.200}")
    wire = None if comm is None else current_comm(comm)
    if wire is not None and wire.survives:
        raise ConfigError(
            "DistributedDataParallel does not support dgcopt.init(survive=True): use dgcopt.DistributedOptimizer "
            "without DDP"
        )
    state = compressor if isinstance(compressor, HookState) else HookState(compressor)
    state.use(given_names(named_parameters), wire, scaler, may_differ)
    if optimizer is not None:
        state.attach(optimizer)
    return state, exchange_bucket


def exchange_bucket(state: HookState, bucket: GradBucket, *_: Tensor) -> Future[Tensor]:
    """Exchange one of DDP's buckets; return a future of its averaged gradients.

    Raises ConfigError for the argument that FullyShardedDataParallel hands to its hooks.
    """
    if isinstance(bucket, Tensor):
        raise ConfigError(
            "ddp_hook is for DistributedDataParallel, and this is the gradient of a FullyShardedDataParallel module: "
            "sharded parameters are not supported yet. Put the plain module in DistributedDataParallel"
        )
    if not isinstance(state, HookState):
        raise ConfigError(
            f"DDP has not been given both that ddp_hook returns: register_comm_hook(*dgcopt.ddp_hook(...)), not "
            f"{state!r:.80}"
        )
    return state.exchange(bucket)
