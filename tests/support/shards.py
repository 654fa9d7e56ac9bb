"""A caller of Step that averages shards of tensors over replicas, and four ranks of it: two replicas of two shards."""

from __future__ import annotations

import copy
from collections.abc import Callable, Generator, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor

import dgcopt
from dgcopt.collectives import AllGather, Collective, Exchange, ReduceScatter
from dgcopt.compressors import Compressor, Context
from dgcopt.exchange.commit import CommitMarker, FinishedExchange
from dgcopt.exchange.runner import Job, Runner, describe_in_flight
from dgcopt.exchange.scheduler import PendingExchange, context_of, exchange_of
from dgcopt.exchange.step import Aborted, Description, Step
from dgcopt.exchange.vote import Ballot, Verdict, checksum, fingerprint
from dgcopt.flat.buckets import build_buckets
from dgcopt.flat.gradient import GradientBucket, is_finite
from dgcopt.flat.store import Store

SHAPES = [(8, 3), (4, 50)]
REPLICAS = [(0, 1), (2, 3)]
SIZE = 4
TOPK = dgcopt.TopK(0.1)


class Shards(Step):
    """Each `.grad` of this rank's shards becomes its mean over the replicas, on all ranks or on none."""

    def __init__(self, shards: Sequence[Tensor], compressor: Compressor, comm: dgcopt.Comm) -> None:
        self.runner = Runner(comm, "shards", lambda: None, self.fail)
        super().__init__(self.runner.scheduler, CommitMarker())
        self.shards, self.compressor, self.store = shards, compressor, Store()
        named = [(f"t{place}", shard) for place, shard in enumerate(shards)]
        self.buckets = build_buckets(named, compressor.kind, 1, 1, None, GradientBucket)
        self.contexts = {bucket: context_of(bucket, comm, "average", self.store) for bucket in self.buckets}
        self.steps, self.stale, self.final, self.here = 0, False, True, True
        self.rule, self.outcomes, self.log = "", list[Any](), list[str]()
        self.ended()

    def __call__(self) -> None:
        self.runner.add(self.run())
        self.runner.go()

    @property
    def exchanges(self) -> Sequence[PendingExchange[GradientBucket]]:
        return self.pending

    def ballot(self, final: bool) -> Ballot:
        used = [shard.grad is not None for shard in self.shards]
        finite = all(is_finite(shard.grad) for shard in self.shards if shard.grad is not None)
        launched = sum(pending.exchange is not None for pending in self.pending)
        word, marks = checksum([self.rule]), fingerprint(used)
        final, self.final = final and self.final, True
        flags = {"stale": self.stale, "complete": all(used), "final": final, "here": self.here}
        return Ballot(self.here, finite, self.steps, word, launched, used=marks, **flags)

    def describe(self) -> Description:
        return Description([self.rule], "rules", "Give all ranks one rule.")

    def launch(self, used: Sequence[bool] | None = None, together: bool = False) -> None:
        self.log.append(f"launch {used} {'together' if together else 'apart'}")
        self.launch_until(len(self.buckets))

    def catch_up(self, launched: int) -> None:
        self.launch_until(launched)

    def adapt(self, verdict: Verdict) -> Job:
        self.log.append("adapt")
        yield from ()

    def launch_until(self, launched: int) -> None:
        for place, bucket in enumerate(self.buckets[:launched]):
            if place >= len(self.pending):
                self.pending.append(PendingExchange(bucket.label, bucket))
            if self.pending[place].exchange is None:
                bucket.fill(range(len(bucket.segments)), bucket.grads())
                exchange = exchange_of(bucket, self.compressor, self.contexts[bucket])
                self.scheduler.launch(self.pending[place], exchange)

    def finished(self, used: Sequence[bool] | None) -> list[FinishedExchange]:
        finished = []
        for place, pending in enumerate(self.pending):
            flags = None if used is None else [used[place]]
            write = partial(pending.of.prepare, used=flags)
            finished.append(FinishedExchange(pending, self.contexts[pending.of], flags, write, pending.of.elements))
        return finished

    def used(self) -> list[bool]:
        return [shard.grad is not None for shard in self.shards]

    def rollback(self) -> None:
        for context in self.contexts.values():
            context.rollback()

    def cancelled(self) -> None:
        self.log.append("cancelled")
        self.stale = False

    def committed(self, finished: Sequence[FinishedExchange]) -> None:
        self.steps += 1
        self.outcomes.append("committed")

    def aborted(self, why: Aborted) -> None:
        self.outcomes.append(why)

    def ended(self) -> None:
        self.pending: list[PendingExchange[GradientBucket]] = []

    def fail(self) -> str:
        told = describe_in_flight(self.pending)
        self.rollback()
        self.ended()
        return told


