"""NoCompression, the dense average; and Noop, no exchange."""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import dataclass

import torch
from torch import Tensor

from ..collectives import AllReduce
from ..kernels import peaks
from .base import Compressor, GradientExchange
from .context import Context

__all__ = ["NoCompression", "Noop", "checked_sum"]


@dataclass(eq=False)
class NoCompression(Compressor):
    """Averages dense gradients: the baseline for accuracy.

        result = mean_j g_j

    One allreduce per bucket in the gradients' dtype, without memory; all ranks receive the same bits. With op "sum"
    gradients are not divided. A sum beyond float16 is Inf, and no rank takes the step.

    Costs one allreduce of 4 bytes per float32 parameter, 2 in half precision.
    """

    carrier = AllReduce

    @property
    def conserves(self) -> bool:
        return True

    def adds_up(self, kind: Hashable) -> bool:
        return True

    def compress(self, grad: Tensor, ctx: Context) -> Tensor:
        return grad

    def decompress(self, payloads: Tensor, ctx: Context) -> Tensor:
        return checked_sum(payloads, ctx)

    def payload_bytes(self, ctx: Context) -> int:
        return ctx.numel * ctx.dtype.itemsize


def checked_sum(arrived: Tensor, ctx: Context) -> Tensor:
    """Return a sum over all ranks; abort the step on all of them if it exceeds float16, as finite addends may."""
    if arrived.dtype == torch.float16:
        ctx.checks.check_finite(peaks([arrived]))
    return arrived


@dataclass(eq=False)
class Noop(Compressor):
    """Sends no gradient, to measure the step time without communication.

    For measurements only: replicas diverge. Costs the step's vote, like every compressor: a message of 44 bytes and the
    wait for the slowest rank. `noop_hook` of torch's DDP communication hooks saves even that.
    """

    def exchange(self, grad: Tensor, ctx: Context) -> GradientExchange:
        yield from ()
        return grad

    def payload_bytes(self, ctx: Context) -> int:
        return 0
