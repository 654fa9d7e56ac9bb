"""Decoupled momentum (Peng, Quesnelle & Kingma, "DeMo: Decoupled Momentum Optimization", 2024, arXiv:2411.19870)."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.optim import SGD, Optimizer

from ..coding import SparseCode
from ..collectives import AllGather
from ..errors import ConfigError
from ..kernels import BLOCK, Put, clear_at, dct, inverse_dct
from .base import Compressor, GradientExchange
from .chunked import ChunkSelection
from .context import Context, at_least_float32
from .schedule import check_ratio
from .sparse import Indices, Values, check_decay, sum_of_messages

__all__ = ["DeMo"]


@dataclass(eq=False)
class DeMo(Compressor):
    """The largest frequencies of a momentum that each rank keeps for itself; the step follows the sign of their mean.

        m <- decay * m + g;  q = the k = ceil(ratio * c) largest of the c coefficients of each tile of DCT(m);
        m <- m - IDCT(q);  result = sign(IDCT(mean over ranks of q))

    A tensor of two or more dimensions is a matrix of its first dimension and all others; tiles are 64 by 64 elements
    of it, smaller ones at its edges, and 64 neighbours of a vector. DCT is the orthonormal DCT-II along both sides.

    It differs from the authors' code in four places: m holds gradients without lr, so that a schedule does not change
    the weight of what waits; the mean is over all ranks, not over those that chose a coefficient; tiles do not shrink
    where 64 does not divide a dimension; and vectors send the same fraction as matrices.

    For language models, with the learning rate of a sign method (Adam's). The wrapped optimizer has to be SGD without
    momentum; its weight decay acts as usual. A single process has nothing to exchange and takes plain SGD steps.

    Args:
        ratio: fraction of each tile's coefficients that is sent, in (0, 1]; 32 of 4096 by default, as in the authors'
            code. Larger if the loss suffers.
        decay: of the momentum, in (0, 1]; smaller forgets sooner what does not get its turn.
        values, indices: how coefficients travel; what rounding loses stays in m.
        sign: whether only the result's sign is taken. False leaves the size of each element to lr, as SGD does.

    Costs one allgather of 2.1 bytes per coefficient, at the default 0.13 bits per parameter; a DCT and two inverses,
    each of 22 operations per element in the same order everywhere, so that all ranks take the same step. Raises
    ConfigError for other optimizers and for settings that are none of these, PayloadError for a damaged message.
    """

    ratio: float = 1 / 128
    decay: float = 0.999
    values: Values = "int8"
    indices: Indices = "rice"
    sign: bool = True

    def __post_init__(self) -> None:
        self.ratio, self.decay = check_ratio(self.ratio), check_decay(self.decay)
        SparseCode(self.indices, self.values)

    def attach(self, optimizer: Optimizer) -> None:
        if not isinstance(optimizer, SGD):
            raise ConfigError(
                f"DeMo is an optimizer's own rule, momentum and sign, and {type(optimizer).__name__} would apply "
                f"another one to its result: wrap torch.optim.SGD(params, lr) without momentum"
            )
        if any(group["momentum"] for group in optimizer.param_groups):
            raise ConfigError(
                "DeMo keeps the momentum itself, and SGD would apply a second one: make SGD with momentum=0 and set "
                "DeMo(decay=...)"
            )
        super().attach(optimizer)

    def exchange(self, grad: Tensor, ctx: Context) -> GradientExchange:
        code, selection = SparseCode(self.indices, self.values), self._selection(ctx)
        old, m = ctx.advance("momentum", dtype=at_least_float32(grad.dtype))
        torch.add(grad, old, alpha=self.decay, out=m)
        if "frequencies" not in ctx.scratch:
            ctx.scratch["frequencies"] = torch.zeros_like(m)
        frequencies = dct_of(m, ctx, out=ctx.scratch["frequencies"])
        indices = selection.largest(frequencies)
        message, sent, arriving = code.encode(indices, frequencies[indices], ctx.numel)
        put_inverse(frequencies.zero_().index_copy_(0, sent, arriving), ctx, m, "subtract")
        clear_at(frequencies, sent)

        messages = yield AllGather(message)
        mean = sum_of_messages(messages, code, selection.count, ctx).add_to(frequencies)
        result = grad.to(m.dtype)
        put_inverse(mean, ctx, result, "set")
        if self.sign:
            result.sign_()
        return result if not self.sign or ctx.divisor == ctx.size else result.mul_(ctx.size / ctx.divisor)

    def _selection(self, ctx: Context) -> ChunkSelection:
        """What finds the largest coefficients of every tile."""
        if "selection" not in ctx.scratch:
            spans = []
            for segment in ctx.segments:
                start = segment.start
                for tile in tiles(matrix_of(segment.param.detach())):
                    spans.append((start, start + tile.numel()))
                    start += tile.numel()
            ctx.scratch["selection"] = ChunkSelection(spans, self.ratio, ctx.segments[0].param.device)
        return ctx.scratch["selection"]

    def payload_bytes(self, ctx: Context) -> int:
        return SparseCode(self.indices, self.values).nbytes(self._selection(ctx).count, ctx.numel)


def dct_of(flat: Tensor, ctx: Context, out: Tensor) -> Tensor:
    """The coefficients of every parameter, tile after tile where the parameter was; gaps stay. Returns `out`."""
    for segment in ctx.segments:
        dct(matrix_of(segment.view(flat)), out[segment.start : segment.stop])
    return out


def put_inverse(frequencies: Tensor, ctx: Context, flat: Tensor, how: Put) -> None:
    """Let the parameters whose coefficients these are take effect on the flat ones; gaps stay."""
    for segment in ctx.segments:
        tensor = segment.view(flat)
        matrix = matrix_of(tensor)
        inverse_dct(frequencies[segment.start : segment.stop], matrix, how)
        if matrix.data_ptr() != tensor.data_ptr():  # it lies in another order
            tensor.copy_(matrix.view(tensor.shape))


def tiles(matrix: Tensor) -> Iterator[Tensor]:
    """Of 64 by 64, row by row; only the last one's number of elements need not be a multiple of 64."""
    for strip in matrix.split(BLOCK):
        yield from strip.split(BLOCK, dim=1)


def matrix_of(tensor: Tensor) -> Tensor:
    """A tensor as a matrix of its first dimension and all others; a vector as one row."""
    return tensor.reshape(len(tensor) if tensor.dim() > 1 else 1, -1)