class Halves(Compressor):
    """Half of the gradient and the residual, which is kept until a later step sends it."""

    def exchange(self, grad: Tensor, ctx: Context) -> Exchange:
        total = ctx.add_residual(grad)
        half = total / 2
        ctx.keep_residual(total - half)
        rows = yield AllGather(half)
        ctx.checks.check_finite(rows.sum(0), by_sender=rows)
        return rows.mean(0)


class World:
    """The callers of four ranks, with the group of shards inside each replica."""

    def __init__(self, compressor: Compressor, caller: type[Shards] = Shards) -> None:
        whole = dgcopt.simulated_world(SIZE)
        across = [comm.across_replicas(REPLICAS) for comm in whole]
        self.inside = [[whole[rank].among(replica) for rank in replica] for replica in REPLICAS]
        self.callers = [
            caller([torch.zeros(shape) for shape in SHAPES], copy.deepcopy(compressor), comm) for comm in across
        ]

    def backward(self, seed: int) -> list[Tensor]:
        """Make each rank's gradients, reduce-scatter them inside each replica, and return the means over all ranks."""
        generator = torch.Generator().manual_seed(seed)
        grads = [[torch.randn(2 * rows, cols, generator=generator) for rows, cols in SHAPES] for _ in range(SIZE)]
        for replica, comms in zip(REPLICAS, self.inside, strict=True):
            flat = dgcopt.simulate([scattered(grads[rank]) for rank in replica], comms)
            for rank, mine in zip(replica, flat, strict=True):
                parts = mine.split([rows * cols for rows, cols in SHAPES])
                for shard, part, shape in zip(self.callers[rank].shards, parts, SHAPES, strict=True):
                    shard.grad = part.view(shape).clone()
        return [torch.stack(each).mean(0) for each in zip(*grads, strict=True)]

    def step(self) -> list[BaseException]:
        """Step all ranks; each goes on by itself if another one has failed."""
        errors: list[BaseException] = []
        for again in (False, True):
            for caller in self.callers:
                try:
                    if not again:
                        caller()
                    elif caller.runner.busy or caller.runner.failed:
                        caller.runner.finish()
                except BaseException as error:
                    errors.append(error)
        return errors

    def kept(self) -> Any:
        """Return copies of all gradients, memory and numbers of steps."""
        return copy.deepcopy(
            [([s.grad for s in caller.shards], caller.store.memory(), caller.steps) for caller in self.callers]
        )


def scattered(grads: Sequence[Tensor]) -> Generator[Collective, Tensor, Tensor]:
    parts = []
    for grad in grads:
        parts.append((yield ReduceScatter(grad, op="average")).flatten())
    return torch.cat(parts)


def equal(one: Any, other: Any) -> bool:
    """Return True for the same bits, NaN included."""
    if isinstance(one, Tensor):
        return one.shape == other.shape and torch.equal(one.view(torch.uint8), other.view(torch.uint8))
    if isinstance(one, dict):
        return one.keys() == other.keys() and all(equal(one[key], other[key]) for key in one)
    if isinstance(one, list | tuple):
        return len(one) == len(other) and all(map(equal, one, other))
    return bool(one == other)


def spoiling(start: Callable[..., Any]) -> Callable[..., Any]:
    """Send NaN in place of the first value of a bucket's message."""

    def spoiled(collective: Collective, label: str) -> Any:
        if " round 0" in label:
            collective.tensor[0] = torch.nan
        return start(collective, label)

    return spoiled
