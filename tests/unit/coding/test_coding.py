"""Messages: what is written is what is read, in as many bytes as promised, and nonsense is refused."""

import math
import random
from typing import ClassVar

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from dgcopt import kernels
from dgcopt.coding import (
    DENSE_CODES,
    VALUE_CODES,
    VALUE_DTYPES,
    Checks,
    SparseCode,
    decode_dense,
    decode_rice,
    decode_values,
    dense_bytes,
    encode_dense,
    encode_rice,
    encode_values,
    largest,
    one_row,
    read_checks,
    rice_bytes,
    rice_excess,
    value_bytes,
)
from dgcopt.coding.bits import packed_bytes
from dgcopt.errors import ConfigError, PayloadError
from dgcopt.kernels import pack_small, unpack_small

INT32 = SparseCode("int32", "fp32")
DTYPES = (torch.float64, torch.float32, torch.float16, torch.bfloat16)


@given(count=st.integers(1, 200), name=st.sampled_from(sorted(VALUE_DTYPES)), rows=st.integers(1, 4))
def test_round_trip_wherever_the_message_lies(count, name, rows):
    dtype = VALUE_DTYPES[name]
    indices, values = torch.randperm(5000)[:count].sort().values, torch.randn(count, dtype=torch.float64)
    code = SparseCode("int32", name)
    message, sent, arriving = code.encode(indices, values, 5000)
    assert message.shape == (code.nbytes(count, 5000),) and torch.equal(sent, indices)
    gathered = torch.stack([message] * rows)
    for row in gathered:
        read_indices, read_values = code.decode(row, count, 5000, rank=1)
        assert torch.equal(read_indices, indices)
        assert torch.equal(read_values, values.to(dtype))
        assert torch.equal(read_values.double(), arriving)


@pytest.mark.parametrize("indices", [[5, 2], [3, 3], [-1, 4], [0, 300], [0, 2**31 - 1, -2, 10]])
def test_indices_that_do_not_ascend_within_the_bucket_are_refused(indices):
    count = len(indices)
    message, _, _ = INT32.encode(torch.arange(count), torch.ones(count), 300)
    message[: 4 * count] = torch.tensor(indices, dtype=torch.int32).view(torch.uint8)
    with pytest.raises(PayloadError, match="from rank 3 holds indices that do not ascend within a bucket of 300"):
        INT32.decode(message, count, 300, rank=3)


def test_size_is_what_the_docstring_says():
    assert SparseCode("int32", "fp32").nbytes(1000, 10**6) == 8000
    assert SparseCode("int32", "fp16").nbytes(1000, 10**6) == 6000


def test_coordinates_lie_where_they_always_did():
    message, _, _ = SparseCode("int32", "fp16").encode(torch.tensor([2, 5, 9]), torch.tensor([1.0, -2.0, 0.5]), 300)
    assert message[:12].view(torch.int32).tolist() == [2, 5, 9]
    assert message[12:16].tolist() == [0] * 4
    assert message[16:22].view(torch.float16).tolist() == [1.0, -2.0, 0.5]
    assert len(message) == 24


def test_values_out_of_range_saturate_but_infinity_stays_visible():
    values = torch.tensor([1e6, -1e6, float("inf"), 3.0])
    _, _, arriving = SparseCode("int32", "fp16").encode(torch.arange(4), values, 300)
    assert arriving.tolist() == [65504.0, -65504.0, float("inf"), 3.0]


@given(position=st.integers(0, 99), index=st.one_of(st.integers(-(2**31), -1), st.integers(300, 2**31 - 1)))
def test_an_index_out_of_bounds_is_refused_with_its_rank(position, index):
    message, _, _ = INT32.encode(torch.arange(100), torch.ones(100), 300)
    message[:400].view(torch.int32)[position] = index
    with pytest.raises(PayloadError, match="rank 7"):
        INT32.decode(message, 100, 300, rank=7)


def test_a_message_of_another_length_is_refused():
    message, _, _ = INT32.encode(torch.arange(100), torch.ones(100), 300)
    for damaged in (message[:-8], torch.cat((message, message[:8])), message.float()):
        with pytest.raises(PayloadError, match="rank 2"):
            INT32.decode(damaged, 100, 300, rank=2)


# Bits


