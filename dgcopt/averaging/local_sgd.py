"""Local SGD: average weights every H steps."""

from __future__ import annotations

from functools import partial

from torch import Tensor

from ..collectives import AllReduce, Exchange
from ..errors import ConfigError
from ..errors.checks import check_flag, check_whole
from .base import Averaging
from .rule import refuse_with_losses
from .weights import Weights, mean

__all__ = ["LocalSGD"]


class LocalSGD(Averaging):
    """Averages all ranks' weights after every H local steps.

        x_i <- x_i - step_i;  if t mod H = 0:  x_i <- mean_j x_j

    With H = 1, plain or momentum SGD equals dense data-parallel training to float tolerance. Optimizer state (momentum,
    Adam's moments) stays local unless `state_every` says otherwise. After an exchange all ranks hold the same bits.

    Args:
        every: H, local steps between exchanges, 8 by default. Larger sends less and lets ranks drift further apart;
            lower it if the loss is worse than with H = 1.
        node_every: hierarchical local SGD: steps between averages inside each machine, over its inner links. Must
            divide `every`. None: only averages over all ranks.
        warmup_steps: post-local SGD: number of first steps in which gradients are averaged, as in dense data-parallel
            training. Early training suffers most from drift.
        state_every: DES-LOC: steps between averages of the optimizer's state, by its name in `optimizer.state`, such as
            {"exp_avg": 24, "exp_avg_sq": 48} for Adam's moments at H = 8. Tensors of the parameter's shape only.
            A parameter without that state sends zeros, as Muon's matrices in `MuonAdamW`, because a rank does not know
            whether other ranks have the state.
        overlap: run an exchange during the next forward and backward pass. The gradient is then of the weights before
            the exchange and is applied to the weights after it.

    Costs an allreduce of the weights every H steps, and one of the same size for each average of a state. Raises
    ConfigError for an H or a period in `state_every` below 1, for a `node_every` that does not divide H, and at the
    first average for a state that the optimizer does not have. Sources: Stich, "Local SGD Converges Fast and
    Communicates Little", ICLR 2019; Lin et al., "Don't Use Large Mini-Batches, Use Local SGD", ICLR 2020 (post-local,
    hierarchical); Iacob et al., "DES-LOC: Desynced Low Communication Adaptive Optimizers for Training Foundation
    Models", arXiv:2505.22549. The exchange follows step H, 2H, ..., as in fairscale and torchft; torch's
    PeriodicModelAverager exchanges after step 1, H + 1, ...
    """

    def __init__(
        self,
        every: int = 8,
        node_every: int | None = None,
        warmup_steps: int = 0,
        overlap: bool = False,
        state_every: dict[str, int] | None = None,
    ) -> None:
        self.every = check_whole(every, "every", 1)
        self.node_every = None if node_every is None else check_whole(node_every, "node_every", 1)
        if self.node_every is not None and self.every % self.node_every:
            raise ConfigError(f"node_every {self.node_every} must divide every {self.every}")
        self.warmup_steps = check_whole(warmup_steps, "warmup_steps", 0)
        self.overlap = check_flag(overlap, "overlap")
        self.state_every = {} if state_every is None else state_every
        if not isinstance(self.state_every, dict):
            raise ConfigError(f'state_every must be steps by name, such as {{"exp_avg": 24}}, not {state_every!r}')
        for name, steps in self.state_every.items():
            if not isinstance(name, str):
                raise ConfigError(f'state_every must name states by strings, such as "exp_avg", not by {name!r}')
            check_whole(steps, f"state_every[{name!r}]", 1)

    def check_survives(self) -> None:
        refuse_with_losses(self, node_every=None, overlap=False, warmup_steps=0)

    def due(self, step: int) -> bool:
        periods = (self.node_every or self.every, *self.state_every.values())
        return any(step % period == 0 for period in periods)

    def identical(self, step: int) -> bool:
        return step % self.every == 0

    def reaches_all(self, step: int) -> bool:
        return self.identical(step)

    def arrives_alike(self, step: int) -> bool:
        return self.identical(step) or self.node_every is None

    def exchange(self, x: Tensor, ctx: Weights) -> Exchange:
        finite: Tensor | float = 0.0
        for name, every in self.state_every.items():
            if ctx.step % every == 0:
                state = ctx.state_bucket(name)
                averaged = yield from mean(state.read(), ctx)
                ctx.memory.on_commit(partial(state.write, averaged))
                finite = finite + (0 * averaged).sum()  # the sum itself may overflow
        if ctx.step % self.every == 0:
            x = yield from mean(x, ctx)
        elif self.node_every and ctx.step % self.node_every == 0:
            x = yield AllReduce(x, group="node")
        return x.add_(finite) if self.state_every else x  # NaN or Inf in a state skips the round, too
