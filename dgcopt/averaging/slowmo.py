"""SlowMo: momentum on the change of the weights between two slow steps."""

from __future__ import annotations

import math
from collections.abc import Generator, Hashable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import pad

from ..collectives import AllGather, AllReduce, Collective, Exchange, ReduceScatter
from ..comm import Comm
from ..errors import ConfigError
from ..errors.checks import check_flag, check_positive, check_whole, is_number
from ..flat.memory import at_least_float32
from .base import Averaging
from .local_sgd import LocalSGD
from .rule import refuse_with_losses
from .sync import Round, Sync
from .weights import Weights, mean

__all__ = ["SlowMo"]

ANCHOR, MOMENTUM = "slow anchor", "slow momentum"
OWNED = "slow shard"
"""1 in this rank's shard of anchor and momentum, 0 elsewhere."""


class SlowMo(Averaging):
    """A base algorithm, such as local SGD, plus a slow momentum step after every H local steps.

        after step t, H | t:  x <- mean_j x_j
                              u <- momentum u + (a - x) / lr
                              a <- a - slow_lr lr u;  x_i <- a

    where the anchor a is the result of the last slow step, initially the weights before the first local step, and u is
    initially 0. The inner optimizer's state stays local. With H = 1 and inner SGD without momentum this is dense
    data-parallel SGD with learning rate slow_lr lr and this momentum; with momentum 0 and slow_lr 1 it is the base
    alone. On a single rank it is Lookahead with momentum.

    lr is the parameter group's current learning rate; if exact, the largest over the ranks with data, since schedules
    of ranks without data (`dgcopt.join`) stand still. u has the scale of a gradient, so its effect is proportional to
    the current lr. If lr is 0, u is unchanged and a moves by slow_lr (x - a).

    Args:
        every: H, local steps between slow steps, 48 by default. Larger gives fewer and larger changes, and lets ranks
            drift further unless the base averages in between.
        momentum: decay of u per slow step, in [0, 1). Larger accelerates persistent changes; lower it if the loss jumps
            up after slow steps.
        slow_lr: step size of the slow step. 1 goes to the mean of the local weights, plus momentum; lower is more
            careful.
        base: the algorithm between slow steps; None is LocalSGD(every=3). An exact slow step replaces the base's
            exchange if both are due.
        sharded: each rank holds 1/N of a and u and computes that part of the slow step for all ranks.
        exact: take the mean over ranks in a slow step. False, only with sharded=False: each rank uses its own x, a and
            u, after the base's exchange if that is due.
        faithful: start like fairscale, with the weights after the first local step as the anchor: each rank its own, or
            those of its shard. Not with exact=True and sharded=False, where ranks would never meet.
        warmup_steps: number of first steps of dense data-parallel training; the base must not have any.

    For weights of half precision, a and u are float32. a is trained; weights are a rounded copy of it, so changes below
    a rounding step add up in a.

    Costs, every H steps, an allreduce of the weights, or a reduce-scatter and an allgather of the same size if sharded,
    padded to a multiple of N, and 8 bytes per bucket for lr; nothing if not exact. Means are computed in float32 at
    least. Memory: 8 bytes per parameter, 16 for float64, of which a sharded rank holds 1/N; all of it is in the state.
    Shards are cut from buckets, so the first slow step after a state was loaded, or parameters were added or frozen,
    redistributes them: a reduce-scatter of 9 bytes per parameter. The shard of a lost rank starts again from zero.
    After an exact slow step all ranks hold the same bits.

    Raises ConfigError for settings out of range or in conflict, for a state with another `sharded`, and for a base that
    is not a plain exchange of buckets, has a warm-up, or overlaps: a slow step uses the learning rate of the local step
    before it, so it cannot end later.

    Source: Wang, Tantia, Ballas & Rabbat, "SlowMo: Improving Communication-Efficient Distributed SGD with Slow
    Momentum", ICLR 2020, Algorithm 1. fairscale's SlowMoDistributedDataParallel takes a later anchor (`faithful`),
    divides by zero at lr 0, has at most 32 shards, and saves neither a nor u.
    """

    def __init__(
        self,
        every: int = 48,
        momentum: float = 0.5,
        slow_lr: float = 1.0,
        base: Averaging | None = None,
        sharded: bool = True,
        exact: bool = True,
        faithful: bool = False,
        warmup_steps: int = 0,
    ) -> None:
        self.every = check_whole(every, "every", 1)
        if not is_number(momentum) or not 0 <= momentum < 1:
            raise ConfigError(f"momentum must be at least 0 and below 1, not {momentum!r}")
        self.momentum = float(momentum)
        self.slow_lr = check_positive(slow_lr, "slow_lr")
        self.base = LocalSGD(every=3) if base is None else base
        self.sharded, self.exact = check_flag(sharded, "sharded"), check_flag(exact, "exact")
        self.faithful = check_flag(faithful, "faithful")
        self.warmup_steps = check_whole(warmup_steps, "warmup_steps", 0)
        _check_base(self.base)
        if sharded and not exact:
            raise ConfigError(
                "exact=False needs sharded=False: the owner of a shard computes the slow step for all ranks from the "
                "exact mean. Set sharded=False."
            )
        if faithful and exact and not sharded:
            raise ConfigError(
                "faithful=True needs sharded=True or exact=False, as in fairscale: with anchors that differ, ranks "
                "would never hold equal weights"
            )

    # -- when --------------------------------------------------------------------------------------------------------

    def due(self, step: int) -> bool:
        return self._is_slow(step) or self._begins_late(step) or self.base.due(step)

    def identical(self, step: int) -> bool:
        if self._is_slow(step):
            return self.exact
        return self.base.due(step) and self.base.identical(step)

    def arrives_alike(self, step: int) -> bool:
        return self.identical(step) or self.base.arrives_alike(step)

    def reaches_all(self, step: int) -> bool:
        return self.identical(step) if self._is_on and self.exact else self.base.reaches_all(step)

    def _is_slow(self, step: int) -> bool:
        return self._is_on and step % self.every == 0

    def _begins_late(self, step: int) -> bool:
        return self._is_on and self.faithful and step == 1

    @property
    def _is_on(self) -> bool:
        return self.momentum != 0 or self.slow_lr != 1

    # -- how ---------------------------------------------------------------------------------------------------------

    def start(self, x: Tensor, ctx: Weights) -> None:
        self.base.start(x, ctx)
        if ANCHOR not in ctx.memory:
            if self._is_on:
                self._begin(x, ctx)
        elif self.sharded != (OWNED in ctx.memory):
            raise ConfigError(
                f"the loaded state was saved by SlowMo(sharded={not self.sharded}), and this is SlowMo(sharded="
                f"{self.sharded}). Use the setting with which it was saved."
            )

    def exchange(self, x: Tensor, ctx: Weights) -> Exchange:
        slow, lr = self._is_slow(ctx.step), ctx.lr
        if self._begins_late(ctx.step):
            self._begin(x, ctx)  # even if the exchange fails
        if self.base.due(ctx.step) and not (slow and self.exact):
            x = yield from self.base.exchange(x, ctx)
        if not slow:
            return x
        x = x.to(at_least_float32(ctx.dtype))  # a mean in half precision would be rounded back to the anchor
        if self.sharded:
            x = (yield ReduceScatter(_by_rank(x if ctx.weight == 1 else x.mul_(ctx.weight), ctx)))[0]
        elif self.exact:
            x = yield from mean(x, ctx)
        if self.exact:
            lr = yield from _largest_of_those_with_data(lr, ctx)
        anchor, u = yield from self._recall(x, ctx)
        moved = anchor.to(ctx.dtype) - x  # relative to the start of the local steps
        anchor = anchor - self.slow_lr * (self.momentum * lr * u + moved)
        if lr > 0:
            u = self.momentum * u + moved / lr
        ctx.memory.on_commit(lambda: self._keep(anchor, u, ctx))
        x = anchor.to(ctx.dtype, copy=True)
        return (yield AllGather(x)).view(-1)[: ctx.numel] if self.sharded else x

    # -- anchor and momentum: whole in ctx.memory, or this rank's shard in ctx.scratch --------------------------------

    def _begin(self, x: Tensor, ctx: Weights) -> None:
        own = _by_rank(x, ctx)[ctx.rank] if self.sharded else x
        anchor = own.to(at_least_float32(x.dtype), copy=True)
        self._keep(anchor, torch.zeros_like(anchor), ctx)

    def _keep(self, anchor: Tensor, u: Tensor, ctx: Weights) -> None:
        for kind in (ANCHOR, MOMENTUM, OWNED):
            ctx.memory.take(kind)
        for kind, flat in ((ANCHOR, anchor), (MOMENTUM, u)):
            if self.sharded:
                ctx.scratch[kind] = flat
            else:
                ctx.memory.put(kind, flat)

    def _recall(self, x: Tensor, ctx: Weights) -> Generator[Collective, Tensor, tuple[Tensor, Tensor]]:
        """Return anchor and momentum; of this rank's shard if `x` is one."""
        if not self.sharded:
            return ctx.memory[ANCHOR], ctx.memory[MOMENTUM]
        if ANCHOR not in ctx.memory:
            return ctx.scratch[ANCHOR], ctx.scratch[MOMENTUM]
        # loaded, or from an earlier layout: each rank has its old shard, parts of which others need now
        parts = {}
        for kind in (ANCHOR, MOMENTUM, OWNED):
            parts[kind] = (yield ReduceScatter(_by_rank(ctx.memory[kind], ctx), op="sum"))[0]
        return torch.where(parts[OWNED] > 0, parts[ANCHOR], x), parts[MOMENTUM]

    def saved(self, ctx: Weights) -> dict[str, Tensor]:
        saved = self.base.saved(ctx)
        if self.sharded and ANCHOR in ctx.scratch:
            shards = {kind: ctx.scratch[kind] for kind in (ANCHOR, MOMENTUM)}
            shards[OWNED] = torch.ones_like(shards[ANCHOR], dtype=torch.uint8)
            for kind, shard in shards.items():
                rows = shard.new_zeros(ctx.size, len(shard))
                rows[ctx.rank] = shard
                saved[kind] = rows.view(-1)[: ctx.numel]
        return saved

    def merges(self, kind: str) -> bool:
        if kind in (ANCHOR, MOMENTUM, OWNED):
            return not self.sharded  # the next slow step redistributes shards
        return self.base.merges(kind)

    def sync(self, round: Round) -> Sync:
        needs_equal_anchors = self._is_on and self.exact and not self.sharded
        return SlowSync(round) if needs_equal_anchors else Sync(round)

    # -- the base --------------------------------------------------------------------------------------------------

    @property
    def meets(self) -> bool:  # type: ignore[override]
        return self.base.meets

    @property
    def in_turn(self) -> bool:  # type: ignore[override]
        return self.base.in_turn

    @property
    def prepares(self) -> bool:  # type: ignore[override]
        return self.base.prepares

    def check(self, comm: Comm, names: Sequence[str]) -> None:
        self.base.check(comm, names)

    def check_survives(self) -> None:
        self.base.check_survives()
        refuse_with_losses(self, sharded=False, exact=True, warmup_steps=0)

    def before_step(self, x: Tensor, ctx: Weights) -> None:
        self.base.before_step(x, ctx)

    def kind(self, name: str, param: Tensor) -> Hashable:
        return self.base.kind(name, param)

    def set_steps_per_epoch(self, steps: int) -> None:
        self.base.set_steps_per_epoch(steps)


