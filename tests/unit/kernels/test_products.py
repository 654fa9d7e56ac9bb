"""Products of thin matrices: in C the bits of the specification in torch."""

from __future__ import annotations

import pytest
import torch
from hypothesis import strategies as st

from tests.support.oracle import KINDS, all_implementations, assert_same_bits, built, native, numbers, specification


@all_implementations(
    rows=st.integers(0, 40),
    columns=st.one_of(st.integers(0, 40), st.sampled_from([64, 300])),
    rank=st.integers(1, 5),
    kind=st.sampled_from(KINDS),
    shift=st.integers(0, 3),
    taken_away=st.booleans(),
    seed=st.integers(0, 2**20),
)
def test_put_product(of, rows, columns, rank, kind, shift, taken_away, seed):
    left, right = (numbers(n * rank, torch.float32, kind, seed + n).view(n, rank) for n in (rows, columns))
    before = numbers(rows * columns + shift, torch.float32, kind, seed + 1)[shift:]
    outs, rests = torch.full((2, rows * columns), 7.0), [before.clone(), before.clone()]
    for each, out, less in zip((of, specification), outs, rests, strict=True):
        each.put_product(left, right, out, less if taken_away else None)
    assert_same_bits(*outs)
    assert_same_bits(*rests)
    if kind == "tied":
        assert torch.equal(outs[0].view(rows, columns), left @ right.T)


@built
def test_what_are_no_factors_is_refused():
    with pytest.raises(ValueError, match="not the factors"):
        native.put_product(torch.zeros(3, 2), torch.zeros(4, 1), torch.zeros(12), None)
    with pytest.raises(ValueError, match="flat tensor of 12"):
        native.put_product(torch.zeros(3, 1), torch.zeros(4, 1), torch.zeros(11), None)
