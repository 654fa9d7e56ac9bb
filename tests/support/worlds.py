"""Small models on N simulated ranks, exchanges in lockstep, and what is compared of them."""

from __future__ import annotations

import math
from collections.abc import Callable, Generator, Iterable, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import SGD, Optimizer

import dgcopt
from dgcopt import Comm, ConfigError
from dgcopt.collectives import Collective
from dgcopt.compressors import Context, Memory, Place
from dgcopt.flat.buckets import Bucket, build_buckets
from dgcopt.flat.gradient import GradientBucket

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
    (bucket,) = build_buckets(named, lambda name, param: kind, 2**40, 2**40, None, GradientBucket)
    return bucket


def context_of(bucket: Bucket, rank: int, size: int, step: int = 0) -> Context:
    return Context(Place(rank, size, "average", step, bucket.kind, bucket.segments), Memory(bucket.segments))


def flat_gradient(model: nn.Module) -> torch.Tensor:
    grads = [torch.zeros_like(param) if param.grad is None else param.grad for param in model.parameters()]
    return torch.cat([grad.flatten() for grad in grads])


def flat_memory(model: nn.Module, by_name: dict[str, torch.Tensor]) -> torch.Tensor:
    return torch.cat([by_name.get(name, torch.zeros_like(p)).flatten() for name, p in model.named_parameters()])


def together(
    size: int, exchange_of: Callable[[Comm], Generator[Collective, Tensor, Any]], catch: type[Exception] = ConfigError
) -> list[Any]:
    """What came of an exchange on each of `size` ranks in lockstep: its result, or its error where it is a `catch`.

    Fails if a rank ends while others go on, which on a real wire would be a hang.
    """
    comms = dgcopt.simulated_world(size)
    exchanges = [exchange_of(comm) for comm in comms]
    outcomes: list[Any] = [None] * size
    received: Sequence[Any] = [None] * size
    while True:
        started, ended = [], []
        for comm, exchange, tensor in zip(comms, exchanges, received, strict=True):
            try:
                started.append((comm, comm.start(exchange.send(tensor))))
            except StopIteration as stop:
                outcomes[comm.rank] = stop.value
                ended.append(comm.rank)
            except catch as error:
                outcomes[comm.rank] = error
                ended.append(comm.rank)
        assert not ended or not started, f"ranks {ended} ended while the others go on: {outcomes}"
        if ended:
            return outcomes
        received = [comm.wait(handle) for comm, handle in started]


def raw(tensor: Tensor) -> bytes:
    return bytes(tensor.detach().resolve_conj().contiguous().reshape(-1).view(torch.uint8).tolist())


def same(one: Any, other: Any) -> bool:
    """Equal to the bit and of the same types."""
    if type(one) is not type(other):
        return False
    if isinstance(one, Tensor):
        return one.dtype == other.dtype and one.shape == other.shape and raw(one) == raw(other)
    if isinstance(one, dict):
        return len(one) == len(other) and all(
            same(here, there) for here, there in zip(one.items(), other.items(), strict=True)
        )
    if isinstance(one, list | tuple):
        return len(one) == len(other) and all(same(v, w) for v, w in zip(one, other, strict=True))
    if isinstance(one, float):
        return (math.isnan(one) and math.isnan(other)) or (
            one == other and math.copysign(1, one) == math.copysign(1, other)
        )
    return one == other


def momentum_sgd(params) -> SGD:
    return SGD(params, lr=0.1, momentum=0.9)


def weights_after(steps: int = 3, make=momentum_sgd, size: int = 2, **settings) -> list[torch.Tensor]:
    ranks = Ranks(size, make, **settings)
    for seed in range(steps):
        ranks.step(seed)
        ranks.assert_replicas_equal()
    return ranks.weights()


def assert_close(ours, theirs, tolerance: float = 1e-12) -> None:
    for x, y in zip(ours, theirs, strict=True):
        torch.testing.assert_close(x, y, rtol=tolerance, atol=tolerance)
