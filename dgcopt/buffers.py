"""Synchronisation of a model's buffers, such as BatchNorm statistics."""

from __future__ import annotations

from torch import nn
from torch.optim import Optimizer

from .averaging import AsyncAverage, Rounds
from .errors import ConfigError
from .exchange.buffers import Buffers, How
from .exchange.held import held
from .gradients.optimizer import synchronised

__all__ = ["sync_buffers"]


def sync_buffers(model: nn.Module, optimizer: Optimizer, every: int = 1, how: How = "broadcast") -> None:
    """Keep the buffers of `model` equal on all ranks from now on, like DDP's `broadcast_buffers`.

        optimizer = dgcopt.DistributedOptimizer(optimizer, model.named_parameters(), dgcopt.DGC())
        dgcopt.sync_buffers(model, optimizer)

    Buffers are exchanged in the optimizer's step, after the gradients, for any number of forward passes before it;
    a skipped step exchanges none. If ranks run out of data (`dgcopt.join`, torch's Join), ranks with data send theirs,
    so all end with the buffers of the last rank with data. With `dgcopt.averaging`, buffers are exchanged before the
    weights in rounds at multiples of `every` steps, and in `optimizer.averaging.average()`. All ranks take part, even
    in gossip, for which a larger `every` saves time.

    Args:
        model: the model; all its buffers are exchanged, non-persistent ones too, in the same order on all ranks.
        optimizer: the optimizer of its parameters, from DistributedOptimizer or an averaging algorithm.
        every: steps between exchanges. In between each rank updates its own statistics.
        how: "broadcast" sends the buffers of rank 0, or of the first rank with data. "mean" averages floating-point
            buffers over ranks with data and broadcasts others, such as `num_batches_tracked`. The mean of variances
            ignores the spread of the ranks' means; `torch.nn.SyncBatchNorm` includes it, at an exchange per layer.

    Costs a gather of a byte per rank and the bytes of the buffers: a broadcast of all, or for "mean" an allreduce of
    floating-point buffers and a broadcast of others. Counted by `optimizer.telemetry`. Before the first step call
    `dgcopt.broadcast_parameters(model.state_dict())`.

    Raises ConfigError for an optimizer that is not distributed; for AsyncAverage, whose ranks never meet in a step; for
    a model without buffers; and for settings out of range. In the first step: MismatchError on all ranks if buffers or
    settings differ.
    """
    buffers = Buffers(model, every, how)
    averaging: Rounds | None = held(optimizer).averaging
    steps = synchronised(optimizer)
    if averaging is None and steps is None:
        raise ConfigError(
            "sync_buffers takes an optimizer from DistributedOptimizer or an averaging algorithm; "
            "DistributedDataParallel synchronises buffers itself (broadcast_buffers)"
        )
    if averaging is not None:
        if isinstance(averaging.rule, AsyncAverage):
            raise ConfigError(
                "AsyncAverage exchanges weights in a thread, so ranks meet in no step that could exchange buffers. "
                "Call optimizer.averaging.abort() and then dgcopt.broadcast_parameters(dict(model.named_buffers())) on "
                "all ranks."
            )
        averaging.sync_buffers(buffers)
    if steps is not None:
        steps.wrapped.sync_buffers(buffers)
