"""Decoupled momentum (Peng, Quesnelle & Kingma, "DeMo: Decoupled Momentum Optimization", 2024, arXiv:2411.19870)."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.optim import SGD, Optimizer

from ...coding import SparseCode
from ...collectives import AllGather
from ...errors import ConfigError
from ...errors.checks import check_fraction
from ...flat.memory import at_least_float32
from ...kernels import Chunks, Matrices, clear_at, dct, inverse_dct, select_chunks
from ..base import Compressor, GradientExchange
from ..context import Context
from ..reduction import sum_of_messages
from .base import Indices, Values
from .schedule import check_ratio, count_of

__all__ = ["DeMo"]


@dataclass(eq=False)
class DeMo(Compressor):
    """Sends the largest DCT coefficients of each rank's own momentum; the step is the sign of their mean.

        m <- decay * m + g;  q = the k = ceil(ratio * c) largest of the c coefficients of each tile of DCT(m);
        m <- m - IDCT(q);  result = sign(IDCT(mean over ranks of q))

    A tensor of two or more dimensions is a matrix of its first dimension and all others, in memory order. Tiles have 64
    by 64 elements, fewer at the edges, and 64 neighbours in a vector. DCT is the orthonormal DCT-II along both sides.

    Four differences from the authors' code: m holds gradients without lr, so a schedule does not rescale the residual;
    the mean is over all ranks, not only those that selected a coefficient; tiles do not shrink if 64 does not divide a
    dimension; vectors send the same fraction as matrices.

    For language models, with the learning rate of a sign method (Adam's). The wrapped optimizer must be SGD without
    momentum; its weight decay acts as usual. A single process takes plain SGD steps.

    Args:
        ratio: fraction of each tile's coefficients to send, in (0, 1]; 32 of 4096 by default, as in the authors' code.
            Raise it if the loss suffers.
        decay: decay of the momentum, in (0, 1]; smaller forgets unsent coefficients sooner.
        values, indices: codes of coefficients on the wire; rounding errors stay in m.
        sign: apply only the result's sign. False applies its value, as in SGD.

    Costs one allgather of 2.1 bytes per coefficient, at the default 0.13 bits per parameter; a DCT and two inverses,
    each of 22 operations per element in the same order everywhere, so that all ranks take the same step. Raises
    ConfigError for other optimizers and for invalid settings, PayloadError for a damaged message.
    """

    ratio: float = 1 / 128
    decay: float = 0.999
    values: Values = "int8"
    indices: Indices = "rice"
    sign: bool = True

    def __post_init__(self) -> None:
        super().__post_init__()
        self.ratio, self.decay = check_ratio(self.ratio), check_fraction(self.decay, "decay")

    def attach(self, optimizer: Optimizer) -> None:
        if not isinstance(optimizer, SGD):
            raise ConfigError(
                f"DeMo already applies momentum and sign, and {type(optimizer).__name__} would apply its own rule to "
                f"the result. Wrap torch.optim.SGD(params, lr) without momentum"
            )
        self.before_step(optimizer)
        super().attach(optimizer)

    def before_step(self, optimizer: Optimizer) -> None:
        if any(group["momentum"] for group in optimizer.param_groups):  # a scheduler may have set it since
            raise ConfigError(
                "DeMo keeps the momentum itself, and SGD would apply a second one. Create SGD with momentum=0 and a "
                "scheduler such as OneCycleLR with cycle_momentum=False, and set DeMo(decay=...)."
            )

    def exchange(self, grad: Tensor, ctx: Context) -> GradientExchange:
        code, (matrices, tiles) = SparseCode(self.indices, self.values), self._plan(ctx)
        old, m = ctx.memory.advance("momentum", dtype=at_least_float32(grad.dtype))
        torch.add(grad, old, alpha=self.decay, out=m)
        if "frequencies" not in ctx.scratch:
            ctx.scratch["frequencies"] = torch.zeros_like(m), torch.zeros_like(m)
        frequencies, chosen = ctx.scratch["frequencies"]
        dct(m, matrices, out=frequencies)
        indices, values = select_chunks(frequencies, tiles)
        sent = code.send(indices, values, ctx.numel, ctx.checks)
        inverse_dct(chosen.index_copy_(0, sent.indices, sent.values), matrices, m, "subtract")
        clear_at(chosen, sent.indices)  # zero between steps

        messages = yield AllGather(sent.message)
        total = sum_of_messages(messages, code, tiles.count, ctx)
        arrived = torch.stack([values for _, values in total.messages])
        ctx.checks.check_finite(arrived, arrived)
        result = grad.to(m.dtype)
        inverse_dct(total.add_to(chosen), matrices, result, "sign" if self.sign else "set")
        for positions, _ in total.messages:
            clear_at(chosen, positions)
        return result if not self.sign or ctx.divisor == ctx.size else result.mul_(ctx.size / ctx.divisor)

    def _plan(self, ctx: Context) -> tuple[Matrices, Chunks]:
        """Return the positions of the matrices, and their tiles with the number of coefficients to send of each."""
        if "plan" not in ctx.scratch:
            shapes = []
            for segment in ctx.segments:
                rows = len(segment.param) if segment.param.dim() > 1 else 1
                if segment.numel:
                    shapes.append((segment.start, rows, segment.numel // rows))
            matrices = Matrices(shapes)
            tiles = list(matrices.tiles())
            counts = [count_of(self.ratio, stop - start) for start, stop in tiles]
            ctx.scratch["plan"] = matrices, Chunks(tiles, counts, ctx.device)
        return ctx.scratch["plan"]

    def payload_bytes(self, ctx: Context) -> int:
        return SparseCode(self.indices, self.values).nbytes(self._plan(ctx)[1].count, ctx.numel)
