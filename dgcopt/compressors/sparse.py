"""What compressors have in common that send some coordinates and keep the others for later."""

from typing import Literal, TypeAlias

from torch import Tensor

from ..coding import SparseCode
from ..errors import ConfigError
from ..kernels import gather, subtract_at
from .base import Compressor, GradientExchange
from .context import Context
from .reduction import Choice, Reduce, Reduction, reduction

__all__ = ["Indices", "Sparse", "Values", "check_decay"]

Values: TypeAlias = Literal["fp64", "fp32", "fp16", "bf16", "int8", "int4", "int2", "sign"]
"""How values travel: whole floats, or so many bits and a scale per block of 256 or 512; see `dgcopt.coding`."""

Indices: TypeAlias = Literal["int32", "rice"]
"""How positions travel: 32 bits each, or as Rice-coded gaps, 11.5 bits each at a density of 0.1%."""


class Sparse(Compressor):
    """Each rank's own choice of coordinates, added up; what is not sent, or lost by rounding, is kept.

    A subclass defines `select`, or `choose`, and the settings below. The residual is multiplied by `decay` before the
    gradient is added to it.
    """

    values: Values = "fp32"
    indices: Indices = "int32"
    decay: float = 1.0
    error_feedback: bool = True
    reduce: Reduce = "gather"
    keep: float = 1.0

    @property
    def conserves(self) -> bool:
        return self.error_feedback and self.decay == 1

    def select(self, v: Tensor, ctx: Context) -> Tensor:
        """Positions in the flat `v` that are sent: int64, ascending, as many on all ranks."""
        raise NotImplementedError(f"{type(self).__name__} must define select()")

    def choose(self, grad: Tensor, ctx: Context) -> tuple[Tensor, Tensor, Tensor]:
        """v, the positions in it that are sent, and what is there: for subclasses that find all of it in one pass."""
        v = ctx.add_residual(grad, self.decay) if self.error_feedback else grad
        indices = self.select(v, ctx)
        return v, indices, gather(v, indices)

    @property
    def code(self) -> SparseCode:
        """How coordinates travel."""
        return SparseCode(self.indices, self.values)

    @property
    def asks_link(self) -> bool:
        return self.reduce == "auto"

    def reduction(self, count: int, ctx: Context) -> Reduction:
        """How the ranks' choices become one sum, of `count` coordinates each at most."""
        return reduction(self.reduce, self.code, count, ctx, self.keep, self.decay if self.error_feedback else 0.0)

    def exchange(self, grad: Tensor, ctx: Context) -> GradientExchange:
        v, indices, values = self.choose(grad, ctx)
        if self.error_feedback:
            ctx.keep_residual(v)

        def at(positions: Tensor) -> Tensor:
            return gather(v, positions)

        def forget(sent: Tensor, arriving: Tensor) -> None:
            if self.error_feedback:
                subtract_at(v, sent, arriving)

        choice = Choice(indices, values, at, forget)
        return (yield from self.reduction(len(indices), ctx).exchange(choice, ctx))


def check_decay(decay: float) -> float:
    """A number in (0, 1]. Raises ConfigError for others."""
    if isinstance(decay, bool) or not isinstance(decay, int | float) or not 0 < decay <= 1:
        raise ConfigError(f"decay must be above 0 and at most 1, not {decay!r}")
    return float(decay)
