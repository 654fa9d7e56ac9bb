"""Averaging of sharded parameters: FSDP2 within a replica, LocalSGD, SlowMo or DiLoCo across replicas."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import SGD, AdamW

import dgcopt
from dgcopt import DGC, Comm, ConfigError, DiLoCo, DivergenceError, LocalSGD
from dgcopt.averaging import Averaging
from dgcopt.collectives import AllGather
from dgcopt.flat.local_shard import local

from ..persistence import shared_folder
from ..training import refused
from .setup import (
    TOLERANCE,
    Net,
    Recorder,
    Wide,
    assert_close,
    gathered,
    joined,
    local_of,
    loss_of,
    mesh_of,
    sharded,
    whole,
    wrap,
)

OUTER = functools.partial(SGD, lr=0.7, momentum=0.9, nesterov=True)

RULES: dict[str, Callable[[], Averaging]] = {
    "LocalSGD": lambda: LocalSGD(every=3),
    "LocalSGD that overlaps": lambda: LocalSGD(every=2, overlap=True),
    "LocalSGD after a warm-up": lambda: LocalSGD(every=3, warmup_steps=3),
    "SlowMo": lambda: dgcopt.SlowMo(every=2),
    "DiLoCo": lambda: DiLoCo(every=3, outer=OUTER),
    "DiLoCo in fragments": lambda: DiLoCo(every=4, outer=OUTER, fragments=2, delay=1, alpha=0.3),
    "DiLoCo, BF16": lambda: DiLoCo(every=2, outer=OUTER, compression=dgcopt.BF16()),
}
"""Rules that take no other element of a parameter into account."""

ADAMW = functools.partial(AdamW, lr=0.01, eps=1e-4)


def as_whole_parameters(name: str, replicas: int, comm: Comm) -> None:
    """Shards become what the same rule makes of whole parameters, given the same gradients."""
    mesh, shards = mesh_of(comm, replicas), comm.size // replicas
    model = sharded(mesh["shard"], Wide())
    recorder = Recorder(model)
    optimizer = RULES[name]().attach(ADAMW(model.parameters()), model.named_parameters(), mesh=mesh["replicate"])
    for step in range(11):
        recorder.steps.append({})
        optimizer.zero_grad()
        loss_of(model, comm, step).backward()
        optimizer.step()
    own = {n: param.detach().full_tensor() for n, param in recorder.named.items()}  # type: ignore[attr-defined]
    distance = optimizer.averaging.consensus_distance()
    with optimizer.averaging.averaged():
        means = whole(model)

    first, *steps = joined(comm, [recorder.start, *recorder.steps], recorder.named, shards)
    start = {n: tensors[0] for n, tensors in first.items()}
    comms = dgcopt.simulated_world(replicas)
    params = [{n: nn.Parameter(tensor.clone()) for n, tensor in start.items()} for _ in comms]
    others = [
        RULES[name]().attach(ADAMW(p.values()), list(p.items()), comm=c) for p, c in zip(params, comms, strict=True)
    ]
    for of_step in steps:
        for place, other in enumerate(others):
            other.zero_grad()
            for n, grads in of_step.items():
                params[place][n].grad = grads[place].clone()
                if (steps_of := dgcopt.gradients.synchronised.synchronised(other)) is not None:
                    steps_of.gradient_arrived(params[place][n])
        for other in others:
            other.step()
    for other in others:
        other.averaging.finish_round()  # type: ignore[attr-defined]
    mine = comm.rank // shards
    assert_close(own, {n: param.detach() for n, param in params[mine].items()}, 4 * TOLERANCE, name)
    center = {n: torch.stack([p[n].detach() for p in params]).mean(0) for n in start}
    assert_close(means, center, 4 * TOLERANCE, f"mean of {name}")
    squares = sum(((p[n].detach() - center[n]) ** 2).sum() for p in params for n in start)
    torch.testing.assert_close(distance, float(squares / replicas) ** 0.5, rtol=1e-3, atol=1e-5)
    assert distance > 0, f"{name} left nothing apart"
    assert any(not torch.equal(own[n], start[n]) for n in start)


def as_plain_tensors(comm: Comm) -> None:
    """With a compressor that looks at other elements, each shard becomes what the same rule makes of a plain tensor."""
    mesh = mesh_of(comm, 2)
    for compressor in (DGC(0.2), dgcopt.ChunkedTopK(0.1, 64, source="gradient")):
        rule = DiLoCo(every=2, outer=OUTER, compression=compressor)
        model = sharded(mesh["shard"], Wide())
        recorder = Recorder(model)
        optimizer = rule.attach(ADAMW(model.parameters()), model.named_parameters(), mesh=mesh["replicate"])
        for step in range(6):
            recorder.steps.append({})
            optimizer.zero_grad()
            loss_of(model, comm, step).backward()
            optimizer.step()
        assert optimizer.averaging.residual_norm() > 0
        pair = (comm.rank % 2, comm.rank % 2 + 2)
        steps = gathered(comm, recorder.steps, pair)
        mine = {n: start for n, start in recorder.start.items() if start.numel()}
        params = [{n: nn.Parameter(tensor.clone()) for n, tensor in mine.items()} for _ in pair]
        others = [
            rule.attach(ADAMW(p.values()), list(p.items()), comm=c)
            for p, c in zip(params, dgcopt.simulated_world(2), strict=True)
        ]
        for of_step in steps:
            for place in range(2):
                for n in mine:
                    params[place][n].grad = of_step[n][place].view_as(mine[n]).clone()
            for other in others:
                other.step()
        ours = {n: local_of(recorder.named[n]) for n in mine}
        theirs = {n: param.detach() for n, param in params[comm.rank // 2].items()}
        assert_close(ours, theirs, 4 * TOLERANCE, repr(compressor))


def nan_ends_on_all(comm: Comm) -> None:
    """NaN in one shard of one replica ends the round on every rank of every replica, and nothing is averaged."""
    mesh = mesh_of(comm, 2)
    for rule in (LocalSGD(every=2), DiLoCo(every=2), LocalSGD(every=2, overlap=True)):
        model = sharded(mesh["shard"], Wide())
        optimizer = rule.attach(SGD(model.parameters(), lr=0.1), model.named_parameters(), mesh=mesh["replicate"])
        for step in range(2):
            optimizer.zero_grad()
            loss_of(model, comm, step).backward()
            if step == 1 and comm.rank == comm.size - 1:
                local(model[2].weight.grad)[0] = torch.nan
            if step == 0:
                optimizer.step()
        with refused(comm, DivergenceError, "hold NaN or Inf", "Nothing was averaged"):
            optimizer.step()
            optimizer.averaging.finish_round()
        finite = torch.tensor([all(bool(local_of(param).isfinite().all()) for param in model.parameters())])
        told = comm.run(AllGather(finite, label="finite")).flatten().tolist()
        assert told == [rank != comm.size - 1 for rank in range(comm.size)], f"{rule!r}: {told}"


def infinite_sums_skip_on_all(comm: Comm) -> None:
    """Weights of one shard whose sum overflows: ranks that hold the other shards skip the round too."""
    mesh = mesh_of(comm, 2)
    for rule in (LocalSGD(every=1), LocalSGD(every=1, overlap=True), dgcopt.SPARTA(0.5)):
        model = sharded(mesh["shard"], Wide())
        optimizer = rule.attach(SGD(model.parameters(), lr=1.0), model.named_parameters(), mesh=mesh["replicate"])
        optimizer.zero_grad()
        loss_of(model, comm, 0).backward()
        for param in model.parameters():
            if comm.rank % 2 and param.to_local().numel():
                local(param.grad).fill_(-3e38)
        wanted = {n: local_of(param) - local(param.grad) for n, param in model.named_parameters()}
        optimizer.step()
        optimizer.averaging.finish_round()
        for name, param in model.named_parameters():
            apart = (local_of(param) - wanted[name]).abs()
            assert bool((apart <= 1e-6 * (1 + wanted[name].abs())).all()), f"{rule!r}: {name}: {apart.max()} apart"
        assert optimizer.averaging.telemetry.skipped == 1, repr(rule)


def fragments_are_alike(comm: Comm) -> None:
    """Ranks that hold shards of one replica split the model at the same parameters, whatever their shards' sizes."""
    mesh = mesh_of(comm, 2)
    with torch.random.fork_rng():
        torch.manual_seed(5)
        model = sharded(mesh["shard"], nn.Sequential(nn.Linear(6, 1), nn.Linear(1, 100), nn.Linear(100, 1)))
    optimizer = DiLoCo(every=4, fragments=2).attach(
        SGD(model.parameters(), lr=0.01), model.named_parameters(), mesh=mesh["replicate"]
    )
    averaging = optimizer.averaging  # type: ignore[attr-defined]
    for step in range(2):
        optimizer.zero_grad()
        loss_of(model, comm, step).backward()
        optimizer.step()
    apart = torch.tensor([param in averaging.replica.unsynced for param in averaging.names])
    told = comm.run(AllGather(apart, label="apart"))
    assert told[0].any() and not told[0].all()
    assert bool((told == told[0]).all()), told.tolist()


