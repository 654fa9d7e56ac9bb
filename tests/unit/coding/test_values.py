"""Codes of values: promised bytes, bounded errors, exact special cases, and refusals."""

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from dgcopt.coding import (
    DENSE_CODES,
    VALUE_CODES,
    VALUE_DTYPES,
    coded_bytes,
    decode_rows,
    encode_rows,
)
from dgcopt.coding.values import code_of
from dgcopt.errors import ConfigError, PayloadError

DTYPES = (torch.float64, torch.float32, torch.float16, torch.bfloat16)


def encode(values, kind, codes=VALUE_CODES):
    return encode_rows(values.unsqueeze(0), codes[kind])[0][0]


def decode(payload, count, kind, rank=0, codes=VALUE_CODES):
    return decode_rows(payload.unsqueeze(0), count, codes[kind], [rank])[0]


@given(
    count=st.sampled_from([0, 1, 2, 7, 8, 9, 63, 64, 65, 255, 256, 257, 511, 512, 513, 1025]),
    kind=st.sampled_from(sorted(VALUE_CODES)),
    dtype=st.sampled_from(DTYPES),
    codes=st.sampled_from([VALUE_CODES, DENSE_CODES]),
)
def test_values_of_any_number_and_dtype_take_the_bytes_promised(count, kind, dtype, codes):
    values = torch.randn(count, dtype=torch.float64).to(dtype)
    payload = encode(values, kind, codes)
    assert payload.dtype == torch.uint8 and payload.shape == (coded_bytes(count, codes[kind]),)
    arrived = decode(payload, count, kind, codes=codes)
    assert arrived.shape == (count,)
    assert arrived.dtype == VALUE_DTYPES.get(kind, torch.float32)
    assert arrived.isfinite().all()
    if kind in VALUE_DTYPES:
        assert torch.equal(arrived, values.to(VALUE_DTYPES[kind]))
    elif count:
        assert (arrived - values.float()).norm() <= values.float().norm()


def test_scales_cost_less_than_a_tenth_of_a_bit():
    bits = {kind: 8 * coded_bytes(2**20, code) / 2**20 for kind, code in VALUE_CODES.items()}
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
        (256, 127, decode(encode(values, "int8"), count, "int8")),
        (64, 127, decode(encode(values, "int8", DENSE_CODES), count, "int8", codes=DENSE_CODES)),
        (64, 7, decode(encode(values, "int4", DENSE_CODES), count, "int4", codes=DENSE_CODES)),
    ):
        step = blocks(values, size).abs().amax(1, keepdim=True) / most * (1 + 2**-8)
        assert (blocks(values - arrived, size).abs() <= step / 2 * (1 + 1e-5)).all()
        assert (arrived[values == 0] == 0).all()


@given(count=st.integers(1, 1100), span=st.floats(0, 5), seed=st.integers(0, 2**32))
def test_int4_errs_by_less_than_half_the_ratio_between_levels(count, span, seed):
    random = torch.Generator().manual_seed(seed)
    values = torch.exp(span * torch.rand(count, generator=random)) * torch.randn(count, generator=random).sign()
    arrived = decode(encode(values, "int4"), count, "int4")
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
    arrived = decode(encode(values, "int2"), count, "int2")
    assert torch.equal(arrived.sign(), values.sign())
    assert (arrived - values).square().sum().item() <= 1.2 * best_of_two(values.abs())


def test_sign_carries_the_mean_magnitude():
    values = torch.tensor([1.0, -2.0, 3.0, -2.0] * 100)
    arrived = decode(encode(values, "sign"), 400, "sign")
    assert torch.equal(arrived, 2 * values.sign())


@given(value=st.floats(1e-6, 1e6), count=st.integers(1, 600), kind=st.sampled_from(["int8", "int4", "int2", "sign"]))
def test_equal_values_arrive_as_exactly_as_a_scale_can_tell(value, count, kind):
    values = torch.full((count,), value)
    values[::2] *= -1
    arrived = decode(encode(values, kind), count, kind)
    assert torch.allclose(arrived, values, rtol=2**-8, atol=0)


@pytest.mark.parametrize("kind", ["int8", "int4", "int2", "sign"])
def test_error_feedback_gets_a_lone_value_through_many_zeros(kind):
    residual = torch.zeros(512)
    residual[100] = 1.0
    total = torch.zeros(512)
    for _ in range(2000 if kind == "sign" else 20):
        arrived = decode(encode(residual, kind), 512, kind)
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
        arrived = decode(encode(values, kind), 600, kind)
        assert arrived.isfinite().all()
        assert (arrived.double().abs() <= 1.1 * values.double().abs().amax()).all()
    for bad in (math.nan, math.inf, -math.inf):
        values = torch.cat((torch.tensor([bad], dtype=dtype), ordinary))
        arrived = decode(encode(values, kind), 601, kind)
        assert arrived.isfinite().all()
        assert arrived[1:].sign().equal(ordinary.float().sign())


@pytest.mark.parametrize("kind", ["int8", "int4", "int2", "sign"])
@pytest.mark.parametrize("scale", [math.nan, math.inf, -math.inf, -1.0, 3e38])
def test_a_scale_that_cannot_be_is_refused(kind, scale):
    payload = encode(torch.randn(1000), kind)
    payload[:2].view(torch.bfloat16)[0] = scale
    with pytest.raises(PayloadError, match="rank 5"):
        decode(payload, 1000, kind, rank=5)


def test_values_of_another_length_or_kind_are_refused():
    for kind in VALUE_CODES:
        payload = encode(torch.randn(100), kind)
        for damaged in (payload[:-8], torch.cat((payload, payload[:8])), payload.float()):
            with pytest.raises(PayloadError, match="rank 2"):
                decode(damaged, 100, kind, rank=2)
    for codes in (VALUE_CODES, DENSE_CODES):
        with pytest.raises(ConfigError, match="int3"):
            code_of("int3", codes)
    assert DENSE_CODES.keys() == VALUE_CODES.keys()
