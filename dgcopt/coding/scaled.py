"""Messages of float32 scales followed by packed fields."""

from __future__ import annotations

import torch
from torch import Tensor

from ..errors import PayloadError
from ..kernels import LARGEST
from .checks import Checks
from .values import check_scales, read_as

__all__ = ["decode_scaled", "encode_scaled", "scaled_bytes"]


def scaled_bytes(scales: int, nbytes: int) -> int:
    """Return the bytes of a message with this number of scales and bytes of fields."""
    return scales * torch.float32.itemsize + nbytes


def encode_scaled(scales: Tensor, fields: Tensor) -> Tensor:
    """Encode non-negative scales followed by fields (uint8)."""
    numbers = scales.float().clamp(max=LARGEST).contiguous()
    return torch.cat((numbers.view(-1).view(torch.uint8), fields))


def decode_scaled(
    message: Tensor, scales: int, nbytes: int, rank: int, checks: Checks | None = None
) -> tuple[Tensor, Tensor]:
    """Decode scales (float32) and fields of a message from `rank`.

    Raises PayloadError for an invalid length; for an invalid scale, at once or when `checks` are read.
    """
    if message.dtype != torch.uint8 or message.shape != (scaled_bytes(scales, nbytes),):
        raise PayloadError(
            f"the message from rank {rank} has {message.numel()} bytes, but {scales} scales and their fields take "
            f"{scaled_bytes(scales, nbytes)}"
        )
    head = scaled_bytes(scales, 0)
    numbers = read_as(message[:head], torch.float32)
    check_scales(numbers, checks, lambda _: rank)
    return numbers, message[head:]
