"""Compile every kernel in Triton for CUDA, which needs no device: tensors are fake ones, and kernels are not launched.

Run as a program: the interpreter, which the tests run in, takes what Triton's compiler refuses. Fake tensors have no
values, so that whatever waits for a device is an error here. Prints the names of what was compiled.
"""

from __future__ import annotations

import contextlib
import gc
import itertools
import runpy
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
import triton
from torch._subclasses import fake_tensor
from triton.backends.compiler import GPUTarget
from triton.backends.nvidia.compiler import CUDABackend
from triton.compiler import ASTSource
from triton.runtime.jit import JITFunction

from dgcopt import kernels

OPERATIONS = runpy.run_path(str(Path(__file__).parents[2] / "scripts" / "bench_operations.py"))
TYPES = {
    **{torch.float32: "*fp32", torch.bfloat16: "*bf16", torch.float16: "*fp16", torch.float64: "*fp64"},
    **{torch.int16: "*i16", torch.int32: "*i32", torch.int64: "*i64", torch.int8: "*i8", torch.uint8: "*u8"},
}
FUSES = {
    "_blocks",
    "_moves",
    "_some_blocks",
    "_signs",
    "_add_and",
    "_select_chunk",
    "_mix",
    "_decay",
    "_stepped",
    "_add_and_count",
}
"""Kernels that fuse a multiplication with an addition, as torch does there."""
WAIT = {
    "by_owner",
    *("select_above", "add_and_select_above"),
}
"""Operations that return a number, or so many elements, and have to wait for it."""
ANSWERS: dict[str, Callable[[torch.Tensor], Any]] = {
    "__int__": lambda _: 10,
    "__bool__": lambda _: True,
    "cpu": lambda x: x,
}
"""What they are told."""

names: list[str] = []
"""What has run, and is running."""
done: set[Any] = set()


def compiled(kernel: JITFunction[Any], *args: Any, grid: Any, warmup: bool, **kwargs: Any) -> None:
    """In the place of a launch."""
    assert all(0 < size <= most for size, most in zip(grid, (2**31 - 1, 65_535, 65_535), strict=False)), grid
    given = dict(zip(kernel.arg_names, args, strict=False)) | kwargs
    types: dict[str, str] = {}
    constants = {}
    for parameter in kernel.params:
        value = given.pop(parameter.name)
        if parameter.is_constexpr:
            types[parameter.name], constants[parameter.name] = "constexpr", value
        elif isinstance(value, torch.Tensor):
            types[parameter.name] = TYPES[value.dtype]
        else:
            types[parameter.name] = "fp32" if isinstance(value, float) else "i64" if abs(value) >= 2**31 else "i32"
    key = (kernel, *types.items(), *constants.items())
    if key in done:
        return
    done.add(key)
    assert given["enable_fp_fusion"] is False, kernel.__name__
    made = triton.compile(ASTSource(kernel, types, constants), target=GPUTarget("cuda", 80, 32), options=given)
    code, name = made.asm["ptx"], kernel.__name__
    for inexact in (".ftz", "div.full", "div.approx", "sqrt.approx", "rcp.approx"):
        assert inexact not in code, f"{name}: {inexact}"
    assert ("fma.rn.f" in code) <= (name in FUSES), f"{name} fuses"


def large(device: torch.device) -> Iterator[tuple[str, tuple[Any, ...]]]:
    """Operations of which the grid has more than one dimension, on tensors as large as models have."""
    left, right, out = (torch.empty(n, 4, device=device) for n in (2**21, 64, 2**25))
    yield "put_product", (left, right, out.view(-1), out.view(-1))
    place = torch.empty(2**24, dtype=torch.int64, device=device)
    yield "tensor_sums", (torch.empty(3, len(place), device=device), place, 2**17)


def answering(read: str) -> Callable[[torch.Tensor], Any]:
    """In the place of a method that waits, if the tensor lies on the device."""
    on_cpu = getattr(torch.Tensor, read)

    def instead(x: torch.Tensor) -> Any:
        if not x.is_cuda:
            return on_cpu(x)
        assert names[-1] in WAIT, f"{names[-1]} waits for the device"
        return ANSWERS[read](x)

    return instead


def main() -> None:
    gc.freeze()  # or a fifth of the time goes into looking for garbage among what torch is made of
    gc.set_threshold(100_000)
    JITFunction.run = compiled
    CUDABackend.make_cubin = lambda *_, **__: b""  # what a device would need is what takes longest
    for name in ("__int__", "__bool__", "item", "tolist", "cpu"):
        setattr(torch.Tensor, name, answering(name))
    fake_tensor.CONSTANT_NUMEL_LIMIT = 16  # so that a few numbers on the CPU can be read
    torch.Tensor.data_ptr = lambda _: 0
    torch.Tensor.pin_memory = lambda x: x
    torch.cuda.device_of = lambda _: contextlib.nullcontext()
    with fake_tensor.FakeTensorMode():
        device = torch.device("cuda", 0)
        for name, operands in itertools.chain(OPERATIONS["calls"](8192, device), large(device)):
            before = len(done)
            names.append(name)
            getattr(kernels, name)(*operands)
            new = len(done) > before or name == "minmax_codes"
            assert new or names.count(name) > 1, f"{name} does not run in Triton"
    print(*(name for name, _ in itertools.groupby(sorted(names))))


if __name__ == "__main__":
    main()