class SlowSync(Sync):
    """A round of SlowMo whose anchors must be equal on all ranks, since each computes the whole slow step."""

    def load(self, entry: dict[str, Any], state: dict[str, Any]) -> None:
        comm = self.round.comm
        if state["apart"] and ANCHOR not in state["memory"] and state["saved_by"] == comm.size > 1:
            raise ConfigError(
                f"rank {comm.rank}: the state was saved by another algorithm, between two rounds, when the weights of "
                f"ranks differed. SlowMo(sharded=False) needs a common anchor: save the state right after "
                f"optimizer.averaging.average(), or set sharded=True."
            )


def _largest_of_those_with_data(lr: float, ctx: Weights) -> Generator[Collective, Tensor, float]:
    """Return the largest learning rate of ranks with data; schedules of ranks without data stand still."""
    mine = torch.tensor([lr if ctx.has_progress else -math.inf], dtype=torch.float64)
    return float((yield AllReduce(mine, op="max", group="control")))


def _by_rank(flat: Tensor, ctx: Weights) -> Tensor:
    """Return a copy of `flat`, padded with zeros and split into one row per rank."""
    return pad(flat, (0, -len(flat) % ctx.size)).view(ctx.size, -1)


def _check_base(base: Averaging) -> None:
    if not isinstance(base, Averaging) or isinstance(base, SlowMo) or not base.by_bucket:
        raise ConfigError(
            f"base must be an algorithm that only exchanges weights after local steps, such as "
            f"LocalSGD(every=3) or SGP(), not {base!r}"
        )
    if base.overlap:
        raise ConfigError(
            f"base must not overlap: a slow step uses the learning rate of the local step before it, so it "
            f"cannot end later. Set overlap=False in {base!r}."
        )
    if base.warmup_steps:
        raise ConfigError(f"base {base!r} has warmup_steps. Give them to SlowMo instead.")