@given(count=st.integers(0, 70), width=st.integers(0, 7))
def test_eight_small_fields_fill_their_bytes_from_the_lowest_bit(count, width):
    fields = torch.randint(2**width, (count,), dtype=torch.uint8)
    packed = pack_small(fields, width)
    number = sum(field << place * width for place, field in enumerate(fields.tolist()))
    assert int.from_bytes(bytes(packed.tolist()), "little") == number
    assert torch.equal(unpack_small(packed, count, width), fields)


# Rice


def spread(count, numel, seed=0):
    return torch.tensor(sorted(random.Random(seed).sample(range(numel), count)), dtype=torch.int64)


@st.composite
def positions(draw):
    """Sorted distinct positions: few or all, spread or in a heap at either end."""
    numel = draw(st.integers(1, 3000))
    count = draw(st.one_of(st.sampled_from([0, 1, numel]), st.integers(0, numel)))
    seed = draw(st.integers(0, 2**32))
    within = draw(st.integers(count, numel)) or 1
    offset = draw(st.integers(0, numel - within))
    return spread(count, within, seed) + offset, numel


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
    return int(rice_excess(indices, one_row(len(indices)), len(indices), numel))


def encoded(indices, count, numel):
    return encode_rice(indices, one_row(len(indices)), count, numel)[0]


def decoded(message, count, numel, rank):
    indices, counts = decode_rice(message.unsqueeze(0), count, numel, [rank])
    assert counts.tolist() == [len(indices)]
    return indices


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


# Values


@given(
    count=st.sampled_from([0, 1, 2, 7, 8, 9, 63, 64, 65, 255, 256, 257, 511, 512, 513, 1025]),
    kind=st.sampled_from(sorted(VALUE_CODES)),
    dtype=st.sampled_from(DTYPES),
    dense=st.booleans(),
)
def test_values_of_any_number_and_dtype_take_the_bytes_promised(count, kind, dtype, dense):
    size, encode, decode = (
        (dense_bytes, encode_dense, decode_dense) if dense else (value_bytes, encode_values, decode_values)
    )
    values = torch.randn(count, dtype=torch.float64).to(dtype)
    payload = encode(values, kind)
    assert payload.dtype == torch.uint8 and payload.shape == (size(count, kind),)
    arrived = decode(payload, count, kind, rank=0)
    assert arrived.shape == (count,)
    assert arrived.dtype == VALUE_DTYPES.get(kind, torch.float32)
    assert arrived.isfinite().all()
    if kind in VALUE_DTYPES:
        assert torch.equal(arrived, values.to(VALUE_DTYPES[kind]))
    elif count:
        assert (arrived - values.float()).norm() <= values.float().norm()


def test_scales_cost_less_than_a_tenth_of_a_bit():
    bits = {kind: 8 * value_bytes(2**20, kind) / 2**20 for kind in VALUE_CODES}
    assert bits == {"fp64": 64, "fp32": 32, "fp16": 16, "bf16": 16} | {
        kind: width + 1 / 16 for kind, width in (("int8", 8), ("int4", 4), ("int2", 2), ("sign", 1))
    }


def blocks(values, size):
    return torch.nn.functional.pad(values, (0, -len(values) % size)).view(-1, size)


@given(count=st.integers(1, 600), exponent=st.integers(-15, 25), zeros=st.booleans(), seed=st.integers(0, 2**32))
def test_int8_and_dense_int4_are_within_half_a_step(count, exponent, zeros, seed):
    values = torch.randn(count, generator=torch.Generator().manual_seed(seed)).pow(3) * 10.0**exponent
    if zeros:
        values[::3] = 0
    for size, most, arrived in (
        (256, 127, decode_values(encode_values(values, "int8"), count, "int8", rank=0)),
        (64, 127, decode_dense(encode_dense(values, "int8"), count, "int8", rank=0)),
        (64, 7, decode_dense(encode_dense(values, "int4"), count, "int4", rank=0)),
    ):
        step = blocks(values, size).abs().amax(1, keepdim=True) / most * (1 + 2**-8)
        assert (blocks(values - arrived, size).abs() <= step / 2 * (1 + 1e-5)).all()
        assert (arrived[values == 0] == 0).all()