def follows_replaced_memory(comm: Comm) -> None:
    """Rounds average the weights that there are after to_empty() has given parameters new memory."""
    mesh, ends = mesh_of(comm, 2), []
    for rule in (LocalSGD(every=1), DiLoCo(every=1, outer=OUTER)):
        for replaced in (False, True):
            model = sharded(mesh["shard"], Wide())
            optimizer = rule.attach(SGD(model.parameters(), lr=0.1), model.named_parameters(), mesh=mesh["replicate"])
            start = {name: local_of(param).clone() for name, param in model.named_parameters()}
            for step in range(3):
                if replaced and step == 1:
                    start = {name: local_of(param).clone() for name, param in model.named_parameters()}
                    model.to_empty(device="cpu")
                    for name, param in model.named_parameters():
                        local_of(param).copy_(start[name])
                optimizer.zero_grad()
                loss_of(model, comm, step).backward()
                optimizer.step()
            ends.append(whole(model))
        assert all(torch.equal(tensor, ends[-2][name]) for name, tensor in ends[-1].items()), repr(rule)


def goes_on(comm: Comm) -> None:
    """A checkpoint of each rank continues with the same bits, tied, frozen and empty shards included."""
    mesh = mesh_of(comm, 2)
    for rule in (LocalSGD(every=3), DiLoCo(every=3, outer=OUTER, compression=DGC(0.3))):

        def begin(rule: Averaging = rule) -> tuple[Any, Any]:
            model = sharded(mesh["shard"])
            return model, rule.attach(ADAMW(model.parameters()), model.named_parameters(), mesh=mesh["replicate"])

        def train(model: Any, optimizer: Any, *steps: int) -> dict[str, Tensor]:
            for step in steps:
                optimizer.zero_grad()
                loss_of(model, comm, step).backward()
                optimizer.step()
            return whole(model)

        model, optimizer = begin()
        train(model, optimizer, 0, 1, 2, 3)
        with shared_folder(comm) as folder:
            state = {"model": model.state_dict(), "optimizer": optimizer.state_dict()}
            dgcopt.checkpoint.save(folder, state, 4)
            wanted = train(model, optimizer, 4, 5, 6)
            _, state = dgcopt.checkpoint.load(folder) or (0, {})
            other = torch.load(next(folder.glob(f"step-*/rank-{comm.rank ^ 1}.pt")), weights_only=True)
        model, optimizer = begin()
        with refused(comm, ConfigError, "is of shard", "this rank has shard"):
            optimizer.load_state_dict(other["optimizer"])
        model.load_state_dict(state["model"])
        optimizer.load_state_dict(state["optimizer"])
        ours = train(model, optimizer, 4, 5, 6)
        assert all(torch.equal(tensor, wanted[name]) for name, tensor in ours.items()), repr(rule)


