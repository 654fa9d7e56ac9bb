"""The largest of every chunk: the same in C as in torch, and right."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import strategies as st

from dgcopt.kernels import Chunks
from tests.support.oracle import (
    KINDS,
    all_implementations,
    assert_same_bits,
    built,
    halves_and_wholes,
    native,
    numbers,
    specification,
)


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
