"""Batch norm's running statistics, and a model's other buffers, alike on all ranks."""

from __future__ import annotations

from torch import nn
from torch.optim import Optimizer

from .averaging import AsyncAverage, Rounds
from .errors import ConfigError
from .exchange.buffers import Buffers, How
from .gradients.optimizer import Distributed

__all__ = ["sync_buffers"]


def sync_buffers(model: nn.Module, optimizer: Optimizer, every: int = 1, how: How = "broadcast") -> None:
    """From now on keep the buffers of `model` alike on the ranks that step together, as DDP's `broadcast_buffers` does.

        optimizer = dgcopt.DistributedOptimizer(optimizer, model.named_parameters(), dgcopt.DGC())
        dgcopt.sync_buffers(model, optimizer)

    They are exchanged in the optimizer's step, after the gradients, so that any number of forward passes may come
    before it, and nothing where no rank takes the step. Where ranks run out of data (`dgcopt.join`, torch's Join) those
    that have some give theirs, so the last ones to join say what all end with. An optimizer whose weights are averaged
    (`dgcopt.averaging`) exchanges them before the weights, with those exchanges of weights that come at a multiple of
    `every` steps, and in `optimizer.averaging.average()`; all ranks meet for it, also where weights go to some ranks
    only, so there a larger `every` pays.

    Args:
        model: all its buffers are meant, in one order on all ranks, those that are not saved with it too.
        optimizer: the one that steps its parameters, which DistributedOptimizer or an averaging algorithm has returned.
        every: steps between exchanges. Between them each rank's own statistics go on.
        how: "broadcast", rank 0's for all, or those of the first rank that has data; or "mean", of floating-point
            buffers the mean over ranks that have data, of others, such as `num_batches_tracked`, rank 0's. Means use
            all ranks' batches; the mean of variances leaves out how far the ranks' means are apart, which
            `torch.nn.SyncBatchNorm` takes in, at an exchange in each layer.

    Costs a gather of a byte per rank, and the bytes of the buffers: a broadcast of all, or for "mean" an allreduce of
    those with floating point and a broadcast of the others. Counted by `optimizer.telemetry`. Nothing before the first
    step is done: `dgcopt.broadcast_parameters(model.state_dict())` does that.

    Raises ConfigError for an optimizer that is not distributed, or AsyncAverage, whose ranks never meet in a step; for
    a model without buffers; and for settings out of range. In the first step: MismatchError, on all ranks, if buffers
    or settings differ.
    """
    buffers = Buffers(model, every, how)
    averaging: Rounds | None = getattr(optimizer, "averaging", None)
    if averaging is None and not isinstance(optimizer, Distributed):
        raise ConfigError(
            "sync_buffers takes an optimizer that DistributedOptimizer, or an averaging algorithm, returned; "
            "DistributedDataParallel does it by itself (broadcast_buffers)"
        )
    if averaging is not None:
        if isinstance(averaging.rule, AsyncAverage):
            raise ConfigError(
                "AsyncAverage exchanges weights in a thread, and its ranks meet in no step in which buffers could be "
                "exchanged. After optimizer.averaging.abort(), on all ranks, "
                "dgcopt.broadcast_parameters(dict(model.named_buffers())) makes them alike"
            )
        averaging.buffers = buffers
    if isinstance(optimizer, Distributed):
        optimizer.wrapped.buffers = buffers
