"""Sums of blocks' numbers: in all implementations in the order that is specified, wherever a tensor lies."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from dgcopt.kernels.reductions.torch import STRETCH, sum_of_rows
from tests.support.oracle import InTriton, built, in_triton, native, numbers, specification

COUNTS = (3, 1024, 0, 1025, 2100, 1)


def in_order(x: Tensor) -> float:
    total = torch.zeros((), dtype=x.dtype)
    for each in x:
        total = total + each
    return total.item()


@pytest.mark.parametrize(
    "of",
    [
        pytest.param(specification, id="torch"),
        pytest.param(native, id="native", marks=built),
        pytest.param(InTriton(), id="triton", marks=in_triton),
    ],
)
def test_sums_are_of_stretches_in_order(of):
    place = torch.arange(len(COUNTS)).repeat_interleave(torch.tensor(COUNTS))
    rows = numbers(2 * len(place), torch.float32, "normal", 1).exp2().view(2, -1)
    values = numbers(64 * len(place), torch.float32, "normal", 2)
    squares = sum_of_rows(values.view(-1, 64).double().square())
    largest, norms = of.tensor_norms(values, place, len(COUNTS))
    found = of.tensor_sums(rows, place, len(COUNTS))
    for all_numbers, sums in ((rows[0], found[0]), (rows[1], found[1]), (squares, norms)):
        for mine, total in zip(all_numbers.split(COUNTS), sums.tolist(), strict=True):
            parts = [in_order(stretch) for stretch in mine.split(STRETCH)]
            assert total == in_order(torch.tensor(parts, dtype=mine.dtype))
    expected = [mine.abs().amax().item() if len(mine) else 0.0 for mine in values.split([64 * n for n in COUNTS])]
    assert largest.tolist() == expected


def test_the_order_is_seen_by_this_test():
    """All numbers one after another have another sum."""
    x = numbers(2100, torch.float32, "normal", 1).exp2()
    assert in_order(x) != in_order(torch.tensor([in_order(part) for part in x.split(STRETCH)]))
