"""The base class of sparse compressors: send selected coordinates, keep the others in the residual."""

from typing import Literal, TypeAlias

from torch import Tensor

from ...coding import SparseCode
from ...errors.checks import check_fraction
from ...kernels import gather, subtract_at
from ..base import Compressor, GradientExchange
from ..context import Context
from ..reduction import Choice, Reduce, Reduction, check_keep, reduction

__all__ = ["Indices", "Sparse", "Values"]

Values: TypeAlias = Literal["fp64", "fp32", "fp16", "bf16", "int8", "int4", "int2", "sign"]
"""Code of values: floats, or a number of bits and a scale per block of 256 or 512; see `dgcopt.coding`."""

Indices: TypeAlias = Literal["int32", "rice"]
"""Code of positions: 32 bits each, or Rice-coded gaps, 11.5 bits each at a density of 0.1%."""


class Sparse(Compressor):
    """Sums each rank's own selected coordinates; the residual keeps the rest and rounding errors.

    A subclass defines `select` or `choose`, and the settings below. The residual is multiplied by `decay` before the
    gradient is added to it.
    """

    values: Values = "fp32"
    indices: Indices = "int32"
    decay: float = 1.0
    error_feedback: bool = True
    reduce: Reduce = "gather"
    keep: float = 1.0

    def __post_init__(self) -> None:
        super().__post_init__()
        self.decay = check_fraction(self.decay, "decay")
        check_keep(self.keep, self.reduce)

    @property
    def conserves(self) -> bool:
        return self.error_feedback and self.decay == 1

    def select(self, v: Tensor, ctx: Context) -> Tensor:
        """Return the positions in the flat `v` to send: int64, ascending, the same number on all ranks."""
        raise NotImplementedError(f"{type(self).__name__} must define select()")

    def choose(self, grad: Tensor, ctx: Context) -> tuple[Tensor, Tensor, Tensor]:
        """Return v, selected positions and their values; for subclasses that compute all three in one pass."""
        v = ctx.add_residual(grad, self.decay) if self.error_feedback else grad
        indices = self.select(v, ctx)
        return v, indices, gather(v, indices)

    @property
    def code(self) -> SparseCode:
        """The code of coordinates on the wire."""
        return SparseCode(self.indices, self.values)

    @property
    def asks_link(self) -> bool:
        return self.reduce == "auto"

    def reduction(self, count: int, ctx: Context) -> Reduction[Choice]:
        """Return the reduction of all ranks' selections of at most `count` coordinates each."""
        return reduction(self.reduce, self.code, count, ctx, self.keep, self.decay if self.error_feedback else 0.0)

    def exchange(self, grad: Tensor, ctx: Context) -> GradientExchange:
        v, indices, values = self.choose(grad, ctx)
        if self.error_feedback:
            ctx.keep_residual(v)

        def at(positions: Tensor) -> Tensor:
            return gather(v, positions)

        def subtract(sent: Tensor, arriving: Tensor, fits: Tensor | None) -> None:
            if self.error_feedback:
                subtract_at(v, sent, arriving)

        choice = Choice(indices, values, at, subtract)
        return (yield from self.reduction(len(indices), ctx).exchange(choice, ctx))
