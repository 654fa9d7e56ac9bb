"""What tests of kernels share: numbers of all kinds, and what counts as the same bits."""

from __future__ import annotations

import math
import os

import pytest
import torch
from hypothesis import strategies as st
from torch import Tensor

from dgcopt.kernels import Momentum, native

built = pytest.mark.skipif(
    not native.instructions(),
    reason="the native kernels are not built here: install dgcopt with a C compiler, on a processor with AVX2 or NEON",
)
EXAMPLES = int(os.environ.get("DGCOPT_TEST_EXAMPLES", "250"))

SPECIAL = torch.tensor([math.nan, math.inf, -math.inf, 0.0, -0.0, 1e-45, -1e-42, 3e38, -3e38])
KINDS = ("of all sizes", "normal", "tied", "zero", "sparse")
numels = st.one_of(st.integers(0, 200), st.sampled_from([1000, 4096, 5000, 140_001]))
momenta = st.sampled_from(
    [None, *(Momentum(m, d, n) for m in (0.0, 0.9) for d, n in [(0.0, False), (0.3, False), (0.0, True), (0.3, True)])]
)
halves_and_wholes = st.sampled_from([torch.float32, torch.bfloat16])


def numbers(numel: int, dtype: torch.dtype, kind: str, seed: int) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    if kind == "zero":
        return torch.zeros(numel, dtype=dtype)
    if kind == "tied":
        return torch.randint(-3, 4, (numel,), generator=generator).to(dtype)
    normal = torch.randn(numel, generator=generator)
    if kind == "sparse":
        return (normal * (torch.rand(numel, generator=generator) < 0.02)).to(dtype)
    if kind == "of all sizes":
        normal *= torch.randint(-140, 120, (numel,), generator=generator).double().exp2()
        special = torch.rand(numel, generator=generator) < 0.02
        normal[special] = SPECIAL[torch.randint(len(SPECIAL), (int(special.sum()),), generator=generator)]
    return normal.to(dtype)


def assert_same_bits(ours: Tensor | None, theirs: Tensor | None) -> None:
    """NaN equals NaN: which one it is, torch's own loops do not agree upon."""
    assert (ours is None) == (theirs is None)
    if ours is not None and theirs is not None:
        assert ours.dtype == theirs.dtype
        width = {2: torch.int16, 4: torch.int32}[ours.element_size()]
        differ = (ours.view(width) != theirs.view(width)) & ~(ours.isnan() & theirs.isnan())
        assert not differ.any(), (ours[differ][:4], theirs[differ][:4])


def places(blocks: int, tensors: int, seed: int) -> Tensor:
    """To which of the tensors each block belongs."""
    return torch.randint(tensors, (blocks,), generator=torch.Generator().manual_seed(seed)).sort().values
