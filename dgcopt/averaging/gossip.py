"""SGP: stochastic gradient push."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from ..checks import check_flag, check_period, check_whole
from ..collectives import Exchange
from ..comm import Comm
from ..errors import ConfigError
from .base import Averaging
from .graphs import Exponential, Graph, edges_of, is_balanced, mix
from .weights import Weights, between_machines

__all__ = ["SGP"]


class SGP(Averaging):
    """After local steps each rank sends a share of its weights to a few others: no rank waits for all.

        x_i <- w_i z_i - step_i(z_i);  x_j <- sum_i p_ji x_i,  w_j <- sum_i p_ji w_i;  z_j = x_j / w_j

    z is what the model holds, and p_ji the share that i sends to j (`Graph`). The push-sum weights w, all 1 at first,
    undo that some ranks hear more than others; everyone can tell everyone's, so they are not sent. In a balanced graph,
    as all of dgcopt's are, they stay 1, and z = x. At no time do all ranks hold the same weights;
    `optimizer.averaging.average()` ends training with their mean.

    Args:
        graph: who sends to whom; None is `Exponential()`.
        overlap: OSGP with a delay of one step: a round goes on during the next forward and backward pass, whose
            gradient is of the weights before the round and is applied to those after it. For balanced graphs.
        every: local steps between rounds, 1 by default. Larger sends less, and ranks drift further apart.
        hierarchical: ranks of one machine average, its first rank takes part for them all, and broadcasts the result;
            the graph is of machines. For several ranks on a machine and slow links between.
        warmup_steps: for so many steps gradients are averaged instead.
        frequency: an older name of `every`.

    Costs each rank the weights once per peer and round: half of an allreduce with one peer. `hierarchical` costs that
    between machines, an allreduce and a broadcast within each. A graph that is not balanced takes a copy of the weights
    besides. Raises ConfigError for an `every` below 1, and for a graph that the
    ranks cannot use or whose weights w would be missing while a round overlaps. Sources: Assran, Loizou, Ballas &
    Rabbat, "Stochastic Gradient Push for Distributed Deep Learning", ICML 2019, algorithms 1 and 2; Kempe, Dobra &
    Gehrke, FOCS 2003 (push-sum). Steps are made from z, as in the paper, so weight decay is of z; in the authors' code
    it is of x. When ranks have run out of data (`dgcopt.join`), they count with the weights that they have.
    """

    meets = False

    def __init__(
        self,
        graph: Graph | None = None,
        overlap: bool = False,
        every: int | None = None,
        warmup_steps: int = 0,
        hierarchical: bool = False,
        *,
        frequency: int | None = None,
    ) -> None:
        self.graph = Exponential() if graph is None else graph
        if not isinstance(self.graph, Graph):
            raise ConfigError(f"graph must be a Graph, such as Exponential() or Ring(), not {graph!r}")
        self.overlap = check_flag(overlap, "overlap")
        self.every = check_period(every, 1, frequency=frequency)
        self.warmup_steps = check_whole(warmup_steps, "warmup_steps", 0)
        self.hierarchical = check_flag(hierarchical, "hierarchical")
        self._pushed: PushSum | None = None

    def check(self, comm: Comm, names: Sequence[str]) -> None:
        size, peers = (comm.nodes, "machines") if self.hierarchical else (comm.size, "ranks")
        self._pushed = None if is_balanced(self.graph, size) else PushSum(self.graph, size)
        if self._pushed is not None and self.overlap:
            raise ConfigError(
                f"{self.graph!r} is not balanced among {size} {peers}, so what a local step leaves must be divided by "
                f"the push-sum weight before the next forward pass, which overlap=True lets begin before that: set "
                f"overlap=False, or use a graph where {peers} receive as much as they send"
            )

    @property
    def in_turn(self) -> bool:  # type: ignore[override]
        return self.hierarchical

    @property
    def prepares(self) -> bool:  # type: ignore[override]
        return self._pushed is not None

    def due(self, step: int) -> bool:
        return step % self.every == 0 or self._pushed is not None

    def before_step(self, x: Tensor, ctx: Weights) -> None:
        ctx.scratch["z"] = x

    def exchange(self, x: Tensor, ctx: Weights) -> Exchange:
        sends = ctx.step % self.every == 0
        round = ctx.step // self.every - sends
        if self._pushed is None:
            return (yield from self._mix(x, ctx, round))
        before, after = self._pushed.around(round, ctx.node if self.hierarchical else ctx.rank)
        x = x + ctx.scratch.pop("z", x) * (before - 1)  # w z + (x - z), where x is z after its step
        if sends:
            return (yield from self._mix(x, ctx, round)) / after
        return x / before

    def _mix(self, x: Tensor, ctx: Weights, round: int) -> Exchange:
        if self.hierarchical:
            return (yield from between_machines(x, ctx, lambda x, ctx: mix(x, self.graph, ctx, round)))
        return (yield from mix(x, self.graph, ctx, round))


class PushSum:
    """All ranks' push-sum weights, or all machines', which follow from the graph and the number of rounds alone.

    After a change in the number of ranks they are as if there had always been so many. That is as good as 1: all hold
    the same z then, and x = w z adds up to N z, as w adds up to N.
    """

    def __init__(self, graph: Graph, size: int) -> None:
        self.graph = graph
        self.size = size
        self._begin()

    def _begin(self) -> None:
        self._round, self._before = 0, torch.ones(self.size, dtype=torch.float64)
        self._after = self._push(self._before)

    def _push(self, w: Tensor) -> Tensor:
        return edges_of(self.graph, self.size, self._round % self.graph.period(self.size)).push(w)

    def around(self, round: int, rank: int) -> tuple[float, float]:
        """A rank's weight before and after a round; going back means going through all rounds again."""
        if round < self._round:
            self._begin()
        while self._round < round:
            self._round, self._before = self._round + 1, self._after
            self._after = self._push(self._before)
        return float(self._before[rank]), float(self._after[rank])
