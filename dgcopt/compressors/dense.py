"""Dense exchanges: every coordinate, as it is or rounded to 16 bits."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from ..collectives import AllReduce, Exchange
from .base import Compressor, Context

__all__ = ["BF16", "FP16", "NoCompression"]


@dataclass(eq=False)
class NoCompression(Compressor):
    """The plain averaged gradient: one allreduce per bucket, 4 bytes per float32 parameter."""

    carrier = AllReduce

    def compress(self, grad: Tensor, ctx: Context) -> Tensor:
        return grad

    def decompress(self, payloads: Tensor, ctx: Context) -> Tensor:
        return payloads


@dataclass(eq=False)
class _Half(Compressor):
    """Rounded to 16 bits for one allreduce; gradients of 16 bits travel as they are."""

    dtype: ClassVar[torch.dtype]

    def exchange(self, grad: Tensor, ctx: Context) -> Exchange:
        if grad.element_size() <= 2:
            return (yield AllReduce(grad, op=ctx.op))
        # divided before rounding, so that the sum over many ranks stays in range
        total = yield AllReduce(grad.div_(ctx.divisor).to(self.dtype), op="sum")
        return grad.copy_(total)


class FP16(_Half):
    """Gradients rounded to float16 on the wire: 2 bytes per parameter, 11 bits of precision, values up to 65504."""

    dtype = torch.float16


class BF16(_Half):
    """Gradients rounded to bfloat16 on the wire: 2 bytes per parameter, 8 bits of precision, float32's range."""

    dtype = torch.bfloat16