def refusals(comm: Comm) -> None:
    """Each is refused on all ranks in a sentence, before anything is exchanged."""
    mesh = mesh_of(comm, 2)
    model = sharded(mesh["shard"])
    make = functools.partial(SGD, [*model.parameters()], lr=0.1)
    with refused(comm, ConfigError, "SGP waits for some peers only", "LocalSGD, SlowMo or DiLoCo"):
        dgcopt.SGP(make(), mesh=mesh["replicate"])
    with refused(comm, ConfigError, "AsyncAverage"):
        dgcopt.AsyncAverage(make(), mesh=mesh["replicate"])
    with refused(comm, ConfigError, "are in both", "fully_shard(module, mesh=mesh['shard'])"):
        LocalSGD(make(), every=2, mesh=mesh["shard"])
    with refused(comm, ConfigError, "mesh is for sharded parameters"):
        LocalSGD(SGD(Net().parameters(), lr=0.1), every=2, mesh=mesh["replicate"])
    clipped = dgcopt.DGC(0.1, clip=dgcopt.LocalClip(1.0))
    for compression in (clipped, dgcopt.PerParameter({"extra*": dgcopt.NoCompression(), "*": clipped})):
        with refused(comm, ConfigError, "clips the norm of a rank's outer gradient", "clip per='tensor'"):
            DiLoCo(every=2, outer=OUTER, compression=compression).attach(make(), comm=comm, mesh=mesh["replicate"])
    averaged = LocalSGD(make(), every=2, mesh=mesh["replicate"])
    with refused(comm, ConfigError, "cannot rejoin"):
        averaged.averaging.rejoin()
    with refused(comm, ConfigError, "has no effect if its gradients are averaged over the same ranks"):
        wrap(model, averaged, mesh)
    every_step = wrap(model, make(), mesh)
    with refused(comm, ConfigError, "already averages gradients over all ranks at every step"):
        LocalSGD(every_step, every=2, mesh=mesh["replicate"])


SCENARIOS: dict[str, Callable[[Comm], Any]] = {
    **{f"sharded averaging: {name}": functools.partial(as_whole_parameters, name, 2) for name in RULES},
    **{
        f"sharded averaging: {one.__name__}": one
        for one in (
            as_plain_tensors,
            nan_ends_on_all,
            infinite_sums_skip_on_all,
            fragments_are_alike,
            follows_replaced_memory,
            goes_on,
            refusals,
        )
    },
}
"""Among four ranks."""

OF_SIX: dict[str, Callable[[Comm], Any]] = {
    f"sharded averaging {replicas} x {6 // replicas}: {name}": functools.partial(as_whole_parameters, name, replicas)
    for replicas, name in ((2, "DiLoCo in fragments"), (3, "LocalSGD"), (3, "DiLoCo"))
}
"""Among six ranks."""
