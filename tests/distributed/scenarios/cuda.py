"""Training on one CUDA device that all ranks share, as Gloo carries CUDA tensors too."""

from __future__ import annotations

import functools
import os
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

import dgcopt
from dgcopt import Comm, Compressor
from dgcopt.collectives import AllGather
from tests.support.library import SETTINGS

DEVICE = torch.device(os.environ.get("DGCOPT_TEST_DEVICE", "cuda"))
AVERAGING = (
    dgcopt.LocalSGD(every=2),
    dgcopt.SlowMo(every=2),
    dgcopt.DiLoCo(every=2),
    dgcopt.SparseLoCo(every=2),
    dgcopt.SPARTA(0.1),
    dgcopt.Decentralized(),
)


def model() -> nn.Module:
    torch.manual_seed(1)
    return nn.Sequential(nn.Linear(12, 90), nn.Tanh(), nn.Linear(90, 70), nn.Tanh(), nn.Linear(70, 5)).to(DEVICE)


def losses(mine: nn.Module, optimizer: Any, comm: Comm, steps: int = 8) -> list[float]:
    """Of the same batch, which ranks share between them."""
    generator = torch.Generator().manual_seed(7)
    inputs, targets = torch.randn(48, 12, generator=generator), torch.randint(5, (48,), generator=generator)
    found = []
    for _ in range(steps):
        optimizer.zero_grad()
        share = slice(comm.rank, None, comm.size)
        loss = nn.functional.cross_entropy(mine(inputs[share].to(DEVICE)), targets[share].to(DEVICE))
        loss.backward()
        optimizer.step()
        found.append(loss.item())
    return found


def compressed(compressor: Compressor, given: dict[str, Any], comm: Comm) -> None:
    mine = model()
    optimizer = given.get("optimizer", functools.partial(torch.optim.SGD, lr=0.1))(mine.parameters())
    wrapped = dgcopt.DistributedOptimizer(optimizer, mine.named_parameters(), compressor, comm=comm, bucket_mb=0.01)
    found = losses(mine, wrapped, comm)
    assert max(found) < 10 * found[0], found
    flat = torch.cat([param.detach().flatten() for param in mine.parameters()])
    rows = comm.run(AllGather(flat))
    assert all(torch.equal(row, rows[0]) for row in rows), "replicas drifted apart"


def averaged(rule: dgcopt.Averaging, comm: Comm) -> None:
    mine = model()
    optimizer = torch.optim.SGD(mine.parameters(), lr=0.1)
    found = losses(mine, rule.attach(optimizer, mine.named_parameters(), comm), comm)
    assert found[-1] < found[0], found


def gradient_scaler(comm: Comm) -> None:
    """An overflow on one rank halves the scale of all, and no rank takes that step."""
    mine = model()
    scaler = torch.amp.GradScaler(DEVICE.type, init_scale=1024.0)
    optimizer = dgcopt.DistributedOptimizer(
        torch.optim.SGD(mine.parameters(), lr=0.1), mine.named_parameters(), dgcopt.DGC(0.1), comm=comm
    )
    for step in range(3):
        optimizer.zero_grad()
        with torch.autocast(DEVICE.type, torch.float16 if DEVICE.type == "cuda" else torch.bfloat16):
            loss = mine(torch.ones(4, 12, device=DEVICE)).square().mean()
        if step == 1 and comm.rank == comm.size - 1:
            loss = loss * torch.inf
        scaler.scale(loss).backward()
        before = mine[0].weight.detach().clone()
        scaler.step(optimizer)
        scaler.update()
        assert torch.equal(mine[0].weight, before) == (step == 1)
    assert scaler.get_scale() == 512.0


SCENARIOS: dict[str, Callable[[Comm], None]] = {
    **{f"cuda: {c!r}"[:90]: functools.partial(compressed, c, given) for c, given in SETTINGS},
    **{f"cuda: {rule!r}"[:90]: functools.partial(averaged, rule) for rule in AVERAGING},
    "cuda: GradScaler": gradient_scaler,
}
