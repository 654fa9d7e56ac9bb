"""What tests of kernels share: numbers of all kinds, and what counts as the same bits."""

from __future__ import annotations

import dataclasses
import importlib
import importlib.util
import math
import os
from collections.abc import Callable
from typing import Any, NamedTuple

import pytest
import torch
from hypothesis import Phase, given, settings
from hypothesis import strategies as st
from torch import Tensor

from dgcopt import kernels
from dgcopt.kernels import Chunks, Groups, Mixture, Momentum, Parts

built = pytest.mark.skipif(
    not kernels.instructions(),
    reason="the compiled loops are not built here: install dgcopt with a C compiler, on a processor with AVX2 or NEON",
)
EXAMPLES = int(os.environ.get("DGCOPT_TEST_EXAMPLES", "250"))
ON_CUDA = torch.cuda.is_available()
IN_TRITON = max(1, EXAMPLES // (5 if ON_CUDA else 25))
"""Examples in Triton: its interpreter is slow, and on a device many of them have to be compiled for."""
HAS_TRITON = importlib.util.find_spec("triton") is not None
in_triton = [pytest.mark.skipif(not HAS_TRITON, reason="Triton is not installed"), *[pytest.mark.gpu] * ON_CUDA]

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
        width = {2: torch.int16, 4: torch.int32, 8: torch.int64}[ours.element_size()]
        differ = (ours.view(width) != theirs.view(width)) & ~(ours.isnan() & theirs.isnan())
        assert not differ.any(), (ours[differ][:4], theirs[differ][:4])


def places(blocks: int, tensors: int, seed: int) -> Tensor:
    """To which of the tensors each block belongs."""
    return torch.randint(tensors, (blocks,), generator=torch.Generator().manual_seed(seed)).sort().values


def some_mixture(numel: int, kind: str, seed: int) -> Mixture:
    """A mixture of which some parts have gaps between them, and some have none."""
    generator = torch.Generator().manual_seed(seed)
    cuts = sorted(torch.randint(numel + 1, (6,), generator=generator).tolist())
    starts, stops = [*cuts[:2], *cuts[3:5]], [*cuts[1:3], *cuts[4:6]]
    parts = [
        numbers(stop - start, torch.float32, kind, seed + start) for start, stop in zip(starts, stops, strict=True)
    ]
    return Mixture(1 - 0.9, 0.9, starts, parts)


class Sizes(NamedTuple):
    """How large operands are in all implementations, and what only those are given that are compiled."""

    few: st.SearchStrategy[Any]
    many: st.SearchStrategy[Any]

    def of(self, compiled: bool) -> st.SearchStrategy[Any]:
        return self.few | self.many if compiled else self.few


class Implementation:
    """All operations in one implementation, by name."""

    def __init__(self, module: str) -> None:
        self.module = module

    def __getattr__(self, name: str) -> Callable[..., Any]:
        """Return the operation of that name in its family's torch.py, native.py or triton.py."""
        family = getattr(kernels, name).specification.__module__.rpartition(".")[0]
        found: Callable[..., Any] = getattr(importlib.import_module(f"{family}.{self.module}"), name)
        return found


class InTriton(Implementation):
    """The kernels in Triton, for operands on a CPU: where there is CUDA they are copied there, as badly aligned, and
    back."""

    def __init__(self) -> None:
        super().__init__("triton")

    def __getattr__(self, name: str) -> Callable[..., Any]:
        inner = super().__getattr__(name)
        if not ON_CUDA:
            return inner

        def outer(*operands: Any) -> Any:
            stays = 1 if name == "of_owners" else None  # the number of elements that each row has
            there = [x if place == stays else _moved(x, "cuda") for place, x in enumerate(operands)]
            found = inner(*there)
            for mine, theirs in zip(operands, there, strict=True):
                for old, new in zip(tensors_in(mine), tensors_in(theirs), strict=True):
                    old.copy_(new)
            return _moved(found, "cpu")

        return outer


specification, native = Implementation("torch"), Implementation("native")


def tensors_in(x: Any) -> list[Tensor]:
    """Those that an operand is or holds."""
    of = x.tensors if isinstance(x, Parts) else x.parts if isinstance(x, Mixture) else x if isinstance(x, list) else [x]
    return [each for each in of if isinstance(each, Tensor)]


def _moved(x: Any, device: str) -> Any:
    if isinstance(x, Tensor):
        beside = x.storage_offset() % 16
        moved = torch.empty(beside + math.prod(x.shape[:1]) * (x.stride(0) if x.dim() else 1) + 64, dtype=x.dtype)
        return moved.to(device).as_strided(x.shape, x.stride(), beside).copy_(x)
    if isinstance(x, list | tuple):
        return type(x)(_moved(each, device) for each in x)
    if isinstance(x, Chunks | Groups):
        return dataclasses.replace(x, device=torch.device(device))
    if isinstance(x, Parts):
        return dataclasses.replace(x, tensors=_moved(x.tensors, device))
    if isinstance(x, Mixture):
        return dataclasses.replace(x, parts=_moved(x.parts, device))
    return x


block_counts = Sizes(st.sampled_from([0, 1, 2, 3, 17, 40]), st.just(2200))
hows = st.sampled_from(["set", "add", "subtract"])
keys = st.one_of(st.integers(0, 2**64 - 1), st.sampled_from([0, 2**31, 2**32 - 1, 2**63, 2**64 - 1]))


def all_implementations(**strategies: Any) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Like `given`, for a test of `of`, first in C, then in Triton, compiled where there is CUDA, else interpreted."""

    def decorate(test: Callable[..., None]) -> Callable[..., None]:
        def with_one(of: Any, examples: int) -> Callable[[], None]:
            def run(**drawn: Any) -> None:
                test(of, **drawn)

            run.__name__ = test.__name__  # by which hypothesis remembers what failed
            phases = tuple(Phase) if of is native else (Phase.reuse, Phase.generate)  # no smaller ones: they are slow
            compiled = of is native or ON_CUDA
            fitting = {name: x.of(compiled) if isinstance(x, Sizes) else x for name, x in strategies.items()}
            return settings(max_examples=examples, deadline=None, phases=phases)(given(**fitting)(run))

        def run_it(run: Callable[[], None]) -> None:
            run()

        run_it.__name__, run_it.__doc__ = test.__name__, test.__doc__
        run_it.in_c = with_one(native, EXAMPLES)  # type: ignore[attr-defined]
        return pytest.mark.parametrize(
            "run",
            [
                pytest.param(with_one(native, EXAMPLES), id="native", marks=built),
                pytest.param(with_one(InTriton(), IN_TRITON), id="triton", marks=in_triton),
            ],
        )(run_it)

    return decorate
