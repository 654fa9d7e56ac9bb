"""Operations on floats in Triton, each rounded as torch rounds it on a CPU.

Quotients and roots are by `tl.div_rn` and `tl.sqrt_rn`: Triton's own operators are faster, and a unit off.
"""

from __future__ import annotations

import triton
import triton.language as tl

from ..floats import LARGEST

__all__ = ["UNFUSED", "finite", "magnitudes", "nearest", "negated", "put", "rounded", "wide"]

UNFUSED = {"enable_fp_fusion": False}
"""Tells Triton's compiler not to fuse multiplications with additions: `fma` is used if torch's own kernels fuse."""

_MOST: tl.constexpr = tl.constexpr(LARGEST)


@triton.jit
def wide(x):
    """As float32. By integers, as Triton's interpreter knows no denormal bfloat16."""
    if x.dtype == tl.bfloat16:
        wide = (x.to(tl.uint16, bitcast=True).to(tl.uint32) << 16).to(tl.float32, bitcast=True)
    else:
        wide = x.to(tl.float32)
    return wide


@triton.jit
def rounded(x, dtype: tl.constexpr):
    """float32 to the nearest of a dtype, ties to even. bfloat16 by integers, as Triton's interpreter cuts it off."""
    if dtype == tl.bfloat16:
        bits = x.to(tl.uint32, bitcast=True)
        near = (bits + 0x7FFF + ((bits >> 16) & 1)) >> 16
        near = tl.where((bits & 0x7FFFFFFF) > 0x7F800000, 0x7FC0, near)
        rounded = near.to(tl.uint16).to(tl.bfloat16, bitcast=True)
    else:
        rounded = x.to(dtype)
    return rounded


@triton.jit
def finite(x):
    """float32 within +-LARGEST, NaN and Inf as zero."""
    there = (x.to(tl.int32, bitcast=True) & 0x7FFFFFFF) < 0x7F800000
    x = tl.where(there, x, 0.0)
    return tl.where(x > _MOST, _MOST, tl.where(x < -_MOST, -_MOST, x))


@triton.jit
def negated(x):
    """-x, also of zero: Triton's own minus subtracts from 0, which makes 0 of 0 instead of -0."""
    return x * -1.0


@triton.jit
def nearest(x):
    """The nearest whole number; of two the even one. Below 2^23 by adding that, as larger floats have no fraction."""
    size = tl.abs(x)
    whole = tl.where(size < 8388608.0, (size + 8388608.0) - 8388608.0, size)
    return tl.where(x < 0, negated(whole), whole)


@triton.jit
def magnitudes(x):
    """The bits of magnitudes, int32, which have their order; NaN is larger than all others."""
    if x.dtype.primitive_bitwidth == 16:
        bits = x.to(tl.int16, bitcast=True).to(tl.int32) & 0x7FFF
    else:
        bits = x.to(tl.int32, bitcast=True) & 0x7FFFFFFF
    return bits


@triton.jit
def put(x, before, out, at, there, HOW: tl.constexpr):
    """Write values to `out`, combined with the elements `before`, as `dgcopt.kernels.put`."""
    if HOW == "add":
        new = tl.load(before + at, mask=there, other=0) + x
    elif HOW == "subtract":
        new = tl.load(before + at, mask=there, other=0) - x
    else:
        new = x
    tl.store(out + at, new, mask=there)
