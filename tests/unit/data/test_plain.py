"""Values become bytes and come back the same, and bytes of others cannot do more than be refused."""

from __future__ import annotations

import collections
import math
import os
import pickle
import zlib
from typing import Any

import numpy
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from dgcopt import ConfigError, PayloadError
from dgcopt.data.plain import DTYPES, decode, encode
from tests.support.worlds import same

SINGLES = st.none() | st.booleans() | st.integers() | st.floats() | st.text() | st.binary()
TENSORS = st.tuples(st.sampled_from(sorted(DTYPES)), st.lists(st.integers(0, 4), max_size=3)).map(
    lambda pair: torch.arange(math.prod(pair[1])).remainder(2).reshape(pair[1]).to(DTYPES[pair[0]])
)
VALUES = st.recursive(
    SINGLES | TENSORS,
    lambda inner: (
        st.lists(inner, max_size=4)
        | st.lists(inner, max_size=4).map(tuple)
        | st.dictionaries(st.text() | st.integers() | st.tuples(st.booleans(), st.text()), inner, max_size=4)
    ),
    max_leaves=12,
)


@given(VALUES)
def test_comes_back_the_same(value: Any) -> None:
    assert same(decode(encode(value)), value)


def test_decoded_arrays_are_writable_copies() -> None:
    data = encode((torch.ones(3), numpy.ones(3)))
    tensor, array = decode(data)
    tensor.add_(1)
    array += 1
    assert decode(data)[0].eq(1).all() and (decode(data)[1] == 1).all()


@pytest.mark.parametrize(
    "tensor",
    [torch.rand(4, 5).t(), torch.rand(10)[::3], torch.rand(1).expand(4), torch.randn(3) * 1j, torch.rand(10)[3::10]],
)
def test_tensors_that_lie_otherwise(tensor: torch.Tensor) -> None:
    for each in (tensor, tensor.conj()):
        assert torch.equal(decode(encode(each)), each)


@pytest.mark.parametrize("dtype", ["bool", "uint8", "int16", "float32", "float64", "complex64"])
def test_arrays(dtype: str) -> None:
    array = numpy.arange(6).reshape(2, 3).astype(dtype)
    back = decode(encode({"image": array}))["image"]
    assert back.dtype == array.dtype and (back == array).all()


Point = collections.namedtuple("Point", "x y")


@pytest.mark.parametrize(
    ("value", "words"),
    [
        ({"a": [1, object()]}, r"value\['a'\]\[1\] is an object of type builtins.object"),
        (Point(1, 2), "Point"),
        (torch.nn.Parameter(torch.ones(2)), "value is a Parameter .* requires a gradient"),
        (torch.ones(2, requires_grad=True), "requires a gradient"),
        (torch.eye(2).to_sparse(), "sparse"),
        (torch.ones(2, device="meta"), "on meta"),
        (numpy.array([object()]), "numpy.ndarray"),
        ({(1, object()): 2}, r"a key of value\[1\]"),
        (True + 0j, "complex"),
    ],
)
def test_values_that_are_not_plain_are_refused_by_their_place(value: Any, words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        encode(value)


def test_pickles_only_where_that_is_said() -> None:
    data = encode([Point(1, 2), torch.ones(2)], pickle=True)
    assert same(decode(data, pickle=True)[0], Point(1, 2))
    with pytest.raises(PayloadError, match="set pickle=True to read it"):
        decode(data)


def sealed(tree: bytes, contents: bytes = b"") -> bytes:
    """As a stranger could write it: the checksum is right."""
    rest = len(tree).to_bytes(4, "little") + tree + contents
    return zlib.crc32(rest).to_bytes(4, "little") + rest


class Bomb:
    def __reduce__(self) -> Any:
        return os.abort, ()


@pytest.mark.parametrize(
    "data",
    [
        b"",
        b"1234567",
        pickle.dumps(Bomb()),
        sealed(b'["pickle",0,%d]' % len(pickle.dumps(Bomb())), pickle.dumps(Bomb())),
        sealed(b"[]"),
        sealed(b"{"),
        sealed(b"\xff"),
        sealed(b"[" * 100_000),
        sealed(b'["list",' * 3000),
        sealed(b'["value",[1]]'),
        sealed(b'["what",1]'),
        sealed(b'["bytes",0,9]', b"12345678"),
        sealed(b'["bytes",-4,4]', b"12345678"),
        sealed(b'["bytes",4,-4]', b"12345678"),
        sealed(b'["bytes",true,"4"]', b"12345678"),
        sealed(b'["tensor","float32",[3],0,8]', b"12345678"),
        sealed(b'["tensor","float32",[-1,9223372036854775807],0,8]', b"12345678"),
        sealed(b'["tensor","float32",[1e400],0,8]', b"12345678"),
        sealed(b'["tensor","load",[2],0,8]', b"12345678"),
        sealed(b'["array","O",[1],0,8]', b"12345678"),
        sealed(b'["array","(,)f4",[2],0,8]', b"12345678"),
        sealed(b'["array","<f4",[99999999999],0,8]', b"12345678"),
        sealed(b'["dict",[[["list",[]],["value",1]]]]'),
    ],
)
def test_bytes_of_others_are_refused(data: bytes) -> None:
    with pytest.raises(PayloadError):
        decode(data)


@given(st.integers(0, 10_000), st.integers(1, 255))
def test_damage_is_found(place: int, change: int) -> None:
    data = bytearray(encode({"a": torch.arange(10), "b": (1, "two")}))
    data[place % len(data)] ^= change
    with pytest.raises(PayloadError):
        decode(bytes(data))
