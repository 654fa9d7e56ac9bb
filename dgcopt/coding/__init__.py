"""Codecs of values and indices."""

from .checks import Checks, read_checks
from .message import Sent, SparseCode, what_fits
from .rice import decode_rice, encode_rice, rice_bytes, rice_excess
from .values import (
    DENSE_CODES,
    VALUE_CODES,
    VALUE_DTYPES,
    decode_dense,
    decode_dense_rows,
    decode_values,
    dense_bytes,
    encode_dense,
    encode_dense_rows,
    encode_values,
    value_bytes,
)

__all__ = [
    "DENSE_CODES",
    "VALUE_CODES",
    "VALUE_DTYPES",
    "Checks",
    "Sent",
    "SparseCode",
    "decode_dense",
    "decode_dense_rows",
    "decode_rice",
    "decode_values",
    "dense_bytes",
    "encode_dense",
    "encode_dense_rows",
    "encode_rice",
    "encode_values",
    "read_checks",
    "rice_bytes",
    "rice_excess",
    "value_bytes",
    "what_fits",
]
