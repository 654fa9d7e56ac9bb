"""Compile every kernel in Triton for CUDA, which needs no device: tensors are fake ones, and kernels are not launched.

Run as a program: the interpreter, which the tests run in, takes what Triton's compiler refuses. Fake tensors have no
values, so that whatever waits for a device is an error here. Prints the names of what was compiled.
"""

from __future__ import annotations

import contextlib
import itertools
from typing import Any

import torch
import triton
from torch._subclasses.fake_tensor import FakeTensorMode
from triton.backends.compiler import GPUTarget
from triton.backends.nvidia.compiler import CUDABackend
from triton.compiler import ASTSource
from triton.runtime.jit import JITFunction

from dgcopt import kernels
from dgcopt.kernels import Chunks, Groups, Momentum

TYPES = {
    **{torch.float32: "*fp32", torch.bfloat16: "*bf16", torch.float64: "*fp64"},
    **{torch.int16: "*i16", torch.int32: "*i32", torch.int64: "*i64", torch.int8: "*i8", torch.uint8: "*u8"},
}
FUSES = {"_blocks", "_some_blocks", "_signs", "_add_and", "_select", "_mix"}
"""Kernels that fuse a multiplication with an addition, as torch does there."""
WAIT = {"put_levels", "put_powers", "put_trits"}
"""Operations that return a number, and have to wait for it."""

done: set[Any] = set()


def compiled(kernel: JITFunction[Any], *args: Any, grid: Any, warmup: bool, **kwargs: Any) -> None:
    """In the place of a launch."""
    assert all(size > 0 for size in grid)
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


class Waits(Exception):
    """Somebody asks for a number that lies on the device."""


def wait(_: torch.Tensor) -> Any:
    raise Waits


def flat(numel: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.empty(numel, dtype=dtype, device="cuda")


def calls() -> Any:
    """Every operation that there is in Triton, by name, and operands; those that other code runs for come first."""
    n, blocks, tensors, key = 4096, 64, 3, 0x123456789ABCDEF1
    x, y, out, bits, place = flat(n), flat(n), flat(n), flat(n, torch.uint8), flat(blocks, torch.int64)
    scales, half = flat(tensors), torch.bfloat16
    for dtype, g in ((torch.float32, flat(n, half)), (half, flat(n))):
        v, u, maxima = flat(n, dtype), flat(n, dtype), flat(blocks, dtype)
        rule = Momentum(0.9, 0.1, True) if dtype == half else Momentum(0.9)
        for operation in ("accumulate", "look"):
            yield operation, (v, u, g, maxima, rule, 0.5)
        yield "ahead", (v, u, g, place, flat(n, dtype).view(-1, 64), rule)
        yield "block_maxima", (v,)
        groups = Groups([[(0, 1000)], [(1024, 2000), (2048, n)]], [10, 40], x.device)
        yield "select", (v, maxima, groups)
        yield "select_ahead", (lambda blocks, v=v: v.new_empty(len(blocks), 64), maxima, groups)
        yield "select_chunks", (v, Chunks([(0, 1000), (1024, n)], [10, 30], x.device))
    yield "accumulate", (x, None, None, flat(blocks), None)
    yield "add_and_maxima", (x, y, 0.9, out)
    yield "add_and_norms", (x, y, 0.9, out)
    yield "add_and_select_chunks", (x, y, 0.9, out, Chunks([(0, n)], [10], x.device))
    yield "draw_from_spans", (place, place, key)
    yield "pack_small", (bits, 3)
    yield "pack_small", (bits, 5)
    yield "unpack_small", (bits, n, 5)
    yield "round_levels", (x, scales, place, 7, key)
    yield "round_levels", (x, scales, place, 127, key)
    yield "put_levels", (bits, 3, scales, place, out, "set")
    yield "put_levels", (bits, 7, scales, place, out, "add")
    yield "round_powers", (x, key)
    yield "put_powers", (flat(n + n // 8, torch.uint8), out, "subtract")
    yield "round_trits", (x, scales, place, key)
    yield "put_trits", (bits, scales, place, out, "add")
    yield "majority", (bits.view(4, -1),)
    yield "pack_signs", (x, True)
    yield "mix_signs", (x, 0.9, y, 0.1, out)
    yield "split_signs", (x,)
    yield "split_sum", (x, y, out)
    yield "split_sum_of_signs", (x, [bits, bits], flat(2 * tensors).view(2, -1), place, place, out)
    yield "put_signs", (bits, scales, scales, place, out, "set")
    yield "tensor_sums", (flat(3 * blocks).view(3, -1), place, tensors)
    yield "tensor_norms", (x, place, tensors)
    yield "minmax_ends", (x.view(2, -1).narrow(1, 8, n // 2 - 8),)
    yield "minmax_codes", (x.view(2, -1), flat(4).view(2, 2), bits.view(2, -1))
    yield "put_minmax", (bits, flat(2), out, "add")
    yield "minmax_of_mean", (bits.view(2, -1), flat(4).view(2, 2), 2, flat(n // 2, torch.uint8))
    yield "mix", (out, 0.9, [64], [flat(100)], 0.1)
    yield "unmix", (out, 0.9, [64], [flat(100)], 0.1)
    yield "put_product", (flat(256).view(-1, 4), flat(256).view(-1, 4), out, x)
    for cuts in (None, flat(9, torch.int64)):
        yield "round_steps", (x, 512, 127, cuts)
        yield "of_steps", (flat(n, torch.int8), flat(8), 512, cuts)
        yield "nearest_levels", (x, flat(64).view(8, 8), 512, cuts)
        yield "of_levels", (bits, flat(64).view(8, 8), 512, cuts)
        yield "means", (x, 512, 2, cuts)


def main() -> None:
    JITFunction.run = compiled
    CUDABackend.make_cubin = lambda *_, **__: b""  # what a device would need is what takes longest
    torch.Tensor.__int__ = torch.Tensor.__bool__ = torch.Tensor.item = torch.Tensor.tolist = wait
    torch.cuda.device_of = lambda _: contextlib.nullcontext()
    names = []
    with FakeTensorMode():
        for name, operands in calls():
            before = len(done)
            with contextlib.suppress(Waits) if name in WAIT else contextlib.nullcontext():
                getattr(kernels, name)(*operands)
            assert len(done) > before or name in names or name == "minmax_codes", f"{name} does not run in Triton"
            names.append(name)
    print(*(name for name, _ in itertools.groupby(sorted(names))))


if __name__ == "__main__":
    main()
