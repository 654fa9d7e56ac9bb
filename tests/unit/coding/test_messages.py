"""Sparse messages: round trips, sizes, refusals, damage, and the same bits on every device."""

from typing import ClassVar

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from dgcopt import kernels
from dgcopt.coding import (
    VALUE_CODES,
    VALUE_DTYPES,
    Checks,
    SparseCode,
    read_checks,
    rice_bytes,
)
from dgcopt.errors import ConfigError, PayloadError
from tests.support.coordinates import CODES, INT32, largest, positions, spread
from tests.unit.coding.test_rice import excess_of
from tests.unit.coding.test_values import DTYPES


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


def test_positions_that_an_int32_does_not_hold_are_refused():
    assert SparseCode("int32").nbytes(2, 2**31) == 16 and SparseCode("rice").nbytes(2, 2**33)
    with pytest.raises(
        ConfigError, match=f"among {2**31 + 64} elements of a bucket do not fit into int32: set indices"
    ):
        SparseCode("int32").send(torch.tensor([5, 2**31]), torch.ones(2), 2**31 + 64, Checks())


def test_all_positions_that_an_int32_holds_arrive():
    last = torch.tensor([0, 2**31 - 1])
    message, _, _ = INT32.encode(last, torch.ones(2), 2**31)
    assert torch.equal(INT32.decode(message, 2, 2**31, rank=0)[0], last)


@pytest.mark.parametrize("kind", ["rice", "int32"])
def test_messages_without_coordinates(kind):
    code = SparseCode(kind)
    messages = torch.stack([code.encode(torch.arange(0), torch.ones(0), 300)[0]] * 3)
    assert [len(part) for part in code.decode_rows(messages, 0, 300, range(3))] == [0, 0, 3]
    assert [part.shape for part in code.receive(messages, 0, 300, range(3), Checks())] == [(3, 0)] * 2


def test_coordinates_lie_where_they_always_did():
    message, _, _ = SparseCode("int32", "fp16").encode(torch.tensor([2, 5, 9]), torch.tensor([1.0, -2.0, 0.5]), 300)
    assert message[:12].view(torch.int32).tolist() == [2, 5, 9]
    assert message[12:16].tolist() == [0] * 4
    assert message[16:22].view(torch.float16).tolist() == [1.0, -2.0, 0.5]
    assert len(message) == 24


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
def test_values_out_of_range_saturate_but_infinity_stays_visible(dtype):
    values = torch.tensor([1e6, -1e6, float("inf"), 3.0], dtype=dtype)
    message, _, _ = SparseCode("int32", "fp16").encode(torch.arange(4), values, 300)
    _, arrived = SparseCode("int32", "fp16").decode(message, 4, 300, rank=0)
    assert arrived.tolist() == [65504.0, -65504.0, float("inf"), 3.0]


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


@settings(max_examples=200)
@given(
    case=positions(),
    index_kind=st.sampled_from(["rice", "int32"]),
    kind=st.sampled_from(sorted(VALUE_CODES)),
    dtype=st.sampled_from(DTYPES),
)
def test_every_rank_decodes_the_sent_values(case, index_kind, kind, dtype):
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
        patch.setattr(kernels.Kernel, "implementation", lambda kernel, *_: kernel.specification)
        return run(*arguments)


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
    code.encode_rows(indices, values, torch.tensor([count]), numel, count)
    assert OnDevice.waits == ["cpu"] * (index_kind == "rice")


@settings(max_examples=200)
@given(case=positions(), code=CODES, seed=st.integers(0, 2**20))
def test_messages_of_as_many_coordinates_are_those_of_any_number(case, code, seed):
    """The same coordinates travel, and the same bits where all do, by the kernels in torch too."""
    indices, numel = case
    values, checks = torch.randn(len(indices), generator=torch.Generator().manual_seed(seed)), Checks()
    message, kept, arriving = code.encode(indices, values, numel)
    sent = code.send(indices, values, numel, checks)
    fits = torch.ones(len(indices), dtype=torch.bool) if sent.fits is None else sent.fits
    assert torch.equal(sent.indices[fits], kept) and not sent.values[~fits].any()
    assert torch.equal(sent.indices.sort().values, indices)
    if fits.all():
        assert torch.equal(sent.message, message) and torch.equal(sent.values, arriving)
    by_torch = in_torch(code.send, indices, values, numel, checks)
    assert torch.equal(by_torch.message, sent.message) and torch.equal(by_torch.indices, sent.indices)
    for receive in (code.receive, lambda *args: in_torch(code.receive, *args)):
        arrived, theirs = receive(sent.message.unsqueeze(0), len(indices), numel, [3], checks)
        assert torch.equal(arrived[0][fits], kept) and torch.equal(theirs[0].to(values.dtype), sent.values)
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
