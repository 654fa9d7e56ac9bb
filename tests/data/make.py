"""Writes the files beside it, which tests/unit/test_kept_formats.py reads with newer code. See README.md.

    git worktree add ../old 0b829fe && OMP_NUM_THREADS=1 PYTHONPATH=../old python tests/data/make.py [FOLDER]

The tests take the runs from here, so only what dgcopt's users may call is called, but for `main`, which writes.
Weights, gradients and settings are sums of few powers of two: where nothing takes a root, five steps of float32 round
nothing, and every processor gets the same bits.
"""

from __future__ import annotations

import functools
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel as DDP

import dgcopt

BEFORE, AFTER = 3, 2
"""Steps until state is written, and steps from there."""


class Net(nn.Module):
    """Two layers that are drawn towards what a batch says: the gradient is their distance from it."""

    def __init__(self) -> None:
        super().__init__()
        shapes = {"first": (12, 16), "first_bias": (12,), "second": (6, 12), "second_bias": (6,)}
        for place, (name, shape) in enumerate(shapes.items()):
            self.register_parameter(name, nn.Parameter(eighths(shape, seed=place)))

    def forward(self, seed: int) -> Tensor:
        away = [param - eighths(param.shape, 1000 * seed + place) for place, param in enumerate(self.parameters())]
        return torch.stack([(distance * distance).sum() for distance in away]).sum() / 2


def eighths(shape: Any, seed: int) -> Tensor:
    return torch.randint(-16, 17, tuple(shape), generator=torch.Generator().manual_seed(seed)) / 8


def sgd(model: nn.Module) -> torch.optim.SGD:
    return torch.optim.SGD(model.parameters(), lr=0.5, momentum=0.5)


def weights(model: nn.Module) -> Tensor:
    return nn.utils.parameters_to_vector(model.parameters()).detach()


# -- simulated ranks ---------------------------------------------------------------------------------------------------


def compressed(make: Callable[[], dgcopt.Compressor]) -> Callable[..., Any]:
    return lambda optimizer, named, comm: dgcopt.DistributedOptimizer(optimizer, named, make(), comm=comm)


def averaged(make: Callable[[], dgcopt.Averaging]) -> Callable[..., Any]:
    return lambda optimizer, named, comm: make().attach(optimizer, named, comm)


outer = functools.partial(torch.optim.SGD, lr=0.5, momentum=0.5)
WRAP: dict[str, Callable[..., Any]] = {
    "dgc": compressed(lambda: dgcopt.DGC(0.1, warmup=dgcopt.Warmup((0.5, 0.25), steps=2))),
    "powersgd": compressed(lambda: dgcopt.PowerSGD(2, start_step=1)),
    "local_sgd": averaged(lambda: dgcopt.LocalSGD(2)),
    "slowmo": averaged(lambda: dgcopt.SlowMo(2, momentum=0.5, base=dgcopt.LocalSGD(1))),
    "diloco": averaged(lambda: dgcopt.DiLoCo(2, outer, dgcopt.DGC(0.25, warmup=None), delay=1)),
    "decentralized": averaged(lambda: dgcopt.Decentralized("shift_one")),
}
"""Of DiLoCo an exchange is under way after three steps."""

OF_ALL = ("dgc", "powersgd")
"""Those whose state every rank may load from the file that rank 0 of a script has saved."""


class World:
    """Simulated ranks, each with a model and its optimizer."""

    def __init__(self, name: str, size: int = 2) -> None:
        self.comms = dgcopt.simulated_world(size)
        self.models = [Net() for _ in self.comms]
        self.optimizers = [
            WRAP[name](sgd(model), list(model.named_parameters()), comm)
            for model, comm in zip(self.models, self.comms, strict=True)
        ]

    def train(self, first: int, steps: int) -> World:
        for step in range(first, first + steps):
            for rank, (model, optimizer) in enumerate(zip(self.models, self.optimizers, strict=True)):
                optimizer.zero_grad()
                model(10 * step + rank).backward()
            for optimizer in self.optimizers:
                optimizer.step()
        return self

    def states(self) -> list[dict[str, Any]]:
        both = zip(self.models, self.optimizers, strict=True)
        return [{"model": model.state_dict(), "optimizer": optimizer.state_dict()} for model, optimizer in both]

    def continued(self, states: list[dict[str, Any]]) -> Tensor:
        """All ranks' weights, a row for each, two steps from these states."""
        for model, optimizer, state in zip(self.models, self.optimizers, states, strict=True):
            model.load_state_dict(state["model"])
            optimizer.load_state_dict(state["optimizer"])
        self.train(BEFORE, AFTER)
        return torch.stack([weights(model) for model in self.models])


