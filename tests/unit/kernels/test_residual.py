"""A gradient added to what has not been sent: in C the bits of the specification in torch."""

from __future__ import annotations

import pytest
import torch
from hypothesis import strategies as st

from tests.support.oracle import (
    KINDS,
    Sizes,
    all_implementations,
    assert_same_bits,
    built,
    native,
    numbers,
    specification,
)


@all_implementations(
    blocks=Sizes(st.integers(0, 5) | st.just(100), st.just(2000)),
    kind=st.sampled_from(KINDS),
    decay=st.sampled_from([1.0, 0.95, 0.3]),
    what=st.sampled_from(["add_and_maxima", "add_and_norms"]),
    shift=st.integers(0, 3),
    seed=st.integers(0, 2**20),
)
def test_add_and(of, blocks, kind, decay, what, shift, seed):
    g, e = (numbers(64 * blocks + shift, torch.float32, kind, seed + i)[shift:] for i in range(2))
    sums = torch.full((2, 64 * blocks + shift), 7.0)[:, shift:]
    ours, theirs = (getattr(each, what)(g, e, decay, out) for each, out in zip((of, specification), sums, strict=True))
    assert_same_bits(*sums)
    assert_same_bits(ours, theirs)


@built
def test_half_a_block_is_refused():
    with pytest.raises(ValueError, match="flat tensor of 64"):
        native.add_and_norms(*torch.zeros(2, 70), 1.0, torch.zeros(70))
