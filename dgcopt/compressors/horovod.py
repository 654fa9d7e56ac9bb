"""Horovod's own compression objects, such as `hvd.Compression.fp16`, as compressors."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from ..collectives import AllReduce, Exchange
from ..errors import ConfigError
from .base import Compressor, Context
from .dense import NoCompression
from .half import FP16

__all__ = ["HorovodCompression", "accept"]


class HorovodCompression(Compressor):
    """A class with static `compress(tensor) -> (tensor, ctx)` and `decompress(tensor, ctx) -> tensor`.

    What `compress` returns travels by one allreduce, so it must add up.
    """

    def __init__(self, compression: Any) -> None:
        self.compression = compression

    def __repr__(self) -> str:
        name = getattr(self.compression, "__qualname__", type(self.compression).__qualname__)
        return f"HorovodCompression({name})"

    def exchange(self, grad: Tensor, ctx: Context) -> Exchange:
        message, context = self.compression.compress(grad)
        total = yield AllReduce(message, op=ctx.op)
        return self.compression.decompress(total, context)


def accept(compression: Any) -> Compressor:
    """A compressor from what the user gave: one of ours, or Horovod's. Raises ConfigError for anything else."""
    if isinstance(compression, Compressor):
        return compression
    module, name = getattr(compression, "__module__", ""), getattr(compression, "__name__", "")
    if module == "horovod.torch.compression" and name in ("NoneCompressor", "FP16Compressor"):
        return NoCompression() if name == "NoneCompressor" else FP16()
    if callable(getattr(compression, "compress", None)) and callable(getattr(compression, "decompress", None)):
        if isinstance(compression, type) and issubclass(compression, Compressor):
            raise ConfigError(f"compression must be an instance: {compression.__name__}(), not {compression.__name__}")
        return HorovodCompression(compression)
    raise ConfigError(
        f"compression must be a dgcopt.Compressor such as dgcopt.DGC(), or Horovod's hvd.Compression.none or fp16, not "
        f"{compression!r}"
    )
