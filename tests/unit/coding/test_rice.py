"""Rice codes of ascending indices: exact, near the entropy bound, and safe to read."""

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from dgcopt.coding import (
    SparseCode,
    rice_bytes,
    rice_excess,
)
from dgcopt.coding.values import packed_bytes
from dgcopt.errors import PayloadError
from dgcopt.kernels import pack_small, unpack_small
from tests.support.coordinates import decoded, encoded, positions, spread


@given(count=st.integers(0, 70), width=st.integers(0, 7))
def test_eight_small_fields_fill_their_bytes_from_the_lowest_bit(count, width):
    fields = torch.randint(2**width, (count,), dtype=torch.uint8)
    packed = pack_small(fields, width)
    number = sum(field << place * width for place, field in enumerate(fields.tolist()))
    assert int.from_bytes(bytes(packed.tolist()), "little") == number
    assert torch.equal(unpack_small(packed, count, width), fields)


def read_bit_by_bit(message, count, numel):
    """Indices by the definition, without any of the code's tricks."""
    b = max(0, round(math.log2(math.log(2) * numel / count)))
    data = bytes(message.tolist())
    sent, data = int.from_bytes(data[:4], "little"), data[4:]
    whole, rest = divmod(b, 8)
    top = int.from_bytes(data[sent * whole :], "little")
    remainders = [
        int.from_bytes(data[place * whole : (place + 1) * whole], "little")
        | (top >> place * rest) % 2**rest << 8 * whole
        for place in range(sent)
    ]
    data = data[packed_bytes(sent, b) :]
    unary = "".join(format(byte, "08b")[::-1] for byte in data)
    lengths = [len(zeros) for zeros in unary.split("1")[:sent]]
    indices, position = [], -1
    for length, remainder in zip(lengths, remainders, strict=True):
        position += 1 + (length << b) + remainder
        indices.append(position)
    return indices


def excess_of(indices, numel):
    return int(rice_excess(indices, torch.tensor([len(indices)]), len(indices), numel))


@given(case=positions())
def test_indices_come_back_from_a_message_of_known_length(case):
    indices, numel = case
    count = len(indices)
    kept = indices[: count - excess_of(indices, numel)]
    message = encoded(kept, count, numel)
    assert message.shape == (rice_bytes(count, numel),) and rice_bytes(count, numel) % 8 == 0
    arrived = decoded(message, count, numel, rank=0)
    assert arrived.dtype == torch.int64
    assert torch.equal(arrived, kept)
    if count:
        assert read_bit_by_bit(message, count, numel) == kept.tolist()


@given(case=positions(), seed=st.integers(0, 2**32))
def test_any_indices_may_be_the_ones_left_out(case, seed):
    indices, numel = case
    count, excess = len(indices), excess_of(indices, numel)
    for kept in (indices[excess:], indices[spread(count - excess, count, seed)] if count else indices):
        assert torch.equal(decoded(encoded(kept, count, numel), count, numel, rank=0), kept)


@pytest.mark.parametrize("count, numel", [(100, 10**6), (25_557, 25_557_032), (1000, 10_000), (2, 2**40)])
def test_the_worst_positions_leave_few_out(count, numel):
    gap = 1 << max(0, round(math.log2(math.log(2) * numel / count)))
    heap = torch.arange(count)  # one gap holds everything: no remainder takes anything off the unary part
    heap[count // 2 :] += (numel - count) // gap * gap
    excess = excess_of(heap, numel)
    assert excess <= 0.15 * count
    kept = heap[: count - excess]
    assert torch.equal(decoded(encoded(kept, count, numel), count, numel, rank=0), kept)


@pytest.mark.parametrize(
    "count, numel", [(2_500, 25_000_000), (25_557, 25_557_032), (20_000, 2 * 10**6), (10**5, 10**6)]
)
def test_rice_is_within_2_percent_of_what_any_code_needs(count, numel):
    least = (math.lgamma(numel + 1) - math.lgamma(count + 1) - math.lgamma(numel - count + 1)) / math.log(2)
    assert least <= 8 * rice_bytes(count, numel) <= 1.02 * least


@pytest.mark.parametrize("density", [1e-4, 1e-3, 1e-2, 0.1, 0.3, 0.9])
def test_random_positions_fit(density):
    count = 2000
    numel = round(count / density)
    for seed in range(50):
        drawn = torch.randint(numel, (10 * count,), generator=torch.Generator().manual_seed(seed)).unique()
        indices = drawn[spread(count, len(drawn), seed)] if numel > 10 * count else spread(count, numel, seed)
        assert excess_of(indices, numel) == 0


@pytest.mark.parametrize("indices", [[3, 3], [4, 3], [-1, 2], [2, 10], [10]])
def test_indices_that_do_not_ascend_within_bounds_are_the_callers_mistake(indices):
    with pytest.raises(ValueError, match="ascend"):
        excess_of(torch.tensor(indices), 10)


def test_a_claim_of_more_indices_or_a_missing_one_is_refused():
    indices = spread(100, 10**5)
    message = encoded(indices, 100, 10**5)
    for claimed in (0, 99, 101, 2**31 - 1, 2**32 - 1):
        damaged = message.clone()
        damaged[:4] = torch.tensor(list(claimed.to_bytes(4, "little")), dtype=torch.uint8)
        with pytest.raises(PayloadError, match="rank 3"):
            decoded(damaged, 100, 10**5, rank=3)


def test_an_index_beyond_the_tensor_is_refused():
    message = encoded(torch.tensor([0, 99]), 2, 100)
    assert decoded(message, 2, 100, rank=0).tolist() == [0, 99]
    b = round(math.log2(math.log(2) * 50))
    assert b < 8
    message[4] |= (1 << b) - 1  # the first remainder grows, and with it every index
    with pytest.raises(PayloadError, match="beyond 100"):
        decoded(message, 2, 100, rank=0)


def test_the_smallest_values_are_left_out_where_positions_cluster():
    indices = torch.arange(1000)
    indices[500:] += 900_000
    values = torch.randn(1000)
    excess = excess_of(indices, 10**6)
    assert excess > 0
    code = SparseCode("rice", "fp32")
    message, sent, arriving = code.encode(indices, values, 10**6)
    kept = values.abs().argsort(descending=True)[: 1000 - excess].sort().values
    assert torch.equal(sent, indices[kept])
    assert torch.equal(arriving, values[kept])
    assert len(message) == code.nbytes(1000, 10**6)
