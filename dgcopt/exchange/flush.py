"""The end of a warm-up by gradients: residuals are sent whole, since no exchange follows."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from ..collectives import AllReduce
from ..compressors import Compressor, Context
from ..flat.gradient import GradientBucket
from .runner import Job
from .scheduler import CollectiveScheduler, PendingExchange
from .vote import used_anywhere

__all__ = ["flush_residuals"]


def flush_residuals(
    exchanges: Sequence[PendingExchange[GradientBucket | Tensor]],
    contexts: dict[GradientBucket, Context],
    used: dict[Tensor, bool] | None,
    compressor: Compressor,
    scheduler: CollectiveScheduler,
) -> Job:
    """Send the residuals left after the step's exchanges, and add them to the results of `exchanges`.

    Args:
        exchanges: finished exchanges whose memory is committed and whose results are not written back.
        contexts: the memory of each bucket, without residuals afterwards.
        used: True for parameters with a gradient on some rank, None if all have one. Parameters that receive a
            residual become True.
        compressor: turns a residual into the gradient to add.
        scheduler: starts its collectives.
    """
    rests = {bucket: context.memory.take_unsent() for bucket, context in contexts.items()}
    here = [rest is not None and bool(s.view(rest).any()) for bucket, rest in rests.items() for s in bucket.segments]
    there = iter((yield from scheduler.through(used_anywhere(here, "unsent"))))
    for pending in exchanges:
        if isinstance(pending.of, Tensor):
            continue
        bucket, context, rest = pending.of, contexts[pending.of], rests[pending.of]
        held = [next(there) for _ in bucket.segments]
        if not any(held):
            continue
        mine = bucket.empty() if rest is None else compressor.as_gradient(rest, context).to(context.dtype)
        label = f"residual of {pending.label}"
        mean = yield scheduler.start(AllReduce(mine * context.place.prescale, op=context.op), label)
        assert pending.result is not None
        result = context.dense(pending.result)
        for segment, is_held in zip(bucket.segments, held, strict=True):
            if used is not None and not used[segment.param]:
                result[segment.start : segment.stop] = 0
                used[segment.param] = is_held
        pending.replace_result(result.add_(mean))
