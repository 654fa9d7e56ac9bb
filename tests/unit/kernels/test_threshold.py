"""The magnitudes that reach a threshold: the same in C as in torch, and right."""

from __future__ import annotations

import math

import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from oracle import EXAMPLES, KINDS, built, numbers, numels

from dgcopt.kernels import native
from dgcopt.kernels import torch as specification


@built
@settings(max_examples=EXAMPLES, deadline=None)
@given(
    numel=numels,
    kind=st.sampled_from(KINDS),
    least=st.sampled_from([1e-45, 1e-3, 1.0, 2.0, 1e38, math.inf]),
    share=st.sampled_from([0.0, 0.001, 0.1, 0.5, 0.99, 1.0]),
    shift=st.integers(0, 3),
    seed=st.integers(0, 2**20),
)
def test_positions_above(numel, kind, least, share, shift, seed):
    flat = numbers(numel + shift, torch.float32, kind, seed)[shift:]
    magnitudes, bound = flat.abs().tolist(), torch.tensor(least).item()
    reach = [i for i in range(numel) if magnitudes[i] >= bound]
    for most in {int(share * numel), int(share * len(reach)), len(reach), numel + 1}:
        found = native.positions_above(flat, least, most)
        assert torch.equal(found, specification.positions_above(flat, least, most))
        largest = sorted(reach, key=lambda i: -magnitudes[i])[:most]
        assert found.tolist() == sorted(largest)


@built
def test_a_sample_that_misleads():
    flat = torch.linspace(1, 2, 2**20)
    flat[:: 2**20 // 4096] = 3.0  # all that is looked at first
    for most in (1000, 5000, 400_000):
        found = native.positions_above(flat, 0.5, most)
        assert torch.equal(found, specification.positions_above(flat, 0.5, most))
        flat[:: 2**20 // 4096] = 0.1
