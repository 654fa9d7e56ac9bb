"""Messages: what is written is what is read, and nonsense is refused."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from dgcopt.coding import VALUE_DTYPES, decode_coordinates, encode_coordinates, message_bytes
from dgcopt.errors import PayloadError


@given(count=st.integers(1, 200), name=st.sampled_from(sorted(VALUE_DTYPES)), rows=st.integers(1, 4))
def test_round_trip_wherever_the_message_lies(count, name, rows):
    dtype = VALUE_DTYPES[name]
    indices, values = torch.randperm(5000)[:count], torch.randn(count, dtype=torch.float64)
    message, arriving = encode_coordinates(indices, values, dtype)
    assert message.shape == (message_bytes(count, dtype),)
    gathered = torch.stack([message] * rows)
    for row in gathered:
        read_indices, read_values = decode_coordinates(row, count, dtype, 5000, rank=1)
        assert torch.equal(read_indices, indices)
        assert torch.equal(read_values, values.to(dtype))
        assert torch.equal(read_values.double(), arriving)


def test_size_is_what_the_docstring_says():
    assert message_bytes(1000, torch.float32) == 8000
    assert message_bytes(1000, torch.float16) == 6000


def test_values_out_of_range_saturate_but_infinity_stays_visible():
    values = torch.tensor([1e6, -1e6, float("inf"), 3.0])
    _, arriving = encode_coordinates(torch.arange(4), values, torch.float16)
    assert arriving.tolist() == [65504.0, -65504.0, float("inf"), 3.0]


@given(position=st.integers(0, 99), index=st.one_of(st.integers(-(2**31), -1), st.integers(300, 2**31 - 1)))
def test_an_index_out_of_bounds_is_refused_with_its_rank(position, index):
    message, _ = encode_coordinates(torch.arange(100), torch.ones(100), torch.float32)
    message[:400].view(torch.int32)[position] = index
    with pytest.raises(PayloadError, match="rank 7"):
        decode_coordinates(message, 100, torch.float32, 300, rank=7)


def test_a_message_of_another_length_is_refused():
    message, _ = encode_coordinates(torch.arange(100), torch.ones(100), torch.float32)
    for damaged in (message[:-8], torch.cat((message, message[:8])), message.float()):
        with pytest.raises(PayloadError, match="rank 2"):
            decode_coordinates(damaged, 100, torch.float32, 300, rank=2)
