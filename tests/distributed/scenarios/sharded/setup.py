"""Meshes, models, their shards and their recorded gradients, which scenarios share."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.optim import Optimizer

import dgcopt
from dgcopt import Comm
from dgcopt.collectives import AllGather, Collective
from dgcopt.comm import Handle
from dgcopt.compressors import Compressor
from dgcopt.flat.optimizer_state import STATE_KEY
from dgcopt.gradients.synchronised import synchronised

Scenario = Callable[[Comm], Any]


TOLERANCE = 1e-6

NAMES = ("replicate", "shard")


def mesh_of(comm: Comm, replicas: int, names: tuple[str, str] = NAMES) -> DeviceMesh:
    """Return a mesh that scenarios share: Gloo's threads wake up a hundred times a second for each group of another."""
    return _meshes(replicas, comm.size // replicas, names)


@functools.cache
def _meshes(replicas: int, shards: int, names: tuple[str, str]) -> DeviceMesh:
    return init_device_mesh("cpu", (replicas, shards), mesh_dim_names=names)


class Net(nn.Module):
    """Uneven layers: one with a tied weight, one frozen, and one used on request."""

    def __init__(self) -> None:
        super().__init__()
        with torch.random.fork_rng():
            torch.manual_seed(3)
            self.first = nn.Linear(6, 7)
            self.second = nn.Linear(7, 7)
            self.tied = nn.Linear(7, 7, bias=False)
            self.frozen = nn.Linear(7, 5).requires_grad_(False)
            self.extra = nn.Linear(7, 5)
            self.last = nn.Linear(5, 1)
        self.tied.weight = self.second.weight

    def forward(self, x: Tensor, extra: bool = True) -> Tensor:
        x = torch.tanh(self.second(torch.tanh(self.first(x))))
        x = self.tied(x)
        return self.last(torch.tanh(self.frozen(x) + (self.extra(x) if extra else 0)))


class Wide(nn.Sequential):
    def __init__(self) -> None:
        with torch.random.fork_rng():
            torch.manual_seed(5)
            super().__init__(nn.Linear(6, 41), nn.Tanh(), nn.Linear(41, 30), nn.Tanh(), nn.Linear(30, 1))


def large() -> nn.Module:
    with torch.random.fork_rng():
        torch.manual_seed(5)
        return nn.Sequential(nn.Linear(6, 512), nn.Linear(512, 256), nn.Linear(256, 1))


def sharded(mesh: DeviceMesh, model: nn.Module | None = None, **settings: Any) -> Any:
    """Shard a model: each layer is a group of FSDP2; tied layers are in the root's group."""
    model = Net() if model is None else model
    for layer in (model.first, model.frozen, model.extra, model.last) if isinstance(model, Net) else model.children():
        fully_shard(layer, mesh=mesh, **settings)
    return fully_shard(model, mesh=mesh, **settings)


def batch(step: int, rank: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(1000 * step + rank)
    return torch.randn(8, 6, generator=generator), torch.randn(8, 1, generator=generator)


def loss_of(model: nn.Module, comm: Comm, step: int, **kwargs: Any) -> Tensor:
    x, y = batch(step, comm.rank)
    return nn.functional.mse_loss(model(x, **kwargs), y)


def wrap(
    model: nn.Module,
    optimizer: Optimizer,
    mesh: Mapping[str, DeviceMesh] | DeviceMesh | None,
    compressor: Compressor | None = None,
    **settings: Any,
) -> Any:
    replicate = None if mesh is None else mesh["replicate"]
    settings = {"bucket_mb": 1e-4, "first_bucket_mb": 1e-5, **settings}
    return dgcopt.DistributedOptimizer(optimizer, model.named_parameters(), compressor, mesh=replicate, **settings)


def whole(model: nn.Module) -> dict[str, Tensor]:
    return {name: param.detach().full_tensor() for name, param in model.named_parameters()}


def local_of(param: Tensor) -> Tensor:
    with torch.no_grad():
        shard: Tensor = param.to_local()
    return shard.detach()


def assert_close(ours: dict[str, Tensor], theirs: dict[str, Tensor], tolerance: float, what: str) -> None:
    for name, tensor in ours.items():
        torch.testing.assert_close(
            tensor, theirs[name], rtol=0, atol=tolerance, msg=lambda m, n=name: f"{what} {n}: {m}"
        )


def memory_of(optimizer: Any) -> dict[str, dict[str, Tensor]]:
    memory: dict[str, dict[str, Tensor]] = optimizer.state_dict()[STATE_KEY]["memory"]
    return memory


def same_memory(one: dict[str, dict[str, Tensor]], other: dict[str, dict[str, Tensor]]) -> bool:
    pairs = [(kept, other.get(kind, {}).get(name)) for kind, by in one.items() for name, kept in by.items()]
    return bool(pairs) and all(new is not None and torch.equal(old, new) for old, new in pairs)


def gathered(comm: Comm, steps: Sequence[Mapping[str, Tensor]], ranks: Iterable[int]) -> list[dict[str, list[Tensor]]]:
    """Return the flat tensors of some ranks, by step and name; a collective call. Names are alike on all ranks."""
    tensors = [of_step[name].flatten() for of_step in steps for name in sorted(of_step)]
    lengths = comm.run(AllGather(torch.tensor([len(tensor) for tensor in tensors]), label="lengths"))
    padded = torch.zeros(int(lengths.sum(1).max()))
    padded[: sum(map(len, tensors))] = torch.cat(tensors)
    rows = comm.run(AllGather(padded, label="gradients"))
    parts = zip(*(rows[r][: int(lengths[r].sum())].split(lengths[r].tolist()) for r in ranks), strict=True)
    found = [{name: [*next(parts)] for name in sorted(of_step)} for of_step in steps]
    return [{name: by_name[name] for name in of_step} for of_step, by_name in zip(steps, found, strict=True)]


def joined(
    comm: Comm, steps: Sequence[Mapping[str, Tensor]], wholes: Mapping[str, Tensor], shards: int
) -> list[dict[str, list[Tensor]]]:
    """Return each replica's whole tensors in the shapes of `wholes`, by step and name; a collective call."""
    return [
        {
            name: [torch.cat(parts[r : r + shards]).view(wholes[name].shape) for r in range(0, comm.size, shards)]
            for name, parts in of_step.items()
        }
        for of_step in gathered(comm, steps, range(comm.size))
    ]


class Recorder:
    """The gradients of this rank's shards in each step, in the order in which they become ready.

    It must come before the wrapper, which exchanges them in the same hooks.
    """

    def __init__(self, model: nn.Module) -> None:
        self.named = {name: param for name, param in model.named_parameters() if param.requires_grad}
        self.start = {name: local_of(param).clone() for name, param in self.named.items()}
        self.steps: list[dict[str, Tensor]] = []
        for name, param in self.named.items():
            param.register_post_accumulate_grad_hook(functools.partial(self._record, name))

    def _record(self, name: str, param: Tensor) -> None:
        assert param.grad is not None
        self.steps[-1][name] = local_of(param.grad).clone()


@contextmanager
def started_by(optimizer: Any) -> Iterator[list[str]]:
    """Record the gradient collectives that an optimizer starts inside the context."""
    part = synchronised(optimizer)
    assert part is not None
    comm, started = part.comm, list[str]()
    start = comm.start

    def spy(collective: Collective) -> Handle:
        if collective.group == "world":
            started.append(collective.describe())
        return start(collective)

    comm.start = spy  # type: ignore[method-assign]
    try:
        yield started
    finally:
        del comm.start  # type: ignore[method-assign]


def scenarios_of(*functions: Scenario) -> dict[str, Scenario]:
    """Return functions as scenarios under their own names."""
    return {f"sharded: {function.__name__}": function for function in functions}
