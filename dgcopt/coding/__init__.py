"""Codecs of values and indices."""

from .checks import Checks, read_checks
from .message import Sent, SparseCode, what_fits
from .rice import decode_rice, encode_rice, rice_bytes, rice_excess
from .values import (
    DENSE_CODES,
    VALUE_CODES,
    VALUE_DTYPES,
    coded_bytes,
    decode_rows,
    encode_rows,
)

__all__ = [
    "DENSE_CODES",
    "VALUE_CODES",
    "VALUE_DTYPES",
    "Checks",
    "Sent",
    "SparseCode",
    "coded_bytes",
    "decode_rice",
    "decode_rows",
    "encode_rice",
    "encode_rows",
    "read_checks",
    "rice_bytes",
    "rice_excess",
    "what_fits",
]
