"""Exact selection: C and Triton select the positions of the specification, and it selects the largest."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from dgcopt.compressors.sparse.schedule import Selection, count_of
from dgcopt.flat.buckets import Bucket
from dgcopt.kernels import Chunks, Groups
from dgcopt.kernels.reductions.torch import block_maxima
from tests.support.oracle import (
    EXAMPLES,
    KINDS,
    Sizes,
    all_implementations,
    assert_same_bits,
    built,
    halves_and_wholes,
    native,
    numbers,
    numels,
    specification,
)
from tests.support.worlds import bucket_of

DISTRIBUTIONS = {
    "normal": lambda n: torch.randn(n),
    "heavy-tailed": lambda n: torch.distributions.StudentT(1.0).sample((n,)),
    "constant": lambda n: torch.full((n,), -2.5),
    "zero": lambda n: torch.zeros(n),
    "tied": lambda n: torch.randint(-3, 4, (n,)).float(),
    "one spike": lambda n: torch.zeros(n).index_fill_(0, torch.tensor([n - 1]), 7.0),
    "descending": lambda n: torch.arange(n, 0, -1).float(),
    "of all sizes": lambda n: torch.randn(n) * torch.rand(n).mul(200).sub(100).exp2(),
}


def assert_exact(tensors: list[torch.Tensor], ratio: float) -> None:
    bucket = bucket_of(tensors)
    for segment in bucket.segments:
        segment.view(bucket.grad).copy_(segment.param)
    assert_exact_of_all(bucket, ratio)
    chosen = Selection(bucket.segments, ratio).largest(bucket.grad, block_maxima(bucket.grad))
    assert (chosen[1:] > chosen[:-1]).all()
    for segment, tensor in zip(bucket.segments, tensors, strict=True):
        mine = chosen[(chosen >= segment.start) & (chosen < segment.stop)]
        k = math.ceil(ratio * tensor.numel())
        assert torch.equal(mine, mine.sort().values)
        expected = tensor.flatten().abs().topk(k).values
        assert torch.equal(bucket.grad[mine].abs().sort(descending=True).values, expected)
    assert len(chosen) == sum(count_of(ratio, tensor.numel()) for tensor in tensors)


def assert_exact_of_all(bucket: Bucket, ratio: float) -> None:
    """The same with one ratio for the whole bucket."""
    selection = Selection(bucket.segments, ratio, together=True)
    chosen = selection.largest(bucket.grad, block_maxima(bucket.grad))
    assert (chosen[1:] > chosen[:-1]).all()
    owned = torch.cat([torch.arange(segment.start, segment.stop) for segment in bucket.segments])
    assert torch.isin(chosen, owned).all()
    assert len(chosen) == selection.count == count_of(ratio, len(owned))
    expected = bucket.grad[owned].abs().topk(len(chosen)).values
    assert torch.equal(bucket.grad[chosen].abs().sort(descending=True).values, expected)


@pytest.mark.parametrize("kind", DISTRIBUTIONS)
@pytest.mark.parametrize("numel", [1, 2, 63, 64, 65, 130, 200])
def test_every_k_of_one_tensor(kind: str, numel: int) -> None:
    tensor = DISTRIBUTIONS[kind](numel)
    for k in range(1, numel + 1):
        assert_exact([tensor], k / numel if math.ceil(k / numel * numel) == k else (k - 0.5) / numel)


@settings(max_examples=60, deadline=None)
@given(
    shapes=st.lists(st.integers(1, 5000), min_size=1, max_size=6),
    kinds=st.lists(st.sampled_from(sorted(DISTRIBUTIONS)), min_size=6, max_size=6),
    ratio=st.floats(1e-5, 1.0),
    seed=st.integers(0, 2**31),
)
def test_many_tensors_in_one_bucket(shapes: list[int], kinds: list[str], ratio: float, seed: int) -> None:
    torch.manual_seed(seed)
    assert_exact([DISTRIBUTIONS[kind](numel) for numel, kind in zip(shapes, kinds, strict=False)], ratio)


def test_large_tensor_at_a_small_ratio() -> None:
    torch.manual_seed(0)
    assert_exact([torch.randn(300_000), torch.randn(1000, 70)], 0.001)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float16, torch.bfloat16])
def test_other_dtypes(dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    assert_exact(
        [torch.randn(30_000).pow(3).to(dtype), torch.zeros(700, dtype=dtype), torch.ones(90, dtype=dtype)], 0.003
    )


def test_nan_is_selected_first() -> None:
    tensor = torch.randn(1000)
    tensor[777] = math.nan
    bucket = bucket_of([tensor])
    bucket.fill([0], [tensor])
    assert 777 in Selection(bucket.segments, 0.001).largest(bucket.grad, block_maxima(bucket.grad))


def test_block_maxima() -> None:
    flat = torch.randn(640)
    assert torch.equal(block_maxima(flat), flat.abs().view(-1, 64).amax(1))


def test_gaps_between_tensors_never_win() -> None:
    for numel in (65, 577, 1000):
        bucket = bucket_of([torch.zeros(numel), torch.zeros(numel)])
        for k in (1, 64, numel):
            chosen = Selection(bucket.segments, k / numel).largest(bucket.grad, block_maxima(bucket.grad))
            start = bucket.segments[1].start
            assert chosen.tolist() == [*range(k), *range(start, start + k)]


@all_implementations(
    sizes=Sizes(
        st.lists(st.integers(1, 700), min_size=1, max_size=3),
        st.lists(st.integers(1, 700) | st.just(5000), min_size=1, max_size=6),
    ),
    large=Sizes(st.sampled_from([0, 0, 5000]), st.sampled_from([0] * 6 + [280_000])),
    dtype=halves_and_wholes,
    kind=st.sampled_from(KINDS),
    ratio=st.sampled_from([0.0, 0.001, 0.01, 0.1, 0.5, 1.0]),
    together=st.booleans(),
    seed=st.integers(0, 2**20),
)
def test_select(of, sizes, large, dtype, kind, ratio, together, seed):
    spans, start = [], 0
    for size in [*sizes, *([large] if large else [])]:
        spans.append((start, start + size))
        start += -(-size // 64) * 64
    flat = torch.zeros(start, dtype=dtype)
    for place, (first, last) in enumerate(spans):
        flat[first:last] = numbers(last - first, dtype, kind, seed + place)
    pieces = [spans] if together else [[span] for span in spans]
    counts = [math.ceil(ratio * sum(last - first for first, last in group)) for group in pieces]
    groups = Groups(pieces, counts, flat.device)
    assert_same_bits(of.block_maxima(flat), block_maxima(flat))
    chosen = of.select(flat, block_maxima(flat), groups)
    assert torch.equal(chosen, specification.select(flat, block_maxima(flat), groups))
    asked: list[Tensor] = []

    def rows_of(blocks: Tensor) -> Tensor:
        asked.append(blocks)
        return flat.to(blocks.device).view(-1, 64)[blocks]

    ahead, values = of.select_ahead(rows_of, block_maxima(flat), groups)
    assert torch.equal(ahead, chosen)
    assert_same_bits(values, flat[chosen])
    assert all(torch.equal(blocks, blocks.unique()) and len(blocks) <= sum(counts) for blocks in asked)
    assert_same_bits(specification.select_ahead(rows_of, block_maxima(flat), groups)[1], values)
    # and both are right: the largest of each group, of equal ones the first
    width = {2: torch.int16, 4: torch.int32}[flat.element_size()]
    magnitudes = (flat.view(width) & torch.iinfo(width).max).tolist()
    expected: list[int] = []
    for group, count in zip(pieces, counts, strict=True):
        owned = [position for first, last in group for position in range(first, last)]
        expected += sorted(sorted(owned, key=lambda position: -magnitudes[position])[:count])
    assert chosen.tolist() == expected


@all_implementations(
    numel=Sizes(st.integers(0, 200) | st.just(2500), numels),
    kind=st.sampled_from(KINDS),
    least=st.sampled_from([1e-45, 1e-3, 1.0, 2.0, 1e38, math.inf]),
    share=st.sampled_from([0.0, 0.001, 0.1, 0.5, 0.99, 1.0]),
    shift=st.integers(0, 3),
    seed=st.integers(0, 2**20),
)
def test_select_above(of, numel, kind, least, share, shift, seed):
    flat = numbers(numel + shift, torch.float32, kind, seed)[shift:]
    magnitudes, bound = flat.abs().tolist(), torch.tensor(least).item()
    reach = [i for i in range(numel) if magnitudes[i] >= bound]
    for most in {int(share * numel), int(share * len(reach)), max(0, len(reach) - 1), len(reach), numel + 1}:
        found, values = of.select_above(flat, least, most)
        expected_positions, expected_values = specification.select_above(flat, least, most)
        assert torch.equal(found, expected_positions)
        assert_same_bits(values, expected_values)
        assert_same_bits(values, flat[found])
        largest = sorted(reach, key=lambda i: -magnitudes[i])[:most]
        assert found.tolist() == sorted(largest)
        sums = torch.full((2, numel + shift), 7.0)[:, shift:]
        ours, theirs = (
            each.add_and_select_above(flat, flat.flip(0), 0.9, out, least, most)
            for each, out in zip((of, specification), sums, strict=True)
        )
        assert_same_bits(*sums)
        assert torch.equal(ours[0], theirs[0])
        assert_same_bits(ours[1], theirs[1])


@built
def test_a_sample_that_misleads():
    flat = torch.linspace(1, 2, 2**20)
    flat[:: 2**20 // 4096] = 3.0  # all that is looked at first
    for most in (1000, 5000, 400_000):
        expected, _ = specification.select_above(flat, 0.5, most)
        out = torch.empty_like(flat)
        for found, values in (
            native.select_above(flat, 0.5, most),
            native.add_and_select_above(flat, flat, 0.0, out, 0.5, most),
        ):
            assert torch.equal(found, expected) and torch.equal(values, flat[found])
        assert torch.equal(out, flat)
        flat[:: 2**20 // 4096] = 0.1


@all_implementations(
    sizes=st.lists(st.one_of(st.integers(1, 300), st.sampled_from([64, 1000, 4096])), min_size=1, max_size=5),
    dtype=halves_and_wholes,
    kind=st.sampled_from(KINDS),
    ratio=st.sampled_from([0.001, 1 / 128, 1 / 64, 0.1, 0.5, 1.0]),
    seed=st.integers(0, 2**20),
)
def test_select_chunks(of, sizes, dtype, kind, ratio, seed):
    spans, start = [], 0
    for size in sizes:
        spans.append((start, start + size))
        start += -(-size // 64) * 64
    flat, added = torch.zeros(2, start, dtype=dtype)
    for place, (first, last) in enumerate(spans):
        flat[first:last] = numbers(last - first, dtype, kind, seed + place)
        added[first:last] = numbers(last - first, dtype, kind, seed + 100 + place)
    counts = [math.ceil(ratio * size) for size in sizes]
    chunks = Chunks(spans, counts, flat.device)
    chosen, values = of.select_chunks(flat, chunks)
    expected_positions, expected_values = specification.select_chunks(flat, chunks)
    assert torch.equal(chosen, expected_positions)
    assert_same_bits(values, expected_values)
    assert_same_bits(values, flat[chosen])
    width = {2: torch.int16, 4: torch.int32}[flat.element_size()]
    magnitudes = (flat.view(width) & torch.iinfo(width).max).tolist()
    expected: list[int] = []
    for (first, last), count in zip(spans, counts, strict=True):
        expected += sorted(sorted(range(first, last), key=lambda position: -magnitudes[position])[:count])
    assert chosen.tolist() == expected
    sums = torch.full((2, start), 7.0)
    ours, theirs = (
        each.add_and_select_chunks(flat.float(), added.float(), 0.9, out, chunks)
        for each, out in zip((of, specification), sums, strict=True)
    )
    assert_same_bits(*sums)
    assert torch.equal(ours[0], theirs[0])
    assert_same_bits(ours[1], theirs[1])


@built
def test_a_chunk_beyond_the_end_is_refused():
    with pytest.raises(ValueError, match="beyond"):
        native.select_chunks(torch.zeros(64), Chunks([(0, 65)], [1], torch.device("cpu")))
    with pytest.raises(ValueError, match="begin with the first"):
        native.add_and_select_chunks(
            *torch.zeros(2, 128), 1.0, torch.zeros(128), Chunks([(64, 128)], [1], torch.device("cpu"))
        )


@built
@settings(max_examples=EXAMPLES, deadline=None)
@given(count=st.integers(0, 300), share=st.floats(0, 1.5), kind=st.sampled_from(KINDS), seed=st.integers(0, 2**20))
def test_largest_first(count, share, kind, seed):
    values, number = numbers(count, torch.float32, kind, seed).nan_to_num(), torch.tensor([int(share * count)])
    for mine, other in zip(
        native.largest_first(values, number), specification.largest_first(values, number), strict=True
    ):
        assert torch.equal(mine, other)
    order, is_first = specification.largest_first(values, number)
    assert int(is_first.sum()) == min(int(number), count) and torch.equal(order.sort().values, torch.arange(count))
    sizes = values.abs()[order]
    assert not is_first.any() or is_first.all() or sizes[is_first].amin() >= sizes[~is_first].amax()
