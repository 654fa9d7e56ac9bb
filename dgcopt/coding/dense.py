"""Whole vectors (biases, norms) in few bits per element, for use with error feedback.

Neighbours in a vector differ more than selected coordinates do, so a block is a quarter as long.
"""

from __future__ import annotations

from torch import Tensor

from .values import VALUE_DTYPES, Floats, Levels, Steps, ValueCode, code_of, decode_one, encode_one

__all__ = ["DENSE_CODES", "decode_dense", "dense_bytes", "encode_dense"]

DENSE_CODES: dict[str, ValueCode] = {
    **{name: Floats(dtype) for name, dtype in VALUE_DTYPES.items()},
    "int8": Steps(8, block=64),
    "int4": Steps(4, block=64),
    "int2": Levels(2, block=128),
    "sign": Levels(1, block=64),
}
"""How the elements of whole vectors may travel; scales take 1/4 bit of each."""


def dense_bytes(numel: int, kind: str) -> int:
    """Length of `numel` elements of a kind of DENSE_CODES."""
    return sum(code_of(kind, DENSE_CODES).sizes(numel))


def encode_dense(flat: Tensor, kind: str) -> Tensor:
    """The one-dimensional `flat`, of any floating dtype, as uint8. NaN and Inf travel as zero but in whole floats."""
    return encode_one(code_of(kind, DENSE_CODES), flat)


def decode_dense(payload: Tensor, numel: int, kind: str, rank: int) -> Tensor:
    """What `encode_dense` wrote, from `rank`: the same bits everywhere, float32 but for whole floats.

    Raises PayloadError if the length or a scale cannot be right. Waits for the device where there are scales.
    """
    return decode_one(code_of(kind, DENSE_CODES), payload, numel, rank)
