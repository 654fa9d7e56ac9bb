"""Sparse coordinates in one message of fixed length: indices by one code, then values by another."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from ..errors import ConfigError, PayloadError
from .bits import aligned, read_as
from .rice import decode_rice, encode_rice, rice_bytes, rice_excess
from .values import VALUE_CODES, ValueCode, code_of

__all__ = ["SparseCode", "largest"]


@dataclass(frozen=True)
class SparseCode:
    """How coordinates travel. Both parts are padded to multiples of 8 bytes.

    Args:
        indices: "rice", at 0.1% density 11.5 bits each, or "int32" (below 2^31).
        values: a kind of VALUE_CODES, from "fp64" to "sign".

    Raises ConfigError for any other.
    """

    indices: Literal["rice", "int32"] = "rice"
    values: str = "fp32"

    def __post_init__(self) -> None:
        if self.indices not in ("rice", "int32"):
            raise ConfigError(f"indices must be 'rice' or 'int32', not {self.indices!r}")
        code_of(self.values, VALUE_CODES)

    @property
    def _values(self) -> ValueCode:
        return VALUE_CODES[self.values]

    def _index_bytes(self, count: int, numel: int) -> int:
        return rice_bytes(count, numel) if self.indices == "rice" else count * torch.int32.itemsize

    def nbytes(self, count: int, numel: int) -> int:
        """Length of a message of `count` of `numel` coordinates."""
        return aligned(self._index_bytes(count, numel)) + aligned(self._values.nbytes(count))

    def encode(
        self, indices: Tensor, values: Tensor, numel: int, count: int | None = None
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Pack indices (int64, strictly ascending, below `numel`) and as many values into one message.

        It has the length of one of `count`, if that is given: "rice" then allows for fewer. Where indices cluster so
        much that not all fit, those of the smallest values are left out.

        Returns the message (uint8), the indices that travel, and the values as the receivers will read them, in the
        dtype of `values`: what the sender's residual loses there.
        """
        count = len(indices) if count is None else count
        message = torch.zeros(self.nbytes(count, numel), dtype=torch.uint8, device=indices.device)
        index_part = message[: self._index_bytes(count, numel)]
        if self.indices == "rice":
            excess = rice_excess(indices, numel, count)
            if excess:
                kept = largest(values, len(indices) - excess)
                indices, values = indices[kept], values[kept]
            index_part.copy_(encode_rice(indices, count, numel))
        else:
            index_part.view(torch.int32).copy_(indices)
        payload = self._values.encode(values)
        message[aligned(len(index_part)) :][: len(payload)] = payload
        arriving = self._values.decode(payload, len(values), rank=-1)
        return message, indices, arriving.to(values.dtype)

    def decode(self, message: Tensor, count: int, numel: int, rank: int) -> tuple[Tensor, Tensor]:
        """The indices (int64, ascending) and values of a message from `rank`, at most `count` of `numel` each.

        Raises PayloadError if its length, an index or a scale cannot be right. Waits for the device.
        """
        if message.dtype != torch.uint8 or message.shape != (self.nbytes(count, numel),):
            raise PayloadError(
                f"the message from rank {rank} has {message.numel()} bytes where {count} coordinates take "
                f"{self.nbytes(count, numel)}"
            )
        index_part = message[: self._index_bytes(count, numel)]
        if self.indices == "rice":
            indices = decode_rice(index_part, count, numel, rank)
        else:
            indices = _checked(read_as(index_part, torch.int32), numel, rank)
        payload = message[aligned(len(index_part)) :][: self._values.nbytes(len(indices))]
        return indices, self._values.decode(payload, len(indices), rank)


def largest(values: Tensor, count: int) -> Tensor:
    """Where the `count` values of largest magnitude are: int64, ascending."""
    return values.abs().topk(count, sorted=False).indices.sort().values


def _checked(indices: Tensor, numel: int, rank: int) -> Tensor:
    ends = indices[[0, -1]].tolist() if len(indices) else [0, 0]
    ascend = bool((indices[1:] > indices[:-1]).all())
    if not ascend or ends[0] < 0 or ends[1] >= max(numel, 1):
        raise PayloadError(
            f"the message from rank {rank} holds indices that do not ascend within a bucket of {numel} elements (from "
            f"{ends[0]} to {ends[1]}): it was damaged on the way, or that rank runs another model or version"
        )
    return indices.long()
