"""Sparse coordinates in one message of fixed length: int32 indices, then values."""

from __future__ import annotations

import torch
from torch import Tensor

from ..errors import PayloadError

__all__ = ["VALUE_DTYPES", "decode_coordinates", "encode_coordinates", "message_bytes"]

VALUE_DTYPES = {"fp64": torch.float64, "fp32": torch.float32, "fp16": torch.float16, "bf16": torch.bfloat16}
"""The formats in which values travel."""

_ALIGNMENT = 8  # both parts start on a multiple of this, so that they can be read where the gathered messages lie


def _aligned(nbytes: int) -> int:
    return -(-nbytes // _ALIGNMENT) * _ALIGNMENT


def message_bytes(count: int, dtype: torch.dtype) -> int:
    """Length of a message of `count` coordinates: both parts, each padded to a multiple of 8."""
    return _aligned(count * torch.int32.itemsize) + _aligned(count * dtype.itemsize)


def _parts(message: Tensor, count: int, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """The indices and the values of a message, in place."""
    values = message[_aligned(count * torch.int32.itemsize) :][: count * dtype.itemsize]
    return message[: count * torch.int32.itemsize].view(torch.int32), values.view(dtype)


def encode_coordinates(indices: Tensor, values: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Pack indices (below 2^31) and as many values into one message.

    Finite values beyond the range of `dtype` travel as its largest. Returns the message, uint8, and the values as the
    receivers will read them, in the dtype of `values`: what the sender's residual loses.
    """
    limit = torch.finfo(dtype).max
    rounded = torch.where(values.isinf(), values, values.clamp(-limit, limit)).to(dtype)
    message = indices.new_zeros(message_bytes(len(indices), dtype), dtype=torch.uint8)
    index_part, value_part = _parts(message, len(indices), dtype)
    index_part.copy_(indices)
    value_part.copy_(rounded)
    return message, rounded.to(values.dtype)


def decode_coordinates(message: Tensor, count: int, dtype: torch.dtype, numel: int, rank: int) -> tuple[Tensor, Tensor]:
    """The `count` indices (int64) and values (`dtype`) of a message from `rank` for a tensor of `numel` elements.

    Raises PayloadError if its length or an index cannot be right.
    """
    if message.dtype != torch.uint8 or message.shape != (message_bytes(count, dtype),):
        raise PayloadError(
            f"the message from rank {rank} has {message.numel()} bytes where {count} coordinates take "
            f"{message_bytes(count, dtype)}"
        )
    indices, values = _parts(message, count, dtype)
    if count and not 0 <= int(indices.amin()) <= int(indices.amax()) < numel:
        raise PayloadError(
            f"the message from rank {rank} holds index {int(indices.amin())} .. {int(indices.amax())} for a bucket of "
            f"{numel} elements: it was damaged on the way, or that rank runs another model or version"
        )
    return indices.long(), values
