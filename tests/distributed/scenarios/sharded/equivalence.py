"""Training equals FSDP2's own step on the whole mesh, plain tensors that hold the shards, and whole parameters."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any
from unittest import mock

import torch
from torch import Tensor, nn
from torch.optim import SGD, AdamW, Optimizer

import dgcopt
from dgcopt import DGC, Comm, NoCompression
from dgcopt.collectives import AllGather
from dgcopt.compressors import Compressor
from dgcopt.gradients.synchronised import synchronised
from tests.support.library import FIRST_OF_A_KIND

from .setup import (
    TOLERANCE,
    Net,
    Recorder,
    Scenario,
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


def muon_and_adamw(model: nn.Module) -> list[Optimizer]:
    trained = [param for param in model.parameters() if param.requires_grad]
    # of one row, torch's own step fails on a mesh of two dimensions
    matrices = [param for param in trained if param.dim() == 2 and len(param) > 1]
    others = [param for param in trained if param.dim() < 2 or len(param) == 1]
    # each iteration on shards gathers them a few times
    return [torch.optim.Muon(matrices, lr=0.005, ns_steps=2), AdamW(others, lr=0.01)]


OPTIMIZERS: dict[str, Callable[[nn.Module], list[Optimizer]]] = {
    "SGD": lambda m: [SGD(m.parameters(), lr=0.05, momentum=0.9, nesterov=True, weight_decay=0.01)],
    "SGD, foreach": lambda m: [SGD(m.parameters(), lr=0.05, momentum=0.9, dampening=0.1, foreach=True)],
    "AdamW": lambda m: [AdamW(m.parameters(), lr=0.01, eps=1e-4)],
    "AdamW, fused": lambda m: [AdamW(m.parameters(), lr=0.01, eps=1e-4, fused=True)],
    "Muon and AdamW": muon_and_adamw,
}


@mock.patch.object(Tensor, "bfloat16", Tensor.float)  # to which Muon rounds: one bit of a gradient becomes 1% of a step
def equals_native(name: str, replicas: int, comm: Comm) -> None:
    """Steps at ratio 1 and without compression equal FSDP2's own HSDP on the whole mesh.

    Steps are slow: 8 show by half the tolerance the fault that 20 would show by the whole.
    """
    mesh, make = mesh_of(comm, replicas), OPTIMIZERS[name]
    native = sharded(mesh)
    theirs = make(native)
    ways: dict[str, Compressor] = {"NoCompression": NoCompression(), "ratio 1": DGC(1.0, source="gradient")}
    models = {way: sharded(mesh["shard"]) for way in ways}
    ours = {way: [wrap(models[way], one, mesh, c) for one in make(models[way])] for way, c in ways.items()}
    for step in range(8):
        for model, optimizers in [(native, theirs), *((models[way], ours[way]) for way in ways)]:
            for one in optimizers:
                one.zero_grad()
            loss_of(model, comm, step, extra=step % 3 > 0).backward()
            for one in optimizers:
                one.step()
    before = dict(Net().named_parameters())
    moved = {name for name, tensor in whole(native).items() if not torch.equal(tensor, before[name])}
    assert moved == {name for name, param in before.items() if param.requires_grad}
    for way, model in models.items():
        assert_close(whole(model), whole(native), TOLERANCE / 2, f"{name}, {way}")


def recorded(
    comm: Comm, replicas: int, compressor: Compressor, make: Callable[..., Optimizer], steps: int, **settings: Any
) -> tuple[Recorder, Any]:
    """Train a sharded model and record its gradients."""
    mesh = mesh_of(comm, replicas)
    model = sharded(mesh["shard"], Wide())
    recorder = Recorder(model)
    optimizer = wrap(model, make(model.parameters()), mesh, compressor, **settings)
    for step in range(steps):
        recorder.steps.append({})
        optimizer.zero_grad()
        loss_of(model, comm, step).backward()
        optimizer.step()
    return recorder, optimizer


def simulated(
    start: dict[str, Tensor],
    steps: Sequence[dict[str, Sequence[Tensor]]],
    compressor: Compressor,
    make: Callable[..., Any],
) -> dict[str, Tensor]:
    """Return the weights of plain parameters after the same steps, given each replica's gradients."""
    comms = dgcopt.simulated_world(len(next(iter(steps[0].values()))))
    params = [{name: nn.Parameter(tensor.clone()) for name, tensor in start.items()} for _ in comms]
    optimizers: list[Any] = [
        dgcopt.DistributedOptimizer(
            make(p.values()), p.items(), compressor, comm=c, bucket_mb=1e-4, first_bucket_mb=1e-5
        )
        for p, c in zip(params, comms, strict=True)
    ]
    for of_step in steps:
        for replica, optimizer in enumerate(optimizers):
            optimizer.zero_grad()
            for name, grads in of_step.items():
                param = params[replica][name]
                param.grad = grads[replica].view_as(param).clone()
                synchronised(optimizer).gradient_arrived(param)  # type: ignore[union-attr]
        for optimizer in optimizers:
            optimizer.step()
    return {name: param.detach() for name, param in params[0].items()}


