"""Small models on N simulated ranks, for the tests."""

from __future__ import annotations

from collections.abc import Callable, Iterable

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

import dgcopt
from dgcopt.compressors import Context
from dgcopt.flat.buckets import Bucket, build_buckets

MakeOptimizer = Callable[[Iterable[Tensor]], Optimizer]


def small_model(dtype: torch.dtype = torch.float64) -> nn.Module:
    torch.manual_seed(1)
    return nn.Sequential(nn.Linear(12, 30), nn.Tanh(), nn.Linear(30, 20), nn.Tanh(), nn.Linear(20, 5)).to(dtype)


def small_batch(rows: int = 24, dtype: torch.dtype = torch.float64, seed: int = 0) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    inputs = torch.randn(rows, 12, generator=generator, dtype=dtype)
    return inputs, torch.randint(5, (rows,), generator=generator)


class Ranks:
    """N replicas of a model, each with its distributed optimizer, stepped in turn."""

    def __init__(self, size: int, make: MakeOptimizer, model=small_model, nodes: int = 1, **settings) -> None:
        self.comms = dgcopt.simulated_world(size, nodes)
        self.models = [model() for _ in range(size)]
        self.optimizers = [
            dgcopt.DistributedOptimizer(make(model.parameters()), model.named_parameters(), comm=comm, **settings)
            for model, comm in zip(self.models, self.comms, strict=True)
        ]

    def backward(self, seed: int = 0) -> None:
        """One backward pass per rank over its share of a batch."""
        like = next(self.models[0].parameters())
        inputs, targets = (tensor.to(like.device) for tensor in small_batch(seed=seed, dtype=like.dtype))
        size = len(self.models)
        for rank, model in enumerate(self.models):
            nn.functional.cross_entropy(model(inputs[rank::size]), targets[rank::size]).backward()

    def step(self, seed: int = 0) -> None:
        for optimizer in self.optimizers:
            optimizer.zero_grad()
        self.backward(seed)
        for optimizer in self.optimizers:
            optimizer.step()

    def weights(self, rank: int = 0) -> list[Tensor]:
        return [param.detach().clone() for param in self.models[rank].parameters()]

    def assert_replicas_equal(self) -> None:
        for rank in range(1, len(self.models)):
            for ours, first in zip(self.weights(rank), self.weights(0), strict=True):
                assert torch.equal(ours, first), f"rank {rank} drifted away from rank 0"


def single(make: MakeOptimizer, steps: int, model=small_model) -> list[Tensor]:
    """The same training in one process, on whole batches, with the bare optimizer."""
    replica = model()
    optimizer = make(replica.parameters())
    for seed in range(steps):
        inputs, targets = small_batch(seed=seed, dtype=next(replica.parameters()).dtype)
        optimizer.zero_grad()
        nn.functional.cross_entropy(replica(inputs), targets).backward()
        optimizer.step()
    return [param.detach().clone() for param in replica.parameters()]


def bucket_of(tensors: list[Tensor], kind: object = None) -> Bucket:
    """One bucket holding `tensors` as parameters, in this order."""
    named = [(f"t{i}", tensor) for i, tensor in enumerate(tensors)]
    (bucket,) = build_buckets(named, lambda name, param: kind, 2**40, 2**40)
    return bucket


def context_of(bucket: Bucket, rank: int, size: int, step: int = 0) -> Context:
    return Context(rank, size, "average", step, bucket.kind, bucket.segments, bucket.memory)
