"""FP16 and BF16: messages of an inner compressor in 16 bits."""

from __future__ import annotations

from collections.abc import Hashable
from typing import ClassVar

import torch
from torch import Tensor

from ...collectives import AllReduce, Collective, Exchange, ReduceScatter, carried
from ...errors import ConfigError
from ..base import Compressor, GradientExchange
from ..context import Context
from ..dense import NoCompression, checked_sum
from .adasum import Adasum
from .base import Wrapper

__all__ = ["BF16", "FP16"]

WIDE = (torch.float32, torch.float64)


class _Half(Wrapper):
    """Rounds float32 and float64 messages to 16 bits; other dtypes are sent unchanged."""

    dtype: ClassVar[torch.dtype]

    def __init__(self, inner: Compressor | None = None) -> None:
        super().__init__(inner)
        if any(isinstance(part, Adasum) for part in self.inner.parts()):
            raise ConfigError(
                f"{type(self).__name__} cannot wrap Adasum: it would round received updates but not this rank's own, "
                f"so replicas would diverge. Use Adasum({self.dtype}), which rounds both"
            )

    def adds_up(self, kind: Hashable) -> bool:
        return self.inner.adds_up(kind)

    def exchange(self, grad: Tensor, ctx: Context) -> GradientExchange:
        def rounded(collective: Collective) -> Exchange:
            message = collective.tensor
            if message.dtype not in WIDE:
                return self._checked((yield collective), collective, ctx)
            size = {"world": ctx.size, "node": ctx.place.local_size}.get(collective.group)
            if isinstance(collective, AllReduce | ReduceScatter) and collective.op == "average" and size:
                # divide before rounding, so that the sum over many ranks stays in range
                message.div_(size)
                collective.sum_divided()
            # reuse buffers: page faults of fresh memory would cost more than the rounding
            buffers = ctx.scratch.setdefault("rounded", {})
            if message.shape not in buffers:
                buffers[message.shape] = torch.empty(message.shape, dtype=self.dtype, device=message.device)
            collective.send(buffers[message.shape].copy_(message))
            result = self._checked((yield collective), collective, ctx)
            return message.copy_(result) if isinstance(collective, AllReduce) else result.to(message.dtype)

        return (yield from carried(self.inner.exchange(grad, ctx), rounded))

    def _checked(self, result: Tensor, collective: Collective, ctx: Context) -> Tensor:
        """Return a result; abort the step on all ranks if it is a sum that exceeds float16."""
        is_sum = isinstance(collective, AllReduce) and collective.op in ("sum", "average")
        return checked_sum(result, ctx) if is_sum and collective.group == "world" else result

    def payload_bytes(self, ctx: Context) -> int | None:
        if isinstance(self.inner, NoCompression):
            return ctx.numel * min(ctx.dtype.itemsize, 2)
        return None  # unknown: depends on the dtypes of the inner messages


class FP16(_Half):
    """Rounds the messages of `inner` to float16: 2 bytes per number, 11 bits of precision, values up to 65504.

    `FP16()` is dense training in half the bytes, `FP16(PowerSGD())` sends factors in half the bytes. Rounding errors
    are lost unless the inner compressor's error feedback accounts for the arrived values. Like `fp16_compress_hook` and
    `fp16_compress_wrapper` of torch's DDP communication hooks, except that the inner compressor computes in float32.

    Without `inner`, gradients to be averaged are divided before the sum, so their mean may reach 65504. With op="sum",
    or around PowerSGD, the sum over ranks may. Beyond that it is Inf, and no rank takes the step.

    Costs as much as `inner`, at 2 bytes per number. Prefer BF16 if gradients may exceed 65504.

    Args:
        inner: the compressor of the rounded messages; None is NoCompression.
    """

    dtype = torch.float16


class BF16(_Half):
    """Rounds the messages of `inner` to bfloat16: 2 bytes per number, 8 bits of precision, float32's range.

    The dense baseline for speed. Like `bf16_compress_hook` and `bf16_compress_wrapper` of torch's DDP communication
    hooks, but not limited to NCCL.

    Costs as much as `inner`, at 2 bytes per number. Prefer FP16 if gradients are known to stay in its range.

    Args:
        inner: the compressor of the rounded messages; None is NoCompression.
    """

    dtype = torch.bfloat16