def as_plain_tensors(place: int, replicas: int, comm: Comm) -> None:
    """Each shard equals a plain tensor trained by the same rule on simulated ranks."""
    compressor, given = FIRST_OF_A_KIND[place]
    momentum = 0.0 if isinstance(compressor, dgcopt.DeMo | dgcopt.Signum) else 0.9  # which have one of their own
    make = given.get("optimizer", functools.partial(SGD, lr=0.05, momentum=momentum))
    recorder, _ = recorded(comm, replicas, compressor, make, 4)
    shards = comm.size // replicas
    group = range(comm.rank % shards, comm.size, shards)
    steps = gathered(comm, recorder.steps, group)
    mine = {name: start for name, start in recorder.start.items() if start.numel()}
    theirs = simulated(mine, [{n: g for n, g in s.items() if n in mine} for s in steps], compressor, make)
    ours = {name: local_of(recorder.named[name]) for name in mine}
    moved = torch.tensor([any(not torch.equal(ours[name], mine[name]) for name in mine)])
    assert comm.run(AllGather(moved, label="moved")).any(), "nothing was trained"  # below a threshold on some ranks
    assert_close(ours, theirs, TOLERANCE, f"{compressor!r}")


ELEMENTWISE: dict[str, Compressor] = {
    "NoCompression": NoCompression(),
    "FP16": dgcopt.FP16(),
    "BF16": dgcopt.BF16(),
    "SignSGD": dgcopt.SignSGD(),
    "Signum": dgcopt.Signum(),
    "Threshold": dgcopt.Threshold(0.02, 1.0),
    "DGC at ratio 1": DGC(1.0),
    "DGC at ratio 1, clipped": DGC(1.0, clip=dgcopt.LocalClip(0.05)),
    "PerParameter with one rule, clipped": dgcopt.PerParameter({"*": DGC(1.0, clip=dgcopt.LocalClip(0.05))}),
}
"""Elementwise rules: an element depends on others through the norm of all gradients at most."""


def as_whole_parameters(replicas: int, comm: Comm) -> None:
    """Elementwise rules train shards as they train whole parameters, to float tolerance."""
    make = functools.partial(SGD, lr=0.05, momentum=0.9)
    shards = comm.size // replicas
    for name, compressor in ELEMENTWISE.items():
        of = functools.partial(SGD, lr=0.05) if name == "Signum" else make
        recorder, _ = recorded(comm, replicas, compressor, of, 5)
        first, *steps = joined(comm, [recorder.start, *recorder.steps], recorder.named, shards)
        start = {n: tensors[0] for n, tensors in first.items()}
        ours = {n: param.detach().full_tensor() for n, param in recorder.named.items()}  # type: ignore[attr-defined]
        theirs = simulated(start, steps, compressor, of)
        half = {"FP16": torch.float16, "BF16": torch.bfloat16}.get(name)
        for n in ours:
            allowed = torch.full_like(ours[n], TOLERANCE)
            if half is not None and replicas > 2:  # the order of such a sum is that of its place in the bucket
                allowed += between_orders([torch.stack(of_step[n]) for of_step in steps], half, lr=0.05, momentum=0.9)
            apart = (ours[n] - theirs[n]).abs()
            assert (apart <= allowed).all(), f"{name} {n}: {apart.max()} apart, {allowed.max()} allowed"


def between_orders(steps: Sequence[Tensor], dtype: torch.dtype, lr: float, momentum: float) -> Tensor:
    """Return the bound between SGD's weights of two summation orders; `steps` hold each replica's gradients as rows.

    Each of n - 1 additions rounds by at most half an eps of the sum of magnitudes, in either order.
    """
    apart = torch.zeros_like(steps[0][0])
    for step, grads in enumerate(steps):
        counted = sum(momentum**later for later in range(len(steps) - step))
        apart += lr * counted * (len(grads) - 1) * torch.finfo(dtype).eps * grads.abs().mean(0)
    return apart


SCENARIOS: dict[str, Scenario] = {
    **{f"sharded: native, {name}": functools.partial(equals_native, name, 2) for name in OPTIMIZERS},
    **{
        f"sharded: plain tensors, {type(compressor).__name__}": functools.partial(as_plain_tensors, place, 2)
        for place, (compressor, _) in enumerate(FIRST_OF_A_KIND)
    },
    "sharded: whole parameters": functools.partial(as_whole_parameters, 2),
}
"""Among four ranks."""

OF_SIX: dict[str, Scenario] = {
    f"sharded {replicas} x {6 // replicas}: {what}": functools.partial(scenario, replicas)
    for replicas in (2, 3)
    for what, scenario in {
        **{f"native, {name}": functools.partial(equals_native, name) for name in ("SGD", "AdamW", "Muon and AdamW")},
        **{
            f"plain tensors, {type(compressor).__name__}": functools.partial(as_plain_tensors, place)
            for place, (compressor, _) in enumerate(FIRST_OF_A_KIND)
            if isinstance(compressor, DGC | dgcopt.EFSignSGD | dgcopt.PowerSGD)
        },
        "whole parameters": as_whole_parameters,
    }.items()
}
"""Among six ranks."""
