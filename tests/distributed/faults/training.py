"""Small trainings that are judged without dgcopt: by hashes of parameters and memory, and by accounts in float64."""

from __future__ import annotations

import copy
import functools
import hashlib
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

import dgcopt
from dgcopt import DGC, Comm

STEPS = 8
PARAMETERS = ("embed.weight", "body.0.weight", "body.0.bias", "body.2.weight", "body.2.bias")
TINY = {"bucket_mb": 0.0004, "first_bucket_mb": 0.0001}
Fault = dict[str, Any]
Problems = list[tuple[str, str]]

RECIPES: dict[str, tuple[Callable[..., torch.optim.Optimizer], dict[str, Any]]] = {
    "plain": (functools.partial(torch.optim.SGD, lr=0.1), {"compression": DGC(0.05, overlap=True)}),
    "momentum": (
        functools.partial(torch.optim.SGD, lr=0.05, momentum=0.9),
        {"compression": DGC(0.05, momentum_masking=False, overlap=True)},
    ),
    "masked": (
        functools.partial(torch.optim.SGD, lr=0.05, momentum=0.9, weight_decay=0.01),
        {"compression": DGC(0.05, values="fp16", overlap=True), "sparse_as_dense": True},
    ),
    "adam": (
        functools.partial(torch.optim.Adam, lr=0.01),
        {"compression": DGC(0.05, source="gradient", overlap=True), "sparse_as_dense": True},
    ),
    "updates": (functools.partial(torch.optim.Adam, lr=0.01), {"compression": DGC(0.05), "sparse_as_dense": True}),
    "in place": (
        functools.partial(torch.optim.SGD, lr=0.05, momentum=0.9),
        {"compression": DGC(0.05, momentum_masking=False, overlap=False)},
    ),
    "owner": (
        functools.partial(torch.optim.SGD, lr=0.05, momentum=0.9),
        {"compression": DGC(0.05, momentum_masking=False, overlap=True, reduce="owner")},
    ),
    "owner, coded": (
        functools.partial(torch.optim.SGD, lr=0.05, momentum=0.9),
        {"compression": DGC.compact(0.05, warmup=None, momentum_masking=False, overlap=True, reduce="owner")},
    ),
    "partition": (
        functools.partial(torch.optim.SGD, lr=0.05, momentum=0.9),
        {"compression": DGC(0.05, momentum_masking=False, overlap=True, reduce="partition")},
    ),
    "auto": (
        functools.partial(torch.optim.SGD, lr=0.05, momentum=0.9),
        {"compression": DGC(0.05, momentum_masking=False, overlap=True, reduce="auto")},
    ),
}
"""How to train."""

CORRECTED = ("momentum", "in place", "owner", "owner, coded", "partition", "auto")
"""Where what was computed is momentum, of which nothing is dropped."""

KEEPS_THE_GRADIENT = ("updates", "in place")
"""Where a step that the wire has lost leaves its gradient in memory, to be applied with the next."""

BITS_ONLY = ("masked", "updates")
"""Masking drops momentum on purpose, and the books know nothing of updates: no sums are compared."""


class Model(nn.Module):
    """An embedding with sparse gradients, matrices that are compressed, and vectors that are not."""

    def __init__(self, width: int = 16) -> None:
        super().__init__()
        self.embed = nn.Embedding(12, 6, sparse=True)
        self.body = nn.Sequential(nn.Linear(6, width), nn.Tanh(), nn.Linear(width, 4))
        generator = torch.Generator().manual_seed(3)
        with torch.no_grad():
            for param in self.parameters():
                param.copy_(torch.randn(param.shape, generator=generator) / 2)

    def forward(self, words: Tensor) -> Tensor:
        return self.body(self.embed(words).mean(1))


def digest(value: Any) -> str:
    """A hash of every bit of the tensors in a nest of dicts and lists, and of where they are."""
    found = hashlib.sha256()

    def walk(value: Any, path: str) -> None:
        if isinstance(value, Tensor):
            found.update(f"{path} {value.dtype} {tuple(value.shape)}".encode())
            dense = value.detach().to_dense() if value.layout != torch.strided else value.detach()
            found.update(dense.contiguous().flatten().view(torch.uint8).numpy().tobytes())
        items = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
        for key, item in sorted(items, key=lambda pair: str(pair[0])):
            walk(item, f"{path}/{key}")

    walk(value, "")
    return found.hexdigest()[:16]


