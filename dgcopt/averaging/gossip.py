"""SGP: stochastic gradient push."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from ..collectives import Exchange
from ..comm import Comm
from ..errors import ConfigError
from ..errors.checks import check_flag, check_whole
from .base import Averaging
from .graphs import Exponential, Graph, edges_of, is_balanced, mix
from .weights import Weights, between_machines

__all__ = ["SGP"]


class SGP(Averaging):
    """After local steps each rank sends a share of its weights to a few peers; no rank waits for all.

        x_i <- w_i z_i - step_i(z_i);  x_j <- sum_i p_ji x_i,  w_j <- sum_i p_ji w_i;  z_j = x_j / w_j

    z are the model's weights, and p_ji is the share that i sends to j (`Graph`). The push-sum weights w, all 1 at
    first, correct for ranks that receive more than others. Every rank can compute all of them, so they are not sent. In
    a balanced graph, as all of dgcopt's are, they stay 1 and z = x. Ranks never hold equal weights; call
    `optimizer.averaging.average()` to end training with the mean.

    Args:
        graph: the communication graph; None is `Exponential()`.
        overlap: OSGP with a delay of one step: a round runs during the next forward and backward pass, whose gradient
            is of the weights before the round and is applied to the weights after it. For balanced graphs.
        every: local steps between rounds, 1 by default. Larger sends less and lets ranks drift further apart.
        hierarchical: average inside each machine; its first rank takes part in the round and broadcasts the result. The
            graph connects machines. For several ranks per machine and slow links between machines.
        warmup_steps: number of first steps in which gradients are averaged instead.

    Costs the weights once per peer and round: with one peer half of an allreduce. With `hierarchical`, the same between
    machines plus an allreduce and a broadcast inside each. An unbalanced graph keeps one more copy of the weights.
    Raises ConfigError for an `every` below 1, for a graph that does not fit the ranks, and for overlap with an
    unbalanced graph. Sources: Assran, Loizou, Ballas & Rabbat, "Stochastic Gradient Push for Distributed Deep
    Learning", ICML 2019, algorithms 1 and 2; Kempe, Dobra & Gehrke, FOCS 2003 (push-sum). Steps start from z, as in the
    paper, so weight decay applies to z; in the authors' code it applies to x. Ranks without data (`dgcopt.join`)
    contribute their current weights.
    """

    meets = False

    def __init__(
        self,
        graph: Graph | None = None,
        overlap: bool = False,
        every: int = 1,
        warmup_steps: int = 0,
        hierarchical: bool = False,
    ) -> None:
        self.graph = Exponential() if graph is None else graph
        if not isinstance(self.graph, Graph):
            raise ConfigError(f"graph must be a Graph, such as Exponential() or Ring(), not {graph!r}")
        self.overlap = check_flag(overlap, "overlap")
        self.every = check_whole(every, "every", 1)
        self.warmup_steps = check_whole(warmup_steps, "warmup_steps", 0)
        self.hierarchical = check_flag(hierarchical, "hierarchical")
        self._pushed: PushSum | None = None

    def check(self, comm: Comm, names: Sequence[str]) -> None:
        size, peers = (comm.nodes, "machines") if self.hierarchical else (comm.size, "ranks")
        self._pushed = None if is_balanced(self.graph, size) else PushSum(self.graph, size)
        if self._pushed is not None and self.overlap:
            raise ConfigError(
                f"{self.graph!r} is not balanced among {size} {peers}: weights must be divided by the push-sum weight "
                f"before the next forward pass, but overlap=True starts that pass earlier. Set overlap=False, or use a "
                f"graph where {peers} receive as much as they send"
            )

    @property
    def in_turn(self) -> bool:  # type: ignore[override]
        return self.hierarchical

    @property
    def prepares(self) -> bool:  # type: ignore[override]
        return self._pushed is not None

    def due(self, step: int) -> bool:
        return step % self.every == 0 or self._pushed is not None

    def reaches_all(self, step: int) -> bool:
        return step % self.every == 0  # in between only push-sum weights are divided out

    def before_step(self, x: Tensor, ctx: Weights) -> None:
        ctx.scratch["z"] = x

    def exchange(self, x: Tensor, ctx: Weights) -> Exchange:
        sends = ctx.step % self.every == 0
        round = ctx.step // self.every - sends
        if self._pushed is None:
            return (yield from self._mix(x, ctx, round))
        before, after = self._pushed.around(round, ctx.place.node if self.hierarchical else ctx.rank)
        x = x + ctx.scratch.pop("z", x) * (before - 1)  # w z + (x - z), where x is z after its step
        if sends:
            return (yield from self._mix(x, ctx, round)) / after
        return x / before

    def _mix(self, x: Tensor, ctx: Weights, round: int) -> Exchange:
        if self.hierarchical:
            return (yield from between_machines(x, ctx, lambda x, ctx: mix(x, self.graph, ctx, round)))
        return (yield from mix(x, self.graph, ctx, round))


class PushSum:
    """The push-sum weights of all ranks, or all machines, computed from the graph and the number of rounds.

    After a change of the world size they are those of a run that always had this size. That is as good as 1: all ranks
    hold the same z then, and x = w z adds up to N z because w adds up to N.
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
        """Return a rank's weight before and after a round. An earlier round recomputes all."""
        if round < self._round:
            self._begin()
        while self._round < round:
            self._round, self._before = self._round + 1, self._after
            self._after = self._push(self._before)
        return float(self._before[rank]), float(self._after[rank])
