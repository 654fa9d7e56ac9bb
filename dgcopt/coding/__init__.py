"""Values and indices as bytes, and back."""

from .coordinates import VALUE_DTYPES, decode_coordinates, encode_coordinates, message_bytes

__all__ = ["VALUE_DTYPES", "decode_coordinates", "encode_coordinates", "message_bytes"]
