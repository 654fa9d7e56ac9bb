"""The kernels in Triton give the bits of the specification: compiled where there is CUDA, else in its interpreter.

What takes their operations in other files is `all_implementations`.
"""

from __future__ import annotations

import dataclasses
import importlib
import itertools
import os
import runpy
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch._subclasses import fake_tensor

from dgcopt import kernels
from dgcopt.kernels import Chunks, Groups, Kernel, Momentum
from dgcopt.kernels.triton.available import has_triton
from tests.support.oracle import (
    IN_TRITON,
    KINDS,
    ON_CUDA,
    Implementation,
    InTriton,
    assert_same_bits,
    in_triton,
    momenta,
    numbers,
    numels,
    specification,
    tensors_in,
)

triton, raw = InTriton(), Implementation("triton")
DEVICE = torch.device("cuda" if ON_CUDA else "cpu")
pytestmark = in_triton


@settings(max_examples=IN_TRITON, deadline=None)
@given(
    numel=numels.filter(lambda numel: numel < 6000 or ON_CUDA),
    dtypes=st.sampled_from([torch.float32, torch.bfloat16]).flatmap(
        lambda other: st.permutations([torch.float16, other])
    ),
    rule=momenta,
    scale=st.sampled_from([1.0, 0.37]),
    has_gradient=st.booleans(),
    kind=st.sampled_from(KINDS),
    shift=st.integers(0, 3),
    seed=st.integers(0, 2**20),
)
def test_memory_in_float16(numel, dtypes, rule, scale, has_gradient, kind, shift, seed):
    memory, gradient = dtypes

    def operands(device: torch.device | str) -> tuple[Tensor, Tensor, Tensor | None, Tensor]:
        v = numbers(numel + shift, memory, kind, seed).to(device)[shift:]
        u = numbers(numel + shift, memory, kind, seed + 1).to(device)[shift:]
        g = numbers(numel + shift, gradient, kind, seed + 2).to(device)[shift:] if has_gradient else None
        return v, u, g, torch.zeros(-(-numel // 64), dtype=memory, device=device)

    ours, theirs = operands(DEVICE), operands("cpu")
    blocks = torch.arange(0, -(-numel // 64), 3)
    my_rows, their_rows = (torch.ones(len(blocks), 64, dtype=memory, device=device) for device in (DEVICE, "cpu"))
    triton.preview_blocks(*ours[:3], blocks.to(DEVICE), my_rows, rule, scale)
    specification.preview_blocks(*theirs[:3], blocks, their_rows, rule, scale)
    assert_same_bits(my_rows.cpu(), their_rows)
    for of, each in ((triton, ours), (specification, theirs)):
        of.preview_block_maxima(*each, rule, scale)
    assert_same_bits(ours[3].cpu(), theirs[3])
    news = [torch.ones_like(each[0]) for each in (ours, theirs)]
    rests = [operands(device)[1:3] for device in (DEVICE, "cpu")]
    for of, each, new, rest in ((triton, ours, news[0], rests[0]), (specification, theirs, news[1], rests[1])):
        of.preview_block_maxima(*each, rule, scale, new)
        of.update_momentum(*rest, rule or Momentum(0.0), scale)
    for mine, other in ((ours[3], theirs[3]), news, *zip(*rests, strict=True)):
        assert_same_bits(None if mine is None else mine.cpu(), other)
    for of, each in ((triton, ours), (specification, theirs)):
        of.accumulate(*each, rule, scale)
    for mine, other in zip(ours, theirs, strict=True):
        assert_same_bits(None if mine is None else mine.cpu(), other)


def test_ties_across_tiles_select_the_first(monkeypatch):
    """The first are taken, of blocks and of elements."""
    monkeypatch.setattr("dgcopt.kernels.selection.groups._TILE", 64)
    flat = numbers(70 * 64, torch.float32, "tied", 7)
    flat[4200] = 5.0  # and what is larger, wherever it lies
    groups = Groups([[(0, 2000), (2048, 4300)], [(4352, 70 * 64)]], [10, 3], DEVICE)
    maxima = specification.block_maxima(flat)
    chosen = triton.select(flat.to(DEVICE), maxima.to(DEVICE), groups)
    assert torch.equal(chosen.cpu(), specification.select(flat, maxima, dataclasses.replace(groups, device="cpu")))
    assert groups.search.of_blocks.tiles.shape[1] == 3 and groups.search.of_elements.tiles.shape[1] == 10 + 2


def test_rare_operands_equal_the_specification():
    """A norm so small that there is no quotient by it; a byte that is wrong by one; halves; equal magnitudes."""
    small, place, zero = torch.full((64,), 1e-42), torch.zeros(1, dtype=torch.int64), torch.zeros(64)
    cases = [
        ("round_levels", (small, small[:1], place, 7, 5)),
        ("put_trits", (torch.full((13,), 243, dtype=torch.uint8), small[:1], place, zero, "set")),
        ("put_trits", (torch.full((13,), 242, dtype=torch.uint8), small[:1], place, zero, "set")),
        ("nearest_levels", (torch.tensor([1.0, -2.0, 3.0, -3.0]), torch.tensor([[0.0, 2.0, 4.0, 8.0]]), 64)),
        ("means", (torch.linspace(1, 4, 100).repeat_interleave(4), 64, 2, torch.arange(0, 401, 4))),
        *(("rice_" + name, operands) for name, operands in long_rows()),
    ]
    for name, operands in cases:
        mine, expected = (getattr(of, name)(*operands) for of in (triton, specification))
        for ours, theirs in zip(*((x if isinstance(x, tuple) else (x,)) for x in (mine, expected)), strict=True):
            assert ours == theirs if isinstance(theirs, int) else torch.equal(ours, theirs), name


def long_rows():
    """Rice codes for more than a program works on, with an empty row between them."""
    gaps = torch.randint(300, (700,), generator=torch.Generator().manual_seed(7))
    counts = torch.tensor([600, 0, 100])
    parts = [(part + 1).cumsum(0) - 1 for part in gaps.split(counts.tolist())]
    indices = torch.nn.utils.rnn.pad_sequence(parts, batch_first=True)
    packed = specification.rice_pack(indices, counts, 5, 1301)
    return [
        ("measure", (indices, counts, 5, 10**6)),
        ("pack", (indices, counts, 5, 1301)),
        ("unpack", (packed, counts, 5, int(indices[0, 599]) + 1, 600)),
        ("unpack", (packed, counts, 5, int(indices[0, 599]), 600)),
    ]


def test_half_precision():
    """Every operation that takes bfloat16 takes float16, to the bits of the specification."""
    names = set()
    for name, operands in calls():
        if not any(x.dtype == torch.bfloat16 for operand in operands for x in tensors_in(operand)):
            continue
        results = []
        for of in (raw, specification):
            mine = [in_float16(operand) for operand in operands]
            found = getattr(of, name)(*mine)
            both = (*mine, *found) if isinstance(found, tuple) else (*mine, found)
            results.append([x for each in both for x in tensors_in(each)])
        for ours, theirs in zip(*results, strict=True):
            (assert_same_bits if ours.dtype in HALVES else assert_equal)(ours, theirs)
        names.add(name)
    assert names >= {
        "accumulate",
        "preview_blocks",
        "copy_scaled",
        "decay",
        "preview_block_maxima",
        "peaks",
        "select",
        "select_chunks",
    }


HALVES = (torch.float16, torch.float32)


def assert_equal(ours: Tensor, theirs: Tensor) -> None:
    assert torch.equal(ours, theirs)


def in_float16(x: Any) -> Any:
    """A copy of an operand, with float16 in the place of bfloat16."""
    if isinstance(x, Tensor):
        return x.to(torch.float16 if x.dtype == torch.bfloat16 else x.dtype, copy=True)
    return [in_float16(each) for each in x] if isinstance(x, list) else x


def calls():
    return runpy.run_path(str(Path(__file__).parents[3] / "scripts" / "bench_operations.py"))["calls"](8192, DEVICE)


@pytest.fixture
def launches(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """The grids of all kernels that are launched."""
    of = importlib.import_module("triton.runtime.jit" if ON_CUDA else "triton.runtime.interpreter")
    owner, name = (of.JITFunction, "run") if ON_CUDA else (of.GridExecutor, "__call__")
    inner, found = getattr(owner, name), []

    def launch(self: Any, *args: Any, **kwargs: Any) -> Any:
        found.append(kwargs["grid"] if ON_CUDA else self.grid)
        return inner(self, *args, **kwargs)

    monkeypatch.setattr(owner, name, launch)
    return found


def test_tensors_that_lie_apart_are_one_launch(launches):
    """Of any sizes, aligned or not; with zeros for gradients that are missing."""
    sizes = [1, 4096, 0, 2048, 63, 2049, 5000]
    grads, outs, weights, buffers = (
        [numbers(n + shift, torch.float32, "normal", n + seed).to(DEVICE)[shift:] for n in sizes]
        for seed, shift in ((0, 0), (1, 1), (2, 3), (3, 0))
    )
    there = [g if place % 2 else g[:0] for place, g in enumerate(grads)]
    expected = [x.clone() for x in outs], [x.clone() for x in weights], [x.clone() for x in buffers]
    tops = raw.copy_scaled(there, outs, 0.37)
    raw.decay(weights, buffers, Momentum(0.9, 0.1, True), 0.01, 0.1)
    raw.peaks(grads)
    assert len(launches) == 3, launches
    assert_same_bits(tops, specification.copy_scaled(there, expected[0], 0.37))
    specification.decay(*expected[1:], Momentum(0.9, 0.1, True), 0.01, 0.1)
    for ours, theirs in zip((*outs, *weights, *buffers), itertools.chain(*expected), strict=True):
        assert_same_bits(ours, theirs)


def test_kernels_that_fall_back_to_torch_on_cuda_are_logged_once(caplog):
    with fake_tensor.FakeTensorMode(), caplog.at_level("WARNING", logger="dgcopt"):
        on_cuda = torch.zeros(128, dtype=torch.float64, device="cuda")
        for _ in range(2):
            kernels.block_maxima(on_cuda)
        kernels.peaks([on_cuda])
        for dtype in (torch.float32, torch.bfloat16, torch.float16):
            x = torch.zeros(128, dtype=dtype, device="cuda")
            assert kernels.block_maxima.implementation(x) is kernels.block_maxima.triton
    kernels.block_maxima(torch.zeros(128, dtype=torch.float64))
    told = [record.getMessage() for record in caplog.records]
    assert [text.split()[1] for text in told] == ["block_maxima", "peaks"]
    assert "these tensors: float64 on cuda:0. Train in float32" in told[0]


@pytest.mark.skipif(not ON_CUDA, reason="no CUDA device on this machine")
def test_cuda_tensors_come_here(monkeypatch):
    ran = []
    monkeypatch.setattr("dgcopt.kernels.memory.triton.preview_block_maxima", lambda *_: ran.append(True))
    monkeypatch.delattr(kernels.preview_block_maxima, "triton", raising=False)
    kernels.preview_block_maxima(torch.zeros(4, device="cuda"), None, None, torch.zeros(1, device="cuda"), None)
    assert ran == [True]


@pytest.mark.parametrize(
    ("version", "used"), [("2.1.0", False), ("3.5.1", False), ("3.6.0", True), ("3.10.1+git", True)]
)
def test_a_triton_that_rounds_otherwise_is_not_used(version, used, monkeypatch, caplog):
    monkeypatch.setattr("triton.__version__", version)
    with caplog.at_level("WARNING", logger="dgcopt"):
        assert has_triton.__wrapped__() == used
    assert [record.getMessage() for record in caplog.records] == [
        f"dgcopt: on CUDA compression runs in torch: its kernels need Triton 3.6 or later, and version {version} is "
        f"installed"
    ] * (not used)


def test_it_compiles_for_cuda(tmp_path):
    """Every operation that is there, exactly as rounded as it says, and none waits; which needs no device."""
    env = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    done = subprocess.run(
        [sys.executable, Path(__file__).parents[2] / "support" / "compiling.py"],
        env={**env, "TRITON_CACHE_DIR": str(tmp_path)},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    assert done.stdout.split() == sorted(operations())


def operations():
    """The operations that have a kernel in Triton."""
    return {name for name, kernel in vars(kernels).items() if isinstance(kernel, Kernel) and kernel.in_triton}


def test_autograd_notices_what_is_changed_in_place():
    """Whatever the specification changes: who goes back through it is told, and gets no wrong result."""
    changing = set()
    for name, operands in calls():
        tensors = [x for operand in operands for x in tensors_in(operand)]
        changed = []
        for of in (specification, raw):
            before = [x._version for x in tensors]
            if of is specification or (changed[0] and name not in changing):
                getattr(of, name)(*operands)
                changed.append([place for place, x in enumerate(tensors) if x._version > before[place]])
        assert changed[0] == changed[-1], name
        changing |= {name} if changed[0] else set()
    assert len(changing) > 20


@pytest.mark.skipif(ON_CUDA, reason="what lies outside is not looked for on a device")
def test_operands_that_do_not_fit_are_refused():
    one, place, eight = torch.ones(1), torch.zeros(1, dtype=torch.int64), torch.zeros(8, dtype=torch.uint8)
    for length in (63, 65):
        with pytest.raises(ValueError, match=f"whole blocks of 64 elements are needed, not {length}"):
            triton.split_signs(torch.zeros(length))
        with pytest.raises(ValueError, match="whole blocks"):
            triton.round_levels(torch.zeros(length), one, place, 7, 0)
    with pytest.raises(ValueError, match="at least 16 elements are needed, not 8"):
        triton.put_signs(eight, one, one, place.expand(2), torch.zeros(128), "set")
    with pytest.raises(ValueError, match="at least 26 elements are needed, not 8"):
        triton.put_trits(eight, one, place.expand(2), torch.zeros(128), "set")
    with pytest.raises(ValueError, match="at least 2 elements are needed, not 1"):
        triton.tensor_norms(torch.zeros(128), place, 1)
    with pytest.raises(ValueError, match="at least 9 elements are needed, not 8"):
        triton.unpack_small(eight, 24, 3)
    with pytest.raises(ValueError, match="at least 65 elements are needed, not 64"):
        triton.select_chunks(torch.zeros(64), Chunks([(0, 65)], [1], torch.device("cpu")))
    with pytest.raises(ValueError, match="begin with the first"):
        triton.add_and_select_chunks(
            *torch.zeros(2, 128), 1.0, torch.zeros(128), Chunks([(64, 128)], [1], torch.device("cpu"))
        )
