"""Local SGD: average weights every H steps."""

from __future__ import annotations

from torch import Tensor

from ..checks import check_flag, check_whole
from ..collectives import AllReduce, Exchange
from ..errors import ConfigError
from .base import Averaging
from .rule import refuse_with_losses
from .weights import Weights, mean

__all__ = ["LocalSGD"]


class LocalSGD(Averaging):
    """Averages all ranks' weights after every H local steps.

        x_i <- x_i - step_i;  if t mod H = 0:  x_i <- mean_j x_j

    With H = 1, plain or momentum SGD equals dense data-parallel training to float tolerance. Optimizer state (momentum,
    Adam's moments) stays local. After an exchange all ranks hold the same bits.

    Args:
        every: H, local steps between exchanges, 8 by default. Larger sends less and lets ranks drift further apart;
            lower it if the loss is worse than with H = 1.
        node_every: hierarchical local SGD: steps between averages inside each machine, over its inner links. Must
            divide `every`. None: only averages over all ranks.
        warmup_steps: post-local SGD: number of first steps in which gradients are averaged, as in dense data-parallel
            training. Early training suffers most from drift.
        overlap: run an exchange during the next forward and backward pass. The gradient is then of the weights before
            the exchange and is applied to the weights after it.

    Costs an allreduce of the weights every H steps. Raises ConfigError for an H below 1, and for a `node_every` that
    does not divide it. Sources: Stich, "Local SGD Converges Fast and Communicates Little", ICLR 2019; Lin et al.,
    "Don't Use Large Mini-Batches, Use Local SGD", ICLR 2020 (post-local, hierarchical). The exchange follows step H,
    2H, ..., as in fairscale and torchft; torch's PeriodicModelAverager exchanges after step 1, H + 1, ...
    """

    def __init__(
        self,
        every: int = 8,
        node_every: int | None = None,
        warmup_steps: int = 0,
        overlap: bool = False,
    ) -> None:
        self.every = check_whole(every, "every", 1)
        self.node_every = None if node_every is None else check_whole(node_every, "node_every", 1)
        if self.node_every is not None and self.every % self.node_every:
            raise ConfigError(f"node_every {self.node_every} must divide every {self.every}")
        self.warmup_steps = check_whole(warmup_steps, "warmup_steps", 0)
        self.overlap = check_flag(overlap, "overlap")

    def check_losses(self) -> None:
        refuse_with_losses(self, node_every=None, overlap=False, warmup_steps=0)

    def due(self, step: int) -> bool:
        return step % (self.node_every or self.every) == 0

    def identical(self, step: int) -> bool:
        return step % self.every == 0

    def reaches_all(self, step: int) -> bool:
        return self.identical(step)

    def exchange(self, x: Tensor, ctx: Weights) -> Exchange:
        if ctx.step % self.every:
            return (yield AllReduce(x, group="node"))
        return (yield from mean(x, ctx))
