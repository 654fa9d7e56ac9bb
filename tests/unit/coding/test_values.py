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
    decode_dense,
    decode_values,
    dense_bytes,
    encode_dense,
    encode_values,
    value_bytes,
)
from dgcopt.errors import ConfigError, PayloadError

DTYPES = (torch.float64, torch.float32, torch.float16, torch.bfloat16)


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
