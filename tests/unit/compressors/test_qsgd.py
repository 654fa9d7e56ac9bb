"""QSGD: blocks are laid out at once, however many there are."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

import dgcopt
from dgcopt.kernels import BLOCK
from tests.support.waits import Operations
from tests.support.worlds import bucket_of, context_of


@pytest.mark.parametrize("block", [64, 512, 1024])
def test_blocks_are_of_one_tensor_each(block: int) -> None:
    tensors = [torch.randn(n) for n in (1, 64, 65, 512, 513, 5000, 1024)]
    ctx = context_of(bucket_of(tensors), 0, 1)
    place, count = dgcopt.QSGD(block=block)._blocks(ctx)
    expected: list[int] = []
    number = 0
    for segment in ctx.segments:
        for start in range(0, segment.numel, block):
            expected += [number] * -(-min(block, segment.numel - start) // BLOCK)
            number += 1
    assert (place.tolist(), count) == (expected, number)


def test_as_few_operations_for_many_blocks_as_for_few() -> None:
    counts = []
    for numel in (4096, 2**20):
        bucket = bucket_of([torch.randn(numel), torch.randn(100)])
        bucket.fill([0, 1], [segment.param for segment in bucket.segments])
        compressor, ctx = dgcopt.QSGD(), context_of(bucket, 0, 1)
        with Operations() as operations:
            message: Tensor = compressor.encode(bucket.grad, ctx)
            compressor.decode(message, ctx, 0)
        counts.append(operations.count)
    assert counts[0] == counts[1] < 60, counts
