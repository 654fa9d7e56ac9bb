"""Simulated ranks with one bucket, for the tests of sums by owners."""

from __future__ import annotations

import torch
from torch import Tensor

import dgcopt
from dgcopt.collectives import Link
from dgcopt.compressors import Context, Place
from dgcopt.flat.buckets import Bucket, build_buckets
from dgcopt.flat.gradient import GradientBucket, SparseSum
from dgcopt.flat.store import Store

FAST, SLOW = Link(1e-6, 1e12), Link(0.0, 1.0)
SHAPES = [(130,), (40, 33), (5,), (64,), (3, 7, 2, 2)]


class Ranks:
    """Simulated ranks with one bucket, and the sums of their gradients and of their updates."""

    def __init__(
        self, compressor: dgcopt.Compressor, size: int, shapes: list[tuple[int, ...]] = SHAPES, kind: str | None = None
    ) -> None:
        self.compressor, self.size, self.step, self.shapes, self.kind = compressor, size, 0, shapes, kind
        self.whole = self.certain = False
        self.stores = [Store() for _ in range(size)]
        self.given = self.applied = torch.zeros(0)
        self.link = Link()
        self.begin()

    def begin(self) -> None:
        """Build new buckets."""
        named = [(f"p{i}", torch.nn.Parameter(torch.zeros(s, dtype=torch.float64))) for i, s in enumerate(self.shapes)]
        self.buckets: list[Bucket] = []
        self.contexts: list[Context] = []
        for rank, store in enumerate(self.stores):
            store.release()
            (bucket,) = build_buckets(named, lambda name, param: self.kind, 2**40, 2**40, None, GradientBucket)
            place = Place(rank, self.size, "sum", self.step, self.kind, bucket.segments, link=self.link)
            self.contexts.append(Context(place, store.adopt(bucket)))
            self.buckets.append(bucket)
        if not self.given.numel():
            self.given, self.applied = torch.zeros(bucket.numel).double(), torch.zeros(bucket.numel).double()

    def gradients(self, seed: int) -> list[Tensor]:
        flats = []
        for rank, bucket in enumerate(self.buckets):
            generator = torch.Generator().manual_seed(1000 * seed + rank)
            flat = bucket.empty()
            for segment in bucket.segments:
                drawn = torch.randn(segment.numel, generator=generator, dtype=torch.float64)
                flat[segment.start : segment.stop] = (drawn**3).clamp(-3, 3).round() if self.whole else drawn**3
            flats.append(flat)
        return flats

    def exchange(self, grads: list[Tensor], used: list[bool] | None = None, void: bool = False) -> Tensor:
        """Run one step; return the sum that all ranks apply."""
        exchanges = []
        for context, grad in zip(self.contexts, grads, strict=True):
            context.begin(self.step, self.certain and used is None and not void)
            exchanges.append(self.compressor.exchange(grad.clone(), context))
        flats = [
            result.add_to(bucket.empty()) if isinstance(result, SparseSum) else result
            for result, bucket in zip(dgcopt.simulate(exchanges), self.buckets, strict=True)
        ]
        assert all(torch.equal(flat, flats[0]) for flat in flats), "ranks apply other bits"
        if void:
            for context in self.contexts:
                context.rollback()
            return flats[0]
        for context in self.contexts:
            context.commit(used)
        self.step += 1
        for segment, there in zip(self.buckets[0].segments, used or [True] * len(self.shapes), strict=True):
            span = slice(segment.start, segment.stop)
            self.applied[span] += flats[0][span] * there
            self.given[span] += sum(grad[span] for grad in grads) * there
        return flats[0]

    def memory(self) -> list[dict[str, dict[str, Tensor]]]:
        return [store.memory() for store in self.stores]

    def assert_nothing_is_lost(self, tolerance: float = 1e-9) -> None:
        """Assert that applied values and all residuals add up to the gradients."""
        left = torch.zeros_like(self.given)
        for memory in self.memory():
            for kind in memory:
                for segment in self.buckets[0].segments if kind.startswith("residual") else ():
                    left[segment.start : segment.stop] += memory[kind].get(segment.name, torch.zeros(1)).reshape(-1)
        tolerance = 0.0 if self.whole else tolerance
        torch.testing.assert_close(self.applied + left, self.given, rtol=tolerance, atol=tolerance)
