"""Selection takes exactly the k largest magnitudes of every tensor."""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from dgcopt.compressors.sparse.selection import Selection, count_of
from dgcopt.flat.buckets import Bucket
from dgcopt.kernels.reductions.torch import block_maxima
from tests.support.worlds import bucket_of

KINDS = {
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


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("numel", [1, 2, 63, 64, 65, 130, 200])
def test_every_k_of_one_tensor(kind: str, numel: int) -> None:
    tensor = KINDS[kind](numel)
    for k in range(1, numel + 1):
        assert_exact([tensor], k / numel if math.ceil(k / numel * numel) == k else (k - 0.5) / numel)


@settings(max_examples=60, deadline=None)
@given(
    shapes=st.lists(st.integers(1, 5000), min_size=1, max_size=6),
    kinds=st.lists(st.sampled_from(sorted(KINDS)), min_size=6, max_size=6),
    ratio=st.floats(1e-5, 1.0),
    seed=st.integers(0, 2**31),
)
def test_many_tensors_in_one_bucket(shapes: list[int], kinds: list[str], ratio: float, seed: int) -> None:
    torch.manual_seed(seed)
    assert_exact([KINDS[kind](numel) for numel, kind in zip(shapes, kinds, strict=False)], ratio)


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