@given(count=st.integers(1, 1100), span=st.floats(0, 5), seed=st.integers(0, 2**32))
def test_int4_errs_by_less_than_half_the_ratio_between_levels(count, span, seed):
    random = torch.Generator().manual_seed(seed)
    values = torch.exp(span * torch.rand(count, generator=random)) * torch.randn(count, generator=random).sign()
    arrived = decode_values(encode_values(values, "int4"), count, "int4", rank=0)
    assert torch.equal(arrived.sign(), values.sign())
    ratio = math.exp(span / 7) * (1 + 2**-7)
    bound = (ratio - 1) / (ratio + 1) + 0.05  # scales have 8 bits, and their errors multiply along the series
    assert ((arrived - values).abs() <= bound * values.abs()).all()


def best_of_two(magnitudes):
    """The least squared error of any two levels, by trying every split."""
    ordered = magnitudes.double().sort().values
    before, whole = ordered.cumsum(0)[:-1], ordered.sum()
    number = torch.arange(1, len(ordered))
    gain = before**2 / number + (whole - before) ** 2 / (len(ordered) - number)
    return (ordered.square().sum() - gain.amax()).item()


@pytest.mark.parametrize("count", [512, 300])
@pytest.mark.parametrize("tail", [1, 3, 5])
def test_int2_has_nearly_the_best_two_magnitudes(tail, count):
    samples = torch.randn(1000 * count, generator=torch.Generator().manual_seed(tail)).pow(tail)
    values = samples[samples.abs().topk(count).indices]
    arrived = decode_values(encode_values(values, "int2"), count, "int2", rank=0)
    assert torch.equal(arrived.sign(), values.sign())
    assert (arrived - values).square().sum().item() <= 1.2 * best_of_two(values.abs())


def test_sign_carries_the_mean_magnitude():
    values = torch.tensor([1.0, -2.0, 3.0, -2.0] * 100)
    arrived = decode_values(encode_values(values, "sign"), 400, "sign", rank=0)
    assert torch.equal(arrived, 2 * values.sign())


@given(value=st.floats(1e-6, 1e6), count=st.integers(1, 600), kind=st.sampled_from(["int8", "int4", "int2", "sign"]))
def test_equal_values_arrive_as_exactly_as_a_scale_can_tell(value, count, kind):
    values = torch.full((count,), value)
    values[::2] *= -1
    arrived = decode_values(encode_values(values, kind), count, kind, rank=0)
    assert torch.allclose(arrived, values, rtol=2**-8, atol=0)


@pytest.mark.parametrize("kind", ["int8", "int4", "int2", "sign"])
def test_error_feedback_gets_a_lone_value_through_many_zeros(kind):
    residual = torch.zeros(512)
    residual[100] = 1.0
    total = torch.zeros(512)
    for _ in range(2000 if kind == "sign" else 20):
        arrived = decode_values(encode_values(residual, kind), 512, kind, rank=0)
        residual -= arrived
        total += arrived
    assert residual.norm() < 0.2
    assert total[100] == pytest.approx(1, abs=0.2)


@pytest.mark.parametrize("kind", ["int8", "int4", "int2", "sign"])
@pytest.mark.parametrize("dtype", DTYPES)
def test_extreme_values_do_no_harm(kind, dtype):
    info = torch.finfo(dtype)
    ordinary = torch.tensor([1.0, -1.0] * 300, dtype=dtype)
    for values in (
        torch.zeros(600, dtype=dtype),
        torch.full((600,), info.max, dtype=dtype),
        torch.full((600,), info.smallest_normal, dtype=dtype),
        torch.tensor([info.max, -info.smallest_normal, 0.0] * 200, dtype=dtype),
    ):
        arrived = decode_values(encode_values(values, kind), 600, kind, rank=0)
        assert arrived.isfinite().all()
        assert (arrived.double().abs() <= 1.1 * values.double().abs().amax()).all()
    for bad in (math.nan, math.inf, -math.inf):
        values = torch.cat((torch.tensor([bad], dtype=dtype), ordinary))
        arrived = decode_values(encode_values(values, kind), 601, kind, rank=0)
        assert arrived.isfinite().all()
        assert arrived[1:].sign().equal(ordinary.float().sign())


