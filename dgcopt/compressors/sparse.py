"""What compressors have in common that send some coordinates and keep the others for later."""

from typing import Literal, TypeAlias

from torch import Tensor

from ..coding import SparseCode
from ..collectives import AllGather
from ..errors import ConfigError
from ..flat.gradient import SparseSum
from ..kernels import gather, subtract_at
from .base import Compressor, GradientExchange
from .context import Context, at_least_float32

__all__ = ["Indices", "Sparse", "Values", "check_decay", "sum_of_messages"]

Values: TypeAlias = Literal["fp64", "fp32", "fp16", "bf16", "int8", "int4", "int2", "sign"]
"""How values travel: whole floats, or so many bits and a scale per block of 256 or 512; see `dgcopt.coding`."""

Indices: TypeAlias = Literal["int32", "rice"]
"""How positions travel: 32 bits each, or as Rice-coded gaps, 11.5 bits each at a density of 0.1%."""


class Sparse(Compressor):
    """Each rank's own choice of coordinates, by one allgather; what is not sent, or lost by rounding, is kept.

    A subclass defines `select`, or `choose`, and the settings below. The residual is multiplied by `decay` before the
    gradient is added to it.
    """

    values: Values = "fp32"
    indices: Indices = "int32"
    decay: float = 1.0
    error_feedback: bool = True

    @property
    def conserves(self) -> bool:
        return self.error_feedback and self.decay == 1

    def select(self, v: Tensor, ctx: Context) -> Tensor:
        """Positions in the flat `v` that are sent: int64, ascending, as many on all ranks."""
        raise NotImplementedError(f"{type(self).__name__} must define select()")

    def choose(self, grad: Tensor, ctx: Context) -> tuple[Tensor, Tensor]:
        """v, and the positions in it that are sent: for subclasses that look for them while they add the residual."""
        v = ctx.add_residual(grad, self.decay) if self.error_feedback else grad
        return v, self.select(v, ctx)

    @property
    def code(self) -> SparseCode:
        """How coordinates travel."""
        return SparseCode(self.indices, self.values)

    def message(self, grad: Tensor, ctx: Context) -> tuple[Tensor, int]:
        """This rank's message and of how many coordinates; what it leaves out is kept."""
        v, indices = self.choose(grad, ctx)
        message, sent, arriving = self.code.encode(indices, gather(v, indices), len(v))
        if self.error_feedback:
            subtract_at(v, sent, arriving)
            ctx.keep_residual(v)
        return message, len(indices)

    def exchange(self, grad: Tensor, ctx: Context) -> GradientExchange:
        message, count = self.message(grad, ctx)
        messages = yield AllGather(message)
        return sum_of_messages(messages, self.code, count, ctx)


def sum_of_messages(messages: Tensor, code: SparseCode, count: int, ctx: Context) -> SparseSum:
    """The ranks' coordinates, in rank order, divided by N. Raises PayloadError for a message that cannot be right."""
    total = SparseSum()
    for rank, message in enumerate(messages):
        positions, values = code.decode(message, count, ctx.numel, rank)
        total.add(positions, values.to(at_least_float32(ctx.dtype)) / ctx.divisor)
    return total


def check_decay(decay: float) -> float:
    """A number in (0, 1]. Raises ConfigError for others."""
    if isinstance(decay, bool) or not isinstance(decay, int | float) or not 0 < decay <= 1:
        raise ConfigError(f"decay must be above 0 and at most 1, not {decay!r}")
    return float(decay)
