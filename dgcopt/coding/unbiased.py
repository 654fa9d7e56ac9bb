"""Eight bits per value, rounded at random so that nothing is lost on average."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.functional import pad

from ..kernels import BLOCK, put_levels, round_levels, tensor_norms
from .scaled import decode_scaled, encode_scaled

__all__ = ["Unbiased"]


@dataclass(frozen=True)
class Unbiased:
    """A byte per value: a random one of the two neighbouring multiples of 1/127 of the block's largest magnitude.

    The expectation is the value. Costs a byte per value and 4 bytes per block of 256. Source: QSGD (Alistarh et al.,
    NeurIPS 2017), with the largest magnitude as its norm.
    """

    levels: int = 127
    block: int = 256

    def encode(self, row: Tensor, key: int) -> Tensor:
        """Return the message of a row; `key` seeds the rounding. NaN and Inf become zero."""
        values = pad(row.float(), (0, -len(row) % BLOCK))
        place, count = self._blocks(len(values), row.device)
        norms, _ = tensor_norms(values, place, count)
        return encode_scaled(norms, round_levels(values, norms, place, self.levels, key)[: len(row)])

    def decode(self, message: Tensor, length: int, rank: int) -> Tensor:
        """Return the row of `length` values, float32. Raises PayloadError for a damaged message of `rank`."""
        padded = -(-length // BLOCK) * BLOCK
        place, count = self._blocks(padded, message.device)
        norms, fields = decode_scaled(message, count, length, rank)
        row = torch.zeros(padded, dtype=torch.float32, device=message.device)
        put_levels(pad(fields, (0, padded - length)), 7, norms / self.levels, place, row, "set")
        return row[:length]

    def _blocks(self, length: int, device: torch.device) -> tuple[Tensor, int]:
        """Return the block of each 64 values, and the number of blocks."""
        place = torch.arange(length // BLOCK, device=device) // (self.block // BLOCK)
        return place, -(-length // self.block)