@pytest.mark.parametrize("kind", ["int8", "int4", "int2", "sign"])
@pytest.mark.parametrize("scale", [math.nan, math.inf, -math.inf, -1.0, 3e38])
def test_a_scale_that_cannot_be_is_refused(kind, scale):
    payload = encode_values(torch.randn(1000), kind)
    payload[:2].view(torch.bfloat16)[0] = scale
    with pytest.raises(PayloadError, match="rank 5"):
        decode_values(payload, 1000, kind, rank=5)


def test_values_of_another_length_or_kind_are_refused():
    for kind in VALUE_CODES:
        payload = encode_values(torch.randn(100), kind)
        for damaged in (payload[:-8], torch.cat((payload, payload[:8])), payload.float()):
            with pytest.raises(PayloadError, match="rank 2"):
                decode_values(damaged, 100, kind, rank=2)
    for call in (value_bytes, dense_bytes):
        with pytest.raises(ConfigError, match="int3"):
            call(10, "int3")
    assert DENSE_CODES.keys() == VALUE_CODES.keys()


# Messages


@settings(max_examples=200)
@given(
    case=positions(),
    index_kind=st.sampled_from(["rice", "int32"]),
    kind=st.sampled_from(sorted(VALUE_CODES)),
    dtype=st.sampled_from(DTYPES),
)
def test_what_a_rank_sent_is_what_every_rank_reads(case, index_kind, kind, dtype):
    indices, numel = case
    count, code = len(indices), SparseCode(index_kind, kind)
    values = torch.randn(count, dtype=torch.float64).to(dtype)
    message, sent, arriving = code.encode(indices, values, numel)
    assert message.shape == (code.nbytes(count, numel),) and len(message) % 8 == 0
    assert arriving.dtype == dtype
    for row in torch.stack((message, message)):
        read_indices, read_values = code.decode(row, count, numel, rank=1)
        assert torch.equal(read_indices, sent)
        assert torch.equal(read_values.to(dtype), arriving)
    if index_kind == "int32" or excess_of(indices, numel) == 0:
        assert torch.equal(sent, indices)


@settings(max_examples=200)
@given(
    rows=st.lists(st.integers(0, 700), min_size=1, max_size=6),
    numel=st.sampled_from([700, 900, 70_000, 10**7]),
    kind=st.sampled_from(sorted(VALUE_CODES)),
    room=st.sampled_from([50, 300, 700]),
    clustered=st.booleans(),
    seed=st.integers(0, 2**20),
)
def test_messages_coded_together_are_those_coded_alone(rows, numel, kind, room, clustered, seed):
    """The same bits, those of the torch kernels too; what one has no room for are its smallest values."""
    code, drawn = SparseCode("rice", kind), []
    for place, count in enumerate(rows):
        indices = spread(count, 700 if clustered else numel, seed + place) if count else torch.zeros(0).long()
        drawn.append((indices, torch.randn(count, generator=torch.Generator().manual_seed(seed + place))))
    flat = [torch.cat(column) for column in zip(*drawn, strict=True)]
    counts = torch.tensor(rows)
    messages, kept, arriving = code.encode_rows(*flat, counts, numel, room)
    kept = torch.arange(len(flat[0])) if kept is None else kept
    expected = []
    for indices, values in drawn:
        most = largest(values, min(len(values), room))
        expected.append(code.encode(indices[most], values[most], numel, room))
    assert torch.equal(messages, torch.stack([message for message, _, _ in expected]))
    assert torch.equal(flat[0][kept], torch.cat([sent for _, sent, _ in expected]))
    assert torch.equal(arriving, torch.cat([values for _, _, values in expected]))
    by_torch = in_torch(code.encode_rows, *flat, counts, numel, room)
    assert torch.equal(by_torch[0], messages) and torch.equal(by_torch[2], arriving)

    ranks = range(10, 10 + len(rows))
    read = code.decode_rows(messages, room, numel, ranks)
    for mine, theirs in zip(read, in_torch(code.decode_rows, messages, room, numel, ranks), strict=True):
        assert torch.equal(mine, theirs)
    assert torch.equal(read[0], flat[0][kept]) and torch.equal(read[1].to(arriving.dtype), arriving)
    assert read[2].tolist() == [len(sent) for _, sent, _ in expected]
    if rows[-1]:
        messages[-1, 3] ^= 255
        with pytest.raises(PayloadError, match=f"rank {ranks[-1]} "):
            code.decode_rows(messages, room, numel, ranks)


