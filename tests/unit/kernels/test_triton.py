"""The kernels in Triton give the bits of the specification: compiled where there is CUDA, else in its interpreter.

The interpreter has no fused multiply-add: it rounds products. So momenta are those whose products are exact there.
"""

from __future__ import annotations

import os
import subprocess
import sys

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from oracle import EXAMPLES, KINDS, assert_same_bits, halves_and_wholes, numbers, numels
from torch import Tensor

from dgcopt import kernels
from dgcopt.kernels import Momentum
from dgcopt.kernels import torch as specification

triton = pytest.importorskip("dgcopt.kernels.triton")
ON_CUDA = torch.cuda.is_available()
DEVICE = torch.device("cuda" if ON_CUDA else "cpu")
pytestmark = [pytest.mark.gpu] if ON_CUDA else []
exact = (0.0, 0.5) if not ON_CUDA else (0.0, 0.5, 0.9)
rules = st.sampled_from(
    [None, *(Momentum(m, d, n) for m in exact for d, n in [(0.0, False), (0.5, False), (0.0, True), (0.5, True)])]
)


@settings(max_examples=EXAMPLES // 2 if not ON_CUDA else EXAMPLES, deadline=None)
@given(
    numel=numels.filter(lambda numel: numel < 6000 or ON_CUDA),
    memory=halves_and_wholes,
    gradient=halves_and_wholes,
    rule=rules,
    scale=st.sampled_from([1.0, 0.37]),
    has_gradient=st.booleans(),
    kind=st.sampled_from(KINDS),
    shift=st.integers(0, 3),
    seed=st.integers(0, 2**20),
)
def test_memory(numel, memory, gradient, rule, scale, has_gradient, kind, shift, seed):
    def operands(device: torch.device | str) -> tuple[Tensor, Tensor, Tensor | None, Tensor]:
        v = numbers(numel + shift, memory, kind, seed).to(device)[shift:]
        u = numbers(numel + shift, memory, kind, seed + 1).to(device)[shift:]
        g = numbers(numel + shift, gradient, kind, seed + 2).to(device)[shift:] if has_gradient else None
        return v, u, g, torch.zeros(-(-numel // 64), dtype=memory, device=device)

    ours, theirs = operands(DEVICE), operands("cpu")
    blocks = torch.arange(0, -(-numel // 64), 3)
    my_rows, their_rows = (torch.ones(len(blocks), 64, dtype=memory, device=device) for device in (DEVICE, "cpu"))
    triton.ahead(*ours[:3], blocks.to(DEVICE), my_rows, rule, scale)
    specification.ahead(*theirs[:3], blocks, their_rows, rule, scale)
    assert_same_bits(my_rows.cpu(), their_rows)
    for of, each in ((triton, ours), (specification, theirs)):
        of.look(*each, rule, scale)
    assert_same_bits(ours[3].cpu(), theirs[3])
    for of, each in ((triton, ours), (specification, theirs)):
        of.accumulate(*each, rule, scale)
    for mine, other in zip(ours, theirs, strict=True):
        assert_same_bits(None if mine is None else mine.cpu(), other)


@pytest.mark.skipif(not ON_CUDA, reason="no CUDA device on this machine")
def test_cuda_tensors_come_here(monkeypatch):
    ran = []
    monkeypatch.setattr(triton, "look", lambda *_: ran.append(True))
    kernels.look(torch.zeros(4, device="cuda"), None, None, torch.zeros(1, device="cuda"), None)
    assert ran == [True]


COMPILES = """
import itertools
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from dgcopt.kernels.triton import memory

def compiles(function, types, constants):
    source = ASTSource(function, {**types, **dict.fromkeys(constants, "constexpr")}, constants)
    triton.compile(source, target=GPUTarget("cuda", 80, 32), options={"enable_fp_fusion": False})

for bits, (has_g, moves, dampened, nesterov) in itertools.product((32, 16), MODES):
    dtype, g = ("*fp32", "*bf16") if bits == 32 else ("*bf16", "*fp32")
    modes = {"HAS_G": has_g, "MOVES": moves, "DAMPENED": dampened, "NESTEROV": nesterov, "BLOCK": 64, "ROWS": 32}
    of_step = {"numel": "i64", "m": "fp32", "keep": "fp32", "scale": "fp32"}
    flat = {"v": dtype, "u": dtype, "g": g}
    for writes in (True, False):
        types = {**flat, "maxima": f"*i{bits}", **of_step}
        compiles(memory._blocks, types, {"WRITES": writes, **modes, "BITS": bits})
    compiles(memory._some_blocks, {**flat, "blocks": "*i64", "rows": dtype, "number": "i64", **of_step}, modes)
print("compiled")
"""


def test_it_compiles_for_cuda(tmp_path):
    """The interpreter runs what Triton's compiler refuses; which needs no device."""
    modes = [(True, True, False, False), (True, True, True, True), (False, False, False, False)]
    env = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    done = subprocess.run(
        [sys.executable, "-c", COMPILES.replace("MODES", repr(modes))],
        env={**env, "TRITON_CACHE_DIR": str(tmp_path)},
        capture_output=True,
        text=True,
    )
    assert done.stdout == "compiled\n", done.stderr[-3000:]