# -- the hook, in real processes ---------------------------------------------------------------------------------------


class Hooked:
    """This rank's replica in DDP, with a hook made anew or one that was read from a file."""

    def __init__(self, state: Any = None) -> None:
        self.model = Net()
        self.ddp = DDP(self.model)
        self.optimizer = sgd(self.model)
        made = dgcopt.DGC(0.1, clip=dgcopt.LocalClip(16.0), warmup=dgcopt.Warmup((0.5, 0.25), steps=2))
        self.state, hook = dgcopt.ddp_hook(made if state is None else state, self.optimizer)
        self.ddp.register_comm_hook(self.state, hook)

    def train(self, first: int, steps: int) -> Hooked:
        for step in range(first, first + steps):
            self.optimizer.zero_grad()
            self.ddp(10 * step + dist.get_rank()).backward()
            self.optimizer.step()
        return self


def continued_hook(file: Path) -> Tensor:
    """This rank's weights, two steps from what the file holds."""
    saved = torch.load(file, weights_only=False)
    again = Hooked(saved["hook"])
    again.model.load_state_dict(saved["model"])
    again.optimizer.load_state_dict(saved["optimizer"])
    return weights(again.train(BEFORE, AFTER).model)


def write_hook(rank: int, store: str, folder: Path) -> None:
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=2)
    run = Hooked().train(0, BEFORE)
    saved = {"hook": run.state, "model": run.model.state_dict(), "optimizer": run.optimizer.state_dict()}
    torch.save(saved, folder / f"rank-{rank}.pt")
    there = weights(run.train(BEFORE, AFTER).model)
    assert torch.equal(continued_hook(folder / f"rank-{rank}.pt"), there)
    if rank == 0:
        torch.save(there, folder / "after.pt")
    dist.barrier()
    dgcopt.shutdown()
    dist.destroy_process_group()


# -- writing -----------------------------------------------------------------------------------------------------------


def main(folder: Path) -> None:
    for name in WRAP:
        world, after = World(name).train(0, BEFORE), {}
        there = folder / name
        saves = [
            dgcopt.checkpoint._save(there, state, BEFORE, comm, 1)
            for state, comm in zip(world.states(), world.comms, strict=True)
        ]
        dgcopt.simulate(saves, world.comms)
        for size in (2, 1, 3):  # beside each other, as they continue from the checkpoint
            after[size] = World(name, size).continued(read(there, size))
        if name in OF_ALL:
            torch.save(world.states()[0], there / "alone.pt")
            after["alone"] = World(name).continued([torch.load(there / "alone.pt") for _ in world.comms])
        torch.save(after, there / "after.pt")
        world.train(BEFORE, AFTER)
        assert torch.equal(after[2], torch.stack([weights(model) for model in world.models])), name
    (folder / "hook").mkdir(exist_ok=True)
    with tempfile.TemporaryDirectory() as place:
        torch.multiprocessing.spawn(write_hook, (f"{place}/store", folder / "hook"), 2)


def read(folder: Path, size: int) -> list[dict[str, Any]]:
    """What `checkpoint.load` gives each of `size` ranks."""
    comms = dgcopt.simulated_world(size)
    found: Any = dgcopt.simulate([dgcopt.checkpoint._load(folder, comm) for comm in comms], comms)
    assert all(step == BEFORE for step, _ in found)
    return [state for _, state in found]


if __name__ == "__main__":
    main(Path(sys.argv[1]) if len(sys.argv) > 1 else Path(__file__).parent)