def in_torch(run, *arguments):
    """What the specification of the kernels makes of it."""
    with pytest.MonkeyPatch.context() as patch:
        for kernel in vars(kernels).values():
            if isinstance(kernel, kernels.Kernel):
                patch.setattr(kernel, "others", ())
        return run(*arguments)


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


def test_sizes_at_a_thousandth_of_resnet50():
    count, numel = 25_557, 25_557_032
    bits = {kind: 8 * SparseCode("rice", kind).nbytes(count, numel) / count for kind in VALUE_CODES}
    assert bits["int2"] <= 13.6 and bits["int8"] <= 19.6 and bits["sign"] <= 12.6 and bits["fp16"] <= 27.6


def test_unknown_kinds_are_refused():
    with pytest.raises(ConfigError, match="elias"):
        SparseCode("elias", "fp32")
    with pytest.raises(ConfigError, match="int3"):
        SparseCode("rice", "int3")


def assert_read_or_refused(code, message, count, numel):
    try:
        indices, values = code.decode(message, count, numel, rank=4)
    except PayloadError as error:
        assert "rank 4" in str(error)
    else:
        assert len(indices) == len(values) <= count
        assert not len(indices) or 0 <= int(indices.amin()) <= int(indices.amax()) < numel
        if code.indices == "rice":
            assert (indices.diff() > 0).all()
        if code.values not in VALUE_DTYPES:
            assert values.isfinite().all()


CODES = st.builds(SparseCode, st.sampled_from(["rice", "int32"]), st.sampled_from(sorted(VALUE_CODES)))


