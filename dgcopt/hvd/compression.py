"""`hvd.Compression`: the compressors that Horovod's scripts name."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ..compressors import BF16, FP16, Compressor, NoCompression, accept
from ..errors import ConfigError

__all__ = ["Compression", "cast_for_wire"]


class ByHand:
    """A compressor that can also be applied to one tensor, as Horovod's can.

    Attributes:
        compressor: the compressor that DistributedOptimizer takes.
    """

    def __init__(self, compressor: Compressor, dtype: torch.dtype | None = None) -> None:
        self.compressor = compressor
        self._dtype = dtype

    def compress(self, tensor: Tensor) -> tuple[Tensor, torch.dtype]:
        """Return the tensor in the dtype of the wire, and its own dtype for `decompress`."""
        rounds = self._dtype is not None and tensor.is_floating_point()
        return tensor.to(self._dtype) if rounds else tensor, tensor.dtype

    def decompress(self, tensor: Tensor, ctx: torch.dtype) -> Tensor:
        """Return the tensor in its own dtype."""
        return tensor.to(ctx)

    def __repr__(self) -> str:
        return repr(self.compressor)


class Compression:
    """Compressors by Horovod's names; DistributedOptimizer takes any other `dgcopt.Compressor` too."""

    none = ByHand(NoCompression())
    fp16 = ByHand(FP16(), torch.float16)
    bf16 = ByHand(BF16(), torch.bfloat16)


def cast_for_wire(tensor: Tensor, compression: Any) -> Tensor:
    """Return the tensor in the dtype of `compression`. Raises ConfigError for other compressors."""
    compressor = accept(compression)
    for known in (Compression.none, Compression.fp16, Compression.bf16):
        if type(compressor) is type(known.compressor):
            return known.compress(tensor)[0] if isinstance(tensor, Tensor) else tensor
    raise ConfigError("this takes hvd.Compression.none, fp16 or bf16; other compressors are for gradients")
