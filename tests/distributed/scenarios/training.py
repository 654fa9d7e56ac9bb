"""Small trainings that can be run by one process on the whole batch, by real ranks, and by simulated ranks."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

import dgcopt
from dgcopt import Comm
from dgcopt.collectives import AllGather

ROWS = 16
TINY = {"bucket_mb": 0.0005, "first_bucket_mb": 0.0001}
"""Buckets of 524 and 104 bytes: every matrix has its own."""


def generator(*key: int) -> torch.Generator:
    return torch.Generator().manual_seed(sum(part * 1009**place for place, part in enumerate(key)))


def make_model(dtype: torch.dtype = torch.float64, bias: bool = True, seed: int = 1) -> nn.Module:
    model = nn.Sequential(
        nn.Linear(6, 17, bias), nn.Tanh(), nn.Linear(17, 9, bias), nn.Tanh(), nn.Linear(9, 4, bias)
    ).to(dtype)
    with torch.no_grad():
        for place, param in enumerate(model.parameters()):
            param.copy_(torch.randn(param.shape, generator=generator(seed, place), dtype=torch.float64) / 3)
    return model


def batch(step: int, micro: int, comm: Comm | None, dtype: torch.dtype = torch.float64) -> tuple[Tensor, Tensor]:
    """This rank's rows of the step's batch; all of them without a comm."""
    x = torch.randn(ROWS, 6, generator=generator(step, micro, 7), dtype=torch.float64).to(dtype)
    y = torch.randn(ROWS, 4, generator=generator(step, micro, 8), dtype=torch.float64).to(dtype)
    return (x, y) if comm is None else (x[comm.rank :: comm.size], y[comm.rank :: comm.size])


@dataclass(frozen=True)
class Recipe:
    """How to train. `accumulate` counts backward passes per step, by backward_passes_per_step or by no_sync()."""

    optimizer: Callable[[Iterable[tuple[str, Tensor]]], Optimizer]
    model: Callable[[], nn.Module] = make_model
    compression: dgcopt.compressors.Compressor | None = None
    schedule: Callable[[Optimizer], Any] | None = None
    schedule_first: bool = False
    accumulate: int = 1
    no_sync: bool = False
    closure: bool = False
    set_to_none: bool = True
    buckets: tuple[tuple[str, float], ...] = ()


class Replica:
    """One rank's training, or the whole batch's where `comm` is None."""

    def __init__(self, recipe: Recipe, comm: Comm | None = None) -> None:
        self.recipe, self.comm = recipe, comm
        self.model = recipe.model()
        self.dtype = next(self.model.parameters()).dtype
        self.optimizer = recipe.optimizer(self.model.named_parameters())
        make_schedule = recipe.schedule or (lambda optimizer: None)
        if recipe.schedule_first:
            self.schedule = make_schedule(self.optimizer)
        if comm is not None:
            dgcopt.DistributedOptimizer(
                self.optimizer,
                self.model.named_parameters(),
                recipe.compression,
                1 if recipe.no_sync else recipe.accumulate,
                comm=comm,
                **dict(recipe.buckets),
            )
        if not recipe.schedule_first:
            self.schedule = make_schedule(self.optimizer)

    @property
    def parameters(self) -> list[Tensor]:
        return list(self.model.parameters())

    def loss(self, step: int, micro: int) -> Tensor:
        x, y = batch(step, micro, self.comm, self.dtype)
        return nn.functional.mse_loss(self.model(x), y)

    def backward(self, step: int) -> Tensor:
        self.optimizer.zero_grad(self.recipe.set_to_none)
        total = torch.zeros(())
        for micro in range(self.recipe.accumulate):
            last = micro == self.recipe.accumulate - 1
            quiet = self.comm is not None and self.recipe.no_sync and not last
            with self.optimizer.no_sync() if quiet else nullcontext():  # type: ignore[attr-defined]
                loss = self.loss(step, micro)
                loss.backward()
            total = total + loss.detach()
        return total

    def step(self, step: int) -> None:
        if self.recipe.closure:
            self.optimizer.step(lambda: self.backward(step))  # type: ignore[arg-type, return-value]
        else:
            self.optimizer.step()
        if self.schedule is not None:
            self.schedule.step()


def train(replicas: Sequence[Replica], steps: Iterable[int]) -> None:
    """Every rank's backward first, then every rank's step."""
    for step in steps:
        for replica in replicas:
            if not replica.recipe.closure:
                replica.backward(step)
        for replica in replicas:
            replica.step(step)


def assert_close(actual: Sequence[Tensor], expected: Sequence[Tensor], tolerance: float, what: str) -> None:
    for place, (here, there) in enumerate(zip(actual, expected, strict=True)):
        torch.testing.assert_close(
            here, there, rtol=tolerance, atol=tolerance, msg=lambda text, place=place: f"{what}, tensor {place}: {text}"
        )


def fingerprint(tensors: Iterable[Tensor]) -> str:
    """A hash of all bits of the tensors, their shapes and dtypes."""
    digest = hashlib.sha256()
    for tensor in tensors:
        digest.update(f"{tensor.dtype} {tuple(tensor.shape)}".encode())
        digest.update(bytes(tensor.detach().contiguous().reshape(-1).view(torch.uint8).tolist()))
    return digest.hexdigest()


def gather_text(comm: Comm, text: str) -> list[str]:
    """A string of 64 characters from every rank."""
    assert len(text) == 64
    rows = comm.run(AllGather(torch.frombuffer(bytearray(text.encode()), dtype=torch.uint8), label="fingerprints"))
    return [bytes(row.tolist()).decode() for row in rows]


def assert_same_on_all_ranks(comm: Comm, tensors: Iterable[Tensor], what: str) -> str:
    hashes = gather_text(comm, fingerprint(tensors))
    differing = [rank for rank, other in enumerate(hashes) if other != hashes[0]]
    assert not differing, f"{what}: rank(s) {differing} have other bits than rank 0"
    return hashes[0]


def tensors_in(value: Any) -> list[Tensor]:
    """All tensors of a nest of dicts and lists, in order."""
    if isinstance(value, Tensor):
        return [value]
    if isinstance(value, dict):
        return [tensor for item in value.values() for tensor in tensors_in(item)]
    if isinstance(value, list | tuple):
        return [tensor for item in value for tensor in tensors_in(item)]
    return []


def memory_of(optimizer: Optimizer) -> dict[str, dict[str, Tensor]]:
    """What this rank holds back, by kind and parameter name."""
    return optimizer.state_dict()["dgcopt"]["memory"]


@contextmanager
def refused(comm: Comm, kind: type[Exception], *words: str) -> Iterator[None]:
    """Assert that the block raises an error of a kind, whose text contains all `words`."""
    try:
        yield
    except kind as error:
        for part in words:
            assert part in str(error), f"does not say {part!r}: {error}"
    else:
        raise AssertionError(f"rank {comm.rank}: no {kind.__name__}")