class Rank:
    """One rank's training, and its own books: what it computed, and what was applied in all."""

    def __init__(self, comm: Comm, recipe: str, odd: str = "") -> None:
        self.comm, self.recipe = comm, recipe
        make, settings = RECIPES[recipe]
        settings = {**TINY, **settings}
        self.model = Model(17 if odd == "wrong shape" else 16)
        if odd == "wrong dtype":
            self.model.double()
        if odd == "other optimizer":
            make, settings["sparse_as_dense"] = torch.optim.AdamW, settings.get("sparse_as_dense", False)
        if odd == "frozen parameter":
            self.model.body[2].bias.requires_grad_(False)
        settings |= {
            "other ratio": {"compression": DGC(0.06)},
            "other compression": {"compression": dgcopt.FP16()},
            "other op": {"op": "sum"},
            "other buckets": {"bucket_mb": 0.0008},
            "other passes": {"backward_passes_per_step": 2},
        }.get(odd, {})
        params = list(self.model.parameters())
        named = list(self.model.named_parameters())
        if odd == "fewer parameters":
            params, named = params[:-1], named[:-1]
        self.optimizer: Any = make(params)
        if odd == "one more group":
            named.append(("extra", nn.Parameter(torch.ones(3))))
            self.optimizer.add_param_group({"params": [named[-1][1]]})
        dgcopt.DistributedOptimizer(self.optimizer, named, comm=comm, **settings)
        self.books = {
            kind: {name: torch.zeros(param.shape, dtype=torch.float64) for name, param in self.model.named_parameters()}
            for kind in ("computed", "applied", "momentum")
        }

    def backward(self, step: int, disturb: Callable[[str], None] = lambda moment: None) -> None:
        """A batch of this rank's own, telling `disturb` when it is the moment for mischief."""
        self.optimizer.zero_grad()
        generator = torch.Generator().manual_seed(1000 * step + self.comm.rank)
        words = torch.randint(12, (8, 3), generator=generator)
        targets = torch.randn(8, 4, generator=generator)
        disturb("before backward")
        out = self.model(words)
        nn.functional.mse_loss(out, targets.to(out.dtype)).backward()
        disturb("after backward")
        named = self.model.named_parameters()
        self.local = {name: param.grad.to_dense().double() for name, param in named if param.grad is not None}

    def apply(self, void: bool = False) -> None:
        """The rest of the step; the books are kept unless it must be `void`."""
        self.optimizer.synchronize()
        for name, param in self.model.named_parameters() if not void else ():
            if name in self.local and param.grad is not None:
                # sparse gradients travel whole, and get their momentum after the exchange
                factor = 0.9 if self.recipe in CORRECTED and not param.grad.is_sparse else 0.0
                self.books["momentum"][name].mul_(factor).add_(self.local[name])
                self.books["computed"][name] += self.books["momentum"][name]
                self.books["applied"][name] += self.comm.size * param.grad.to_dense().double()

    def finish(self) -> None:
        with self.optimizer.skip_synchronize():
            self.optimizer.step()

    def state(self) -> dict[str, Any]:
        return copy.deepcopy(
            {"model": self.model.state_dict(), "optimizer": self.optimizer.state_dict(), "books": self.books}
        )

    def put_back(self, state: dict[str, Any]) -> None:
        state = copy.deepcopy(state)
        self.model.load_state_dict(state["model"])
        self.optimizer.load_state_dict(state["optimizer"])
        self.books = state["books"]

    def digests(self) -> tuple[str, str]:
        """Hashes of what is equal on all ranks, and of what this rank alone holds."""
        return digest(self.model.state_dict()), digest(self.optimizer.state_dict())

    def mass(self) -> dict[str, list[float]]:
        """What was computed here and is not held back, and what was applied: over all ranks they must be equal."""
        memory = self.optimizer.state_dict()["dgcopt"]["memory"]
        residuals = [by_name for kind, by_name in memory.items() if kind.startswith("residual")]
        gone = [self.books["computed"][n] - sum(held.get(n, 0.0) for held in residuals) for n in PARAMETERS]
        return {
            "gone": torch.cat([tensor.flatten() for tensor in gone]).tolist(),
            "applied": torch.cat([self.books["applied"][name].flatten() for name in PARAMETERS]).tolist(),
        }


class Team:
    """The ranks that this process runs: one of real ones, or all simulated ones, who take turns."""

    def __init__(self, comms: Sequence[Comm], recipe: str, fault: Fault | None = None) -> None:
        odd = fault or {"rank": -1, "what": ""}
        self.ranks = [Rank(comm, recipe, odd["what"] if comm.rank == odd["rank"] else "") for comm in comms]

    def step(self, step: int, disturb: Callable[[Rank, str], None] = lambda rank, moment: None, **how: Any) -> None:
        for rank in self.ranks:
            rank.backward(step, functools.partial(disturb, rank))
        for rank in self.ranks:
            rank.apply(**how)
        for rank in self.ranks:
            disturb(rank, "before step")
            rank.finish()

    def digests(self) -> list[tuple[str, str]]:
        return [rank.digests() for rank in self.ranks]


def undisturbed(comms: Sequence[Comm], recipe: str, steps: int) -> list[list[tuple[str, str]]]:
    """The digests after every step of a training that nothing happens to."""
    team = Team(comms, recipe)
    digests = [team.digests()]
    for step in range(steps):
        team.step(step)
        digests.append(team.digests())
    return digests