@settings(max_examples=300)
@given(case=positions(), code=CODES, flips=st.lists(st.integers(0, 2**20), min_size=1, max_size=8))
def test_flipped_bits_are_read_or_refused(case, code, flips):
    indices, numel = case
    message, _, _ = code.encode(indices, torch.randn(len(indices)), numel)
    for flip in flips if len(message) else ():
        message[flip // 8 % len(message)] ^= 1 << flip % 8
    assert_read_or_refused(code, message, len(indices), numel)


@settings(max_examples=300)
@given(
    count=st.integers(0, 300), more=st.integers(0, 3000), code=CODES, claimed=st.integers(-5, 300), random=st.randoms()
)
def test_random_bytes_are_read_or_refused(count, more, code, claimed, random):
    numel = max(1, count + more)
    message = torch.tensor(list(random.randbytes(code.nbytes(count, numel))), dtype=torch.uint8)
    if claimed >= 0 and len(message):  # or else few would get beyond the header
        message[:4] = torch.tensor(list(claimed.to_bytes(4, "little")), dtype=torch.uint8)
    assert_read_or_refused(code, message, count, numel)


class OnDevice(torch.Tensor):
    """A tensor of which nobody knows a number without waiting, and all that is made of it."""

    waits: ClassVar[list[str]] = []

    @classmethod
    def __torch_function__(cls, func, types, args=(), kwargs=None):
        mask = func is torch.Tensor.__getitem__ and getattr(args[1], "dtype", None) is torch.bool
        if mask or func.__name__ in ("item", "tolist", "nonzero", "cpu", "__bool__", "__int__", "__float__"):
            cls.waits.append(func.__name__)
        made = super().__torch_function__(func, types, args, kwargs or {})
        return made.as_subclass(torch.Tensor) if func.__name__ == "cpu" else made


@pytest.mark.parametrize("index_kind", ["rice", "int32"])
@pytest.mark.parametrize("kind", VALUE_CODES)
def test_nobody_waits_for_messages_of_as_many_coordinates(kind, index_kind, monkeypatch):
    """Neither who writes them nor who reads them."""
    monkeypatch.setattr(kernels.Kernel, "__call__", lambda kernel, *args: kernel.specification(*args))
    monkeypatch.setattr(OnDevice, "waits", [])
    count, numel, code, checks = 700, 70_000, SparseCode(index_kind, kind), Checks()
    indices = spread(count, numel).as_subclass(OnDevice)
    values = torch.randn(count).as_subclass(OnDevice)
    sent = code.send(indices, values, numel, checks)
    messages = torch.stack([sent.message] * 3).as_subclass(OnDevice)
    arrived, theirs = code.receive(messages, count, numel, range(3), checks)
    assert OnDevice.waits == []
    read_checks([checks])
    assert OnDevice.waits == ["tolist"]
    read_checks([checks])  # once
    assert OnDevice.waits == ["tolist"]
    for row, numbers in zip(arrived, theirs, strict=True):
        assert torch.equal(row, sent.indices) and torch.equal(numbers.to(sent.values.dtype), sent.values)
    OnDevice.waits.clear()
    code.encode_rows(indices, values, one_row(count), numel, count)
    assert OnDevice.waits == ["cpu"] * (index_kind == "rice")


@settings(max_examples=200)
@given(case=positions(), code=CODES, seed=st.integers(0, 2**20))
def test_messages_of_as_many_coordinates_are_those_of_any_number(case, code, seed):
    """The same coordinates travel, and the same bits where all do, by the kernels in torch too."""
    indices, numel = case
    values, checks = torch.randn(len(indices), generator=torch.Generator().manual_seed(seed)), Checks()
    message, kept, arriving = code.encode(indices, values, numel)
    sent = code.send(indices, values, numel, checks)
    travels = torch.ones(len(indices), dtype=torch.bool) if sent.travels is None else sent.travels
    assert torch.equal(sent.indices[travels], kept) and not sent.values[~travels].any()
    assert torch.equal(sent.indices.sort().values, indices)
    if travels.all():
        assert torch.equal(sent.message, message) and torch.equal(sent.values, arriving)
    by_torch = in_torch(code.send, indices, values, numel, checks)
    assert torch.equal(by_torch.message, sent.message) and torch.equal(by_torch.indices, sent.indices)
    for receive in (code.receive, lambda *args: in_torch(code.receive, *args)):
        arrived, theirs = receive(sent.message.unsqueeze(0), len(indices), numel, [3], checks)
        assert torch.equal(arrived[0][travels], kept) and torch.equal(theirs[0].to(values.dtype), sent.values)
        assert torch.isin(arrived, kept).all() or not len(kept)
    read_checks([checks])


@settings(max_examples=300)
@given(case=positions(), code=CODES, flips=st.lists(st.integers(0, 2**20), max_size=8), random=st.none() | st.randoms())
def test_damaged_messages_are_told_as_checks_are_read_and_stay_within_bounds(case, code, flips, random):
    indices, numel = case
    count, checks = len(indices), Checks()
    message = code.send(indices, torch.randn(count), numel, checks).message
    if random is not None:
        message = torch.tensor(list(random.randbytes(len(message))), dtype=torch.uint8)
    for flip in flips if len(message) else ():
        message[flip // 8 % len(message)] ^= 1 << flip % 8
    arrived, theirs = code.receive(message.unsqueeze(0), count, numel, [4], checks)
    assert arrived.shape == theirs.shape == (1, count) and ((arrived >= 0) & (arrived < numel)).all()
    outcomes = []
    for run in (lambda: read_checks([checks]), lambda: code.receive(message.unsqueeze(0), count, numel, [4], None)):
        try:
            run()
            outcomes.append("")
        except PayloadError as error:
            outcomes.append(str(error))
    assert outcomes[0] == outcomes[1] and ("rank 4" in outcomes[0] or not outcomes[0])


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_messages_are_the_same_bits_on_cuda():
    count, numel = 2555, 2_555_000
    indices, values = spread(count, numel), torch.randn(count)
    for kind in VALUE_CODES:
        code = SparseCode("rice", kind)
        message, _, _ = code.encode(indices, values, numel)
        index_bytes = rice_bytes(count, numel)
        on_cuda, sent, arriving = code.encode(indices.cuda(), values.cuda(), numel)
        assert torch.equal(on_cuda[:index_bytes].cpu(), message[:index_bytes])
        for row in (on_cuda, on_cuda.cpu()):
            read_indices, read_values = code.decode(row, count, numel, rank=0)
            assert torch.equal(read_indices.cpu(), sent.cpu())
            assert torch.equal(read_values.cpu(), arriving.to(read_values.dtype).cpu())
