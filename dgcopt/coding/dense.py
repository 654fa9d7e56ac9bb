"""Codes of dense vectors (biases, norms) in few bits per element, for use with error feedback.

Neighbours in a vector differ more than selected coordinates, so blocks are a quarter as long.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from ..errors import PayloadError
from .checks import Checks
from .rows import named, take_parts
from .values import VALUE_DTYPES, Floats, Levels, Steps, ValueCode, code_of

__all__ = ["DENSE_CODES", "decode_dense", "decode_dense_rows", "dense_bytes", "encode_dense", "encode_dense_rows"]

DENSE_CODES: dict[str, ValueCode] = {
    **{name: Floats(dtype) for name, dtype in VALUE_DTYPES.items()},
    "int8": Steps(8, block=64),
    "int4": Steps(4, block=64),
    "int2": Levels(2, block=128),
    "sign": Levels(1, block=64),
}
"""Codes of dense vectors; scales take 1/4 bit per element."""


def dense_bytes(numel: int, kind: str) -> int:
    """Return the bytes of `numel` elements in one of DENSE_CODES."""
    return sum(code_of(kind, DENSE_CODES).sizes(numel))


def encode_dense(flat: Tensor, kind: str) -> Tensor:
    """Encode 1-D `flat` of any floating dtype as uint8. NaN and Inf become zero, except in float codes."""
    return encode_dense_rows(flat.unsqueeze(0), kind)[0][0]


def decode_dense(payload: Tensor, numel: int, kind: str, rank: int) -> Tensor:
    """Decode `encode_dense`'s message from `rank`: bit-identical everywhere, float32 except for float codes.

    Raises PayloadError for an invalid length or scale. Waits for the device if there are scales.
    """
    return decode_dense_rows(payload.unsqueeze(0), numel, kind, [rank])[0]


def encode_dense_rows(rows: Tensor, kind: str) -> tuple[Tensor, Tensor]:
    """Encode each row of a matrix; return the messages and the decoded values, both as rows."""
    code, counts = code_of(kind, DENSE_CODES), torch.full((len(rows),), rows.shape[1])
    parts, arriving = code.encode(rows.reshape(-1), counts)
    return torch.cat([part.view(len(rows), -1) for part in parts], 1), arriving.view(rows.shape)


def decode_dense_rows(
    messages: Tensor, numel: int, kind: str, ranks: Sequence[int], checks: Checks | None = None
) -> Tensor:
    """Decode each row of messages from `ranks` into rows of `numel`.

    Raises PayloadError for an invalid length; for an invalid scale, at once or when `checks` are read.
    """
    code, counts = code_of(kind, DENSE_CODES), torch.full((len(ranks),), numel)
    expected = dense_bytes(numel, kind)
    if messages.dtype != torch.uint8 or messages.shape != (len(ranks), expected):
        raise PayloadError(
            f"the message from {named(ranks)} has {messages.numel()} bytes of values, but {numel} take {expected} "
            f"from each"
        )
    return code.decode(take_parts(messages, code.sizes(counts)), counts, ranks, checks).view(len(ranks), numel)
