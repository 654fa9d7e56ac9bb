"""The same on CUDA. Skipped where there is none."""

import pytest
import torch
from library import SETTINGS
from torch.optim import SGD
from worlds import Ranks, bucket_of, small_model

import dgcopt
from dgcopt.compressors.selection import Selection
from dgcopt.kernels.torch import block_maxima
from dgcopt.testing import check_compressor

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device on this machine"),
]


def test_selection_is_exact():
    torch.manual_seed(0)
    tensors = [torch.randn(100_003, device="cuda"), torch.randn(70, 30, device="cuda")]
    bucket = bucket_of(tensors)
    for place, tensor in enumerate(tensors):
        bucket.fill([place], [tensor])
    chosen = Selection(bucket.segments, 0.01).largest(bucket.grad, block_maxima(bucket.grad))
    for segment, tensor in zip(bucket.segments, tensors, strict=True):
        mine = chosen[(chosen >= segment.start) & (chosen < segment.stop)]
        expected = tensor.flatten().abs().topk(len(mine)).values
        assert torch.equal(bucket.grad[mine].abs().sort(descending=True).values, expected)


@pytest.mark.parametrize("compressor", [dgcopt.NoCompression(), dgcopt.FP16(), dgcopt.DGC(0.05)], ids=repr)
def test_training_equals_the_cpu(compressor):
    on_cpu, on_gpu = (
        Ranks(3, lambda p: SGD(p, lr=0.1, momentum=0.9), model=model, compression=compressor)
        for model in (small_model, lambda: small_model().cuda())
    )
    for seed in range(4):
        on_cpu.step(seed)
        on_gpu.step(seed)
        on_gpu.assert_replicas_equal()
    for ours, theirs in zip(on_gpu.weights(), on_cpu.weights(), strict=True):
        torch.testing.assert_close(ours.cpu(), theirs, rtol=1e-3, atol=1e-5)


@pytest.mark.parametrize(("compressor", "given"), SETTINGS, ids=[repr(c)[:80] for c, _ in SETTINGS])
def test_it_keeps_what_every_compressor_must(compressor, given):
    assert not check_compressor(compressor, sizes=(1, 3), device="cuda", **given).failures
