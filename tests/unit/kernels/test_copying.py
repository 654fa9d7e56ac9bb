"""Scaled copies and largest magnitudes: C and Triton give the bits of the specification."""

from __future__ import annotations

import pytest
import torch
from hypothesis import strategies as st

from dgcopt import kernels
from tests.support.oracle import (
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


@all_implementations(
    sizes=Sizes(*(st.lists(each, min_size=1, max_size=3) for each in (numels.filter(lambda n: n < 6000), numels))),
    dtype=halves_and_wholes,
    scale=st.sampled_from([1.0, 0.5, 1 / 3]),
    kind=st.sampled_from(KINDS),
    shift=st.integers(0, 3),
    threads=st.sampled_from([1, 3]),
    seed=st.integers(0, 2**20),
)
def test_copy_scaled(of, sizes, dtype, scale, kind, shift, threads, seed):
    grads = [numbers(size + shift, dtype, kind, seed + place)[shift:] for place, size in enumerate(sizes)]
    ours, theirs = ([torch.ones(len(g) + 5, dtype=dtype) for g in grads] for _ in range(2))
    before = torch.get_num_threads()
    try:
        torch.set_num_threads(threads)
        peaks = of.copy_scaled(grads, ours, scale)
    finally:
        torch.set_num_threads(before)
    assert_same_bits(peaks, specification.copy_scaled(grads, theirs, scale))
    for g, mine, other, peak in zip(grads, ours, theirs, peaks, strict=True):
        assert_same_bits(mine, other)
        assert_same_bits(mine[: len(g)], g * scale)
        assert not mine[len(g) :].any()
        assert_same_bits(peak[None], g.float().abs().amax()[None] if len(g) else torch.zeros(1))


@all_implementations(
    sizes=Sizes(*(st.lists(each, min_size=1, max_size=5) for each in (numels.filter(lambda n: n < 5000), numels))),
    dtype=halves_and_wholes,
    kind=st.sampled_from(KINDS),
    shift=st.integers(0, 3),
    threads=st.sampled_from([1, 3]),
    seed=st.integers(0, 2**20),
)
def test_peaks(of, sizes, dtype, kind, shift, threads, seed):
    tensors = [numbers(size + shift, dtype, kind, seed + place)[shift:] for place, size in enumerate(sizes)]
    images = torch.ones(2, 3, 5, 5, dtype=dtype).contiguous(memory_format=torch.channels_last)
    images[1, 2, 4, 4] = -7
    before = torch.get_num_threads()
    try:
        torch.set_num_threads(threads)
        found = of.peaks([*tensors, images])
    finally:
        torch.set_num_threads(before)
    assert_same_bits(found, specification.peaks([*tensors, images]))
    expected = [x.float().abs().amax() if x.numel() else torch.zeros(()) for x in tensors]
    assert_same_bits(found, torch.stack([*expected, torch.tensor(7.0)]))


@built
def test_peaks_are_not_looked_for_between_elements():
    sliced = torch.ones(4, 4)[:, :2]
    with pytest.raises(ValueError, match="in one piece"):
        native.peaks([sliced])
    assert kernels.peaks([sliced]).tolist() == [1.0]
    assert kernels.peaks([torch.ones(3, dtype=torch.float64), torch.zeros(0, dtype=torch.float64)]).tolist() == [1, 0]


@built
def test_copies_do_not_leave_their_place():
    g, out = torch.ones(100), torch.ones(90)
    with pytest.raises(ValueError, match="100 elements do not fit into 90"):
        native.copy_scaled([g], [out], 1.0)
    odd = (torch.ones(40)[::2], torch.ones(20, dtype=torch.bfloat16))
    for g, to in [*((x, g[:20]) for x in odd), *((g[:20], x) for x in odd)]:
        with pytest.raises(ValueError, match="of one dtype are needed, each in one piece"):
            native.copy_scaled([g], [to], 1.0)
        assert kernels.copy_scaled.implementation([g], [to], 1.0) is kernels.copy_scaled.specification
    assert kernels.copy_scaled.implementation([out], [out], 1.0) is kernels.copy_scaled.native


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_gradients_that_are_views_of_their_negatives(dtype):
    """As of `torch.imag(z.conj())`: memory holds the opposite of each element."""
    memory, out, residual = torch.arange(128.0, dtype=dtype), torch.ones(192, dtype=dtype), torch.ones(128, dtype=dtype)
    negative = torch._neg_view(memory)
    assert negative.is_contiguous() and negative.is_neg()
    assert kernels.copy_scaled([negative], [out], 2.0).tolist() == kernels.peaks([negative]).tolist() == [127]
    assert_same_bits(out, torch.cat((memory * -2, torch.zeros(64, dtype=dtype))))
    parts = kernels.Parts([negative], torch.tensor([0]), torch.tensor([128]))
    kernels.accumulate(residual, None, parts, torch.zeros(2, dtype=dtype), None)
    assert_same_bits(residual, 1 - torch.arange(128.0, dtype=dtype))
    assert not negative.any()
