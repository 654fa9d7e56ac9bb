"""SlowMo: momentum over what local training changes between one slow step and the next."""

from __future__ import annotations

import math
from collections.abc import Generator, Hashable, Sequence

import torch
from torch import Tensor
from torch.nn.functional import pad

from ..checks import check_flag, check_period, check_positive, check_whole
from ..collectives import AllGather, AllReduce, Collective, Exchange, ReduceScatter
from ..comm import Comm
from ..compressors.context import at_least_float32
from ..errors import ConfigError
from .base import Averaging
from .local_sgd import LocalSGD
from .weights import Weights, mean

__all__ = ["SlowMo"]

ANCHOR, MOMENTUM = "slow anchor", "slow momentum"
OWNED = "slow shard"
"""1 where the anchor and the momentum are this rank's, 0 where they are another's."""


class SlowMo(Averaging):
    """A base algorithm, such as local SGD, and a slow step of momentum after every H local steps.

        after step t, H | t:  x <- mean_j x_j
                              u <- momentum u + (a - x) / lr
                              a <- a - slow_lr lr u;  x_i <- a

    where the anchor a is what the last slow step gave, at first the weights before any local step, and u is 0 at first.
    The inner optimizer's state stays each rank's own. With H = 1 and inner SGD without momentum this is dense
    data-parallel SGD of learning rate slow_lr lr and this momentum; with momentum 0 and slow_lr 1 it is the base and
    nothing else. A single rank takes slow steps too: it becomes Lookahead, with momentum.

    lr is the parameter group's as it is at the slow step; if exact the largest of the ranks', but for those that have
    run out of data (`dgcopt.join`), whose schedules stand still. As u is of a gradient's scale, what it remembers moves
    weights in proportion to the lr at hand: less after a decay. Where lr is 0, u stays, and a moves by slow_lr (x - a).

    Args:
        every: H, local steps between slow ones, 48 by default. Larger remembers fewer and larger changes, and lets
            ranks drift further unless the base holds them together.
        momentum: how much of u is left at the next slow step, in [0, 1). Larger goes further where changes persist;
            lower it if the loss jumps up after slow steps.
        slow_lr: how far to go. 1 is to where local training has come, and beyond it by momentum; lower is more careful.
        base: what ranks do between slow steps; None is LocalSGD(every=3). An exact slow step takes the place of the
            base's exchange that is due at the same time.
        sharded: each rank holds 1/N of a and u, and makes that part of the slow step for all ranks.
        exact: whether a slow step takes the mean over ranks. False, only with sharded=False, lets each rank make it
            with its own x, a and u, after the base's exchange if that is due.
        faithful: begin where fairscale does, with the weights after the first local step for an anchor: each rank with
            its own, or those of its shard. Not for exact=True with sharded=False, where ranks would stay apart.
        warmup_steps: so many steps of dense data-parallel training first; the base must not have any.
        frequency: an older name of `every`, as fairscale's slowmo_frequency.

    Where weights are of half precision, a and u are float32, and a is what is trained: weights are a rounded, which is
    no change to a, and changes too small for half precision add up in it.

    Costs, every H steps, an allreduce of the weights, or its equal in a reduce-scatter and an allgather if sharded,
    padded to a multiple of N, and 8 bytes per bucket for lr; nothing if not exact. Means are of float32 at least.
    Memory: 8 bytes per parameter, 16 for float64, of which a sharded rank holds 1/N; all of it is in the state. As
    shards are cut from buckets, the first slow step after state was loaded, or parameters were added or frozen, brings
    them together anew: a reduce-scatter of 9 bytes per parameter. What a lost rank held begins anew. After an exact
    slow step all ranks hold the same bits.

    Raises ConfigError for settings out of range or at odds, for state of the other `sharded`, and for a base that is
    not carried out as LocalSGD is, has a warm-up, or overlaps: the learning rate of a slow step is that of the local
    step before it, so it cannot end later.

    Source: Wang, Tantia, Ballas & Rabbat, "SlowMo: Improving Communication-Efficient Distributed SGD with Slow
    Momentum", ICLR 2020, Algorithm 1. fairscale's SlowMoDistributedDataParallel takes a later anchor (`faithful`),
    divides by zero at lr 0, has no more than 32 shards, and saves neither a nor u.
    """

    def __init__(
        self,
        every: int | None = None,
        momentum: float = 0.5,
        slow_lr: float = 1.0,
        base: Averaging | None = None,
        sharded: bool = True,
        exact: bool = True,
        faithful: bool = False,
        warmup_steps: int = 0,
        *,
        frequency: int | None = None,
    ) -> None:
        self.every = check_period(every, 48, frequency=frequency)
        self.momentum = momentum
        if isinstance(momentum, bool) or not isinstance(momentum, int | float) or not 0 <= momentum < 1:
            raise ConfigError(f"momentum must be at least 0 and below 1, not {momentum!r}")
        self.slow_lr = check_positive(slow_lr, "slow_lr")
        self.base = LocalSGD(every=3) if base is None else base
        self.sharded, self.exact = check_flag(sharded, "sharded"), check_flag(exact, "exact")
        self.faithful = check_flag(faithful, "faithful")
        self.warmup_steps = check_whole(warmup_steps, "warmup_steps", 0)
        _check_base(self.base)
        if sharded and not exact:
            raise ConfigError(
                "exact=False needs sharded=False: a rank that holds a shard makes its part of the slow step for all "
                "ranks, from the exact mean"
            )
        if faithful and exact and not sharded:
            raise ConfigError(
                "faithful=True needs sharded=True or exact=False, as in fairscale: anchors that differ would keep the "
                "ranks apart for good, although they take the exact mean"
            )

    # -- when --------------------------------------------------------------------------------------------------------

    def due(self, step: int) -> bool:
        return self._is_slow(step) or self._begins_late(step) or self.base.due(step)

    def identical(self, step: int) -> bool:
        if self._is_slow(step):
            return self.exact
        return self.base.due(step) and self.base.identical(step)

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
                f"the state that was loaded is of SlowMo(sharded={not self.sharded}), and this is sharded="
                f"{self.sharded}: use what it was saved with"
            )

    def exchange(self, x: Tensor, ctx: Weights) -> Exchange:
        slow, lr = self._is_slow(ctx.step), ctx.lr
        if self._begins_late(ctx.step):
            self._begin(x, ctx)  # whatever becomes of the exchange
        if self.base.due(ctx.step) and not (slow and self.exact):
            x = yield from self.base.exchange(x, ctx)
        if not slow:
            return x
        x = x.to(at_least_float32(ctx.dtype))  # the mean of half precision would be rounded to what the anchor was
        if self.sharded:
            x = (yield ReduceScatter(_by_rank(x if ctx.weight == 1 else x.mul_(ctx.weight), ctx)))[0]
        elif self.exact:
            x = yield from mean(x, ctx)
        if self.exact:
            lr = yield from _largest_of_those_with_data(lr, ctx)
        anchor, u = yield from self._recall(x, ctx)
        moved = anchor.to(ctx.dtype) - x  # from where local steps have started
        anchor = anchor - self.slow_lr * (self.momentum * lr * u + moved)
        if lr > 0:
            u = self.momentum * u + moved / lr
        ctx.once_settled(lambda: self._keep(anchor, u, ctx))
        x = anchor.to(ctx.dtype, copy=True)
        return (yield AllGather(x)).view(-1)[: ctx.numel] if self.sharded else x

    # -- anchor and momentum: whole in ctx.memory, or this rank's shard in ctx.scratch, as it has another layout ------

    def _begin(self, x: Tensor, ctx: Weights) -> None:
        own = _by_rank(x, ctx)[ctx.rank] if self.sharded else x
        anchor = own.to(at_least_float32(x.dtype), copy=True)
        self._keep(anchor, torch.zeros_like(anchor), ctx)

    def _keep(self, anchor: Tensor, u: Tensor, ctx: Weights) -> None:
        for kind in (ANCHOR, MOMENTUM, OWNED):
            ctx.memory.pop(kind, None)
        (ctx.scratch if self.sharded else ctx.memory).update({ANCHOR: anchor, MOMENTUM: u})

    def _recall(self, x: Tensor, ctx: Weights) -> Generator[Collective, Tensor, tuple[Tensor, Tensor]]:
        """Anchor and momentum, of this rank's shard if `x` is no more than that."""
        if not self.sharded:
            return ctx.memory[ANCHOR], ctx.memory[MOMENTUM]
        if ANCHOR not in ctx.memory:
            return ctx.scratch[ANCHOR], ctx.scratch[MOMENTUM]
        # loaded, or from before buckets were built anew: each rank has what was its part, which others need now
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
            return not self.sharded  # the next slow step brings shards together
        return self.base.merges(kind)

    # -- the base's --------------------------------------------------------------------------------------------------

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

    def before_step(self, x: Tensor, ctx: Weights) -> None:
        self.base.before_step(x, ctx)

    def kind(self, name: str, param: Tensor) -> Hashable:
        return self.base.kind(name, param)

    def set_steps_per_epoch(self, steps: int) -> None:
        self.base.set_steps_per_epoch(steps)


def _largest_of_those_with_data(lr: float, ctx: Weights) -> Generator[Collective, Tensor, float]:
    """One learning rate for all: the schedule of a rank that has run out of data stands still."""
    mine = torch.tensor([lr if ctx.weight else -math.inf], dtype=torch.float64)
    return float((yield AllReduce(mine, op="max", group="control")))


def _by_rank(flat: Tensor, ctx: Weights) -> Tensor:
    """A copy of `flat`, padded with zeros and cut in a row for each rank."""
    return pad(flat, (0, -len(flat) % ctx.size)).view(ctx.size, -1)


def _check_base(base: Averaging) -> None:
    if not isinstance(base, Averaging) or isinstance(base, SlowMo) or not base.by_bucket:
        raise ConfigError(
            f"base must be an algorithm that exchanges weights after local steps and does nothing else, such as "
            f"LocalSGD(every=3) or SGP(), not {base!r}"
        )
    if base.overlap:
        raise ConfigError(
            f"base must not overlap, because a slow step has the learning rate of the local step before it and so "
            f"cannot end later: set overlap=False in {base!r}"
        )
    if base.warmup_steps:
        raise ConfigError(f"give warmup_steps to SlowMo, not to its base {base!r}")
