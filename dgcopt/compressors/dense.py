"""Every coordinate, as it is; and no exchange at all."""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import dataclass

from torch import Tensor

from ..collectives import AllReduce
from .base import Compressor, GradientExchange
from .context import Context

__all__ = ["NoCompression", "Noop"]


@dataclass(eq=False)
class NoCompression(Compressor):
    """The plain averaged gradient: the reference for accuracy.

    Costs one allreduce of 4 bytes per float32 parameter.
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
        return payloads

    def payload_bytes(self, ctx: Context) -> int:
        return ctx.numel * ctx.dtype.itemsize


@dataclass(eq=False)
class Noop(Compressor):
    """Nothing is sent and every rank goes its own way: how fast a step would be if communication cost nothing.

    For measuring only; the ranks come apart. Costs the step's vote, as every compressor does: a message of 44
    bytes, and waiting for the slowest. Without even that, take `noop_hook` of torch's DDP communication hooks.
    """

    def exchange(self, grad: Tensor, ctx: Context) -> GradientExchange:
        yield from ()
        return grad

    def payload_bytes(self, ctx: Context) -> int:
        return 0
