"""Horovod's own compression objects, such as `hvd.Compression.fp16`, as compressors."""

from __future__ import annotations

import inspect
from typing import Any

from torch import Tensor

from ..collectives import AllReduce, Exchange
from ..errors import ConfigError
from .base import NAMED, Compressor
from .context import Context
from .dense import NoCompression
from .wrappers.half import FP16

__all__ = ["HorovodCompression", "accept"]

_REMEDY = "subclass dgcopt.Compressor, see docs/compressors.md, or choose one that comes with dgcopt"


class HorovodCompression(Compressor):
    """A class with static `compress(tensor) -> (tensor, ctx)` and `decompress(tensor, ctx) -> tensor`.

    An allreduce sums the results of `compress`, so they must be additive.
    """

    def __init__(self, compression: Any) -> None:
        self.compression = compression

    def __repr__(self) -> str:
        name = getattr(self.compression, "__qualname__", type(self.compression).__qualname__)
        return f"HorovodCompression({name})"

    def exchange(self, grad: Tensor, ctx: Context) -> Exchange:
        message, context = self.compression.compress(grad)
        if not isinstance(message, Tensor):
            name = getattr(self.compression, "__name__", type(self.compression).__name__)
            raise ConfigError(
                f"{name}.compress must return one tensor, which travels by an allreduce, and a context, not "
                f"{type(message).__name__}: {_REMEDY}"
            )
        total = yield AllReduce(message, op=ctx.op)
        return self.compression.decompress(total, context)


def accept(compression: Any) -> Compressor:
    """Return the user's compressor, dgcopt's or Horovod's. Raises ConfigError for anything else."""
    if isinstance(compression, Compressor):
        kind = type(compression)
        lacks_half = kind.compress is Compressor.compress or kind.decompress is Compressor.decompress
        if kind.exchange is Compressor.exchange and lacks_half:
            raise ConfigError(f"{kind.__name__} must define exchange(), or compress() and decompress(): {_REMEDY}")
        return compression
    if isinstance(compression, str) and compression in NAMED:
        return NAMED[compression]()
    kept = getattr(compression, "compressor", None)  # of dgcopt.hvd.Compression
    if isinstance(kept, Compressor):
        return accept(kept)
    module, name = getattr(compression, "__module__", ""), getattr(compression, "__name__", "")
    if module == "horovod.torch.compression" and name in ("NoneCompressor", "FP16Compressor"):
        return NoCompression() if name == "NoneCompressor" else FP16()
    if callable(getattr(compression, "compress", None)) and callable(getattr(compression, "decompress", None)):
        if isinstance(compression, type) and issubclass(compression, Compressor):
            raise ConfigError(f"compression must be an instance: {compression.__name__}(), not {compression.__name__}")
        if not _takes(compression.compress, 1) or not _takes(compression.decompress, 2):
            name = getattr(compression, "__name__", type(compression).__name__)
            raise ConfigError(
                f"{name} does not have the interface of Horovod's compressors, compress(tensor) and "
                f"decompress(tensor, ctx), as GRACE's and the original DGC's do not either: {_REMEDY}"
            )
        return HorovodCompression(compression)
    raise ConfigError(
        f"compression must be a dgcopt.Compressor such as dgcopt.DGC(), or Horovod's hvd.Compression.none or fp16, or "
        f"'auto', not {compression!r}"
    )


def _takes(method: Any, count: int) -> bool:
    """Return True if the callable accepts that many arguments, by its signature."""
    try:
        inspect.signature(method).bind(*[None] * count)
    except TypeError:
        return False
    except ValueError:  # a builtin without signature
        return True
    return True
