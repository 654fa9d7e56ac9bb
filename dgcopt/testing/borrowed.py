"""Tensors that belong to the wire or to the caller, overwritten so that their further use is noticed."""

from __future__ import annotations

import torch
from torch import Tensor

from ..collectives import AllReduce, Broadcast, Collective, ReduceScatter

__all__ = ["spoil", "spoil_message"]


def spoil(tensor: Tensor) -> None:
    """Overwrite a tensor with NaN or a number out of range."""
    if tensor.dtype.is_floating_point or tensor.dtype.is_complex:
        tensor.fill_(torch.nan)
    else:
        tensor.fill_(True if tensor.dtype == torch.bool else torch.iinfo(tensor.dtype).max)


def spoil_message(collective: Collective) -> None:
    """Send a copy of the message, and overwrite the message, if some wires overwrite it with the result."""
    if isinstance(collective, AllReduce | ReduceScatter | Broadcast):
        message = collective.tensor
        collective.send(message.clone())
        spoil(message)
