"""Samples as bytes without pickle, so that write access to a store does not allow running code here.

A value is a tree of tuples, lists and dicts, of numbers, strings, bytes and None, of tensors and NumPy arrays. The
format:

    CRC-32 of the rest (4 bytes) | length of the tree (4 bytes) | tree as JSON | contents of tensors, arrays and bytes
"""

from __future__ import annotations

import ctypes
import json
import pickle as pickles
import sys
import zlib
from typing import Any

import torch
from torch import Tensor

from ..errors import ConfigError, PayloadError

__all__ = ["decode", "encode"]

HEAD = 8
"""Bytes of checksum and length."""

NAMES = (
    *("bool", "uint8", "uint16", "uint32", "uint64", "int8", "int16", "int32", "int64"),
    *("float8_e4m3fn", "float8_e5m2", "float16", "bfloat16", "float32", "float64", "complex64", "complex128"),
)
DTYPES: dict[str, torch.dtype] = {name: getattr(torch, name) for name in NAMES}
"""Dtypes of tensors."""

_NOT_OURS = (ValueError, TypeError, KeyError, IndexError, RuntimeError, OverflowError, RecursionError, SyntaxError)
"""Errors of JSON, torch and NumPy for bytes that `encode` has not made; SyntaxError for a dtype like "(,)f4"."""

ARRAYS = "biufc"
"""Kinds of NumPy's numeric dtypes."""


def encode(value: Any, pickle: bool = False) -> bytes:
    """Return `value` as bytes. Other objects are pickled, or refused by a ConfigError that names their place in it."""
    writer = _Writer(pickle)
    tree = json.dumps(writer.tree(value, "value"), separators=(",", ":")).encode()
    parts = [len(tree).to_bytes(4, "little"), tree, *writer.contents]
    check = 0
    for part in parts:
        check = zlib.crc32(part, check)
    return b"".join([check.to_bytes(4, "little"), *parts])


def decode(data: bytes, pickle: bool = False) -> Any:
    """Return the value of `encode`'s bytes. Raises PayloadError for other bytes, and for pickles unless `pickle`."""
    view = memoryview(data)
    if len(view) < HEAD or zlib.crc32(view[4:]) != int.from_bytes(view[:4], "little"):
        raise PayloadError(f"{len(view)} bytes are damaged, or not a value of a store")
    length = int.from_bytes(view[4:HEAD], "little")
    try:
        return _Reader(view[HEAD + length :], pickle).value(json.loads(bytes(view[HEAD : HEAD + length])))
    except _NOT_OURS as error:
        raise PayloadError(f"not a value of a store: {type(error).__name__}: {error}") from None


class _Writer:
    """Collects the contents of a tree's leaves."""

    def __init__(self, pickle: bool) -> None:
        self.pickle = pickle
        self.contents: list[bytes] = []
        self._length = 0

    def tree(self, value: Any, place: str) -> list[Any]:
        kind = type(value)
        if value is None or kind in (bool, int, float, str):
            return ["value", value]
        if kind in (tuple, list):
            return [kind.__name__, [self.tree(each, f"{place}[{at}]") for at, each in enumerate(value)]]
        if kind is dict:
            items = [[self.tree(k, f"a key of {place}"), self.tree(v, f"{place}[{k!r}]")] for k, v in value.items()]
            return ["dict", items]
        if kind is bytes:
            return ["bytes", *self._put(value)]
        if kind is Tensor and value.layout == torch.strided and value.is_cpu and not value.requires_grad:
            name = str(value.dtype).removeprefix("torch.")
            if name in DTYPES:
                whole = value.resolve_conj().resolve_neg().contiguous()
                return ["tensor", name, list(value.shape), *self._put(ctypes.string_at(whole.data_ptr(), whole.nbytes))]
        numpy = sys.modules.get("numpy")
        if numpy is not None and kind is numpy.ndarray and value.dtype.kind in ARRAYS and value.dtype.isnative:
            return ["array", value.dtype.str, list(value.shape), *self._put(value.tobytes())]
        if self.pickle:
            return ["pickle", *self._put(pickles.dumps(value, pickles.HIGHEST_PROTOCOL))]
        raise ConfigError(
            f"{place} is {_described(value)}, which a store cannot hold as plain data: numbers, strings, bytes, CPU "
            f"tensors without gradient, NumPy arrays of numbers, and tuples, lists and dicts of these. Convert it "
            f"(dict(...), torch.as_tensor(...)), or say pickle=True if nobody else can write to the store"
        )

    def _put(self, content: bytes) -> tuple[int, int]:
        """Append contents; return their start and length."""
        start = self._length
        self.contents.append(content)
        self._length += len(content)
        return start, len(content)


class _Reader:
    """Builds the value of a tree from the contents only."""

    def __init__(self, contents: memoryview, pickle: bool) -> None:
        self.contents = contents
        self.pickle = pickle

    def value(self, tree: Any) -> Any:
        kind, *rest = tree
        if kind == "value":
            (value,) = rest
            if value is not None and not isinstance(value, bool | int | float | str):
                raise ValueError("not a single value")
            return value
        if kind in ("tuple", "list"):
            (each,) = rest
            values = [self.value(one) for one in each]
            return tuple(values) if kind == "tuple" else values
        if kind == "dict":
            (items,) = rest
            return {self.value(key): self.value(value) for key, value in items}
        if kind == "bytes":
            return bytes(self._content(*rest))
        if kind == "tensor":
            name, shape, start, count = rest
            # copied, since a store's memory is read-only
            held = bytearray(self._content(start, count))
            flat = torch.frombuffer(held or bytearray(8), dtype=torch.uint8)[: len(held)]
            return flat.view(DTYPES[name]).reshape(shape)
        if kind == "array":
            import numpy

            name, shape, start, count = rest
            dtype = numpy.dtype(name)
            if dtype.kind not in ARRAYS:
                raise ValueError(f"array of {dtype}")
            return numpy.frombuffer(self._content(start, count), dtype).reshape(shape).copy()
        if kind == "pickle":
            if not self.pickle:
                raise PayloadError("a pickle; set pickle=True to read it")
            try:
                return pickles.loads(self._content(*rest))
            except Exception as error:  # unpickled classes may raise anything
                raise PayloadError(f"a pickle cannot be read: {type(error).__name__}: {error}") from None
        raise ValueError(f"kind {kind!r}")

    def _content(self, start: int, count: int) -> memoryview:
        if not 0 <= start <= start + count <= len(self.contents):
            raise ValueError(f"{count} bytes from {start} of {len(self.contents)}")
        return self.contents[start : start + count]


def _described(value: Any) -> str:
    if isinstance(value, Tensor):
        kind = f"a {type(value).__name__} on {value.device}, of {value.dtype}, {value.layout}"
        return f"{kind}{', that requires a gradient' if value.requires_grad else ''}"
    return f"an object of type {type(value).__module__}.{type(value).__qualname__}"
