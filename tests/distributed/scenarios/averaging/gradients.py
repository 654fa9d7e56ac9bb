"""Averaged weights with loss scaling, and with gradients that are averaged on each machine."""

from __future__ import annotations

import torch
from torch.nn.functional import mse_loss

import dgcopt
from dgcopt import Comm, LocalSGD
from dgcopt.averaging import (
    SlowMo,
)

from ..collectives import regrouped
from ..training import assert_close, assert_same_on_all_ranks, batch, make_model
from .member import PLAIN, Member, gathered


def loss_scaling(comm: Comm) -> None:
    """An overflow is that rank's alone, or all ranks' while gradients are averaged, or its machine's.

    In a warm-up such a step does not count, and the residual is free of the scale.
    """
    last, pairs = comm.size - 1, comm.wire != "mpi" and comm.size == 4
    mates: dict[str, set[int]] = {"alone": {last}, "warm-up": set(range(comm.size))}
    if pairs:
        halves = [comm.among([0, 1]), comm.among([2, 3])]
        mates["pairs"] = {2, 3}
    for case, together in mates.items():
        model = make_model(torch.float32)
        optimizer = PLAIN(model.parameters())
        if case == "pairs":
            dgcopt.DistributedOptimizer(optimizer, model.named_parameters(), comm=halves[comm.rank // 2])
        rule = LocalSGD(2, warmup_steps=4 if case == "warm-up" else 0)
        rule.attach(optimizer, model.named_parameters(), comm)
        scaler = torch.amp.GradScaler("cpu", init_scale=256.0, growth_interval=100)
        for step in range(7 if case == "warm-up" else 6):
            optimizer.zero_grad()
            x, y = batch(step, 0, comm, torch.float32)
            loss = mse_loss(model(x), y)
            scaler.scale(loss * torch.inf if step == 2 and comm.rank == last else loss).backward()
            before = torch.cat([param.detach().flatten() for param in model.parameters()])
            scaler.step(optimizer)
            scaler.update()
            stayed = torch.equal(before, torch.cat([param.detach().flatten() for param in model.parameters()]))
            assert stayed == (step == 2 and comm.rank in together), f"{case}, step {step}: rank {comm.rank}"
        assert scaler.get_scale() == (128.0 if comm.rank in together else 256.0), case
        assert optimizer.averaging.step == 6  # type: ignore[attr-defined]
        assert_same_on_all_ranks(comm, model.parameters(), case)
    ends = []
    for scales in ([1.0] * 5, [4.0, 64.0, 2.0, 128.0, 8.0]):
        model = make_model(torch.float32)
        optimizer = PLAIN(model.parameters())
        dgcopt.DistributedOptimizer(optimizer, model.named_parameters(), dgcopt.TopK(0.1), comm=comm)
        LocalSGD(2, warmup_steps=4).attach(optimizer, model.named_parameters(), comm)
        scaler = torch.amp.GradScaler("cpu", init_scale=scales[0])
        for step, scale in enumerate(scales):
            if step:
                scaler.update(scale)
            optimizer.zero_grad()
            x, y = batch(step, 0, comm, torch.float32)
            scaler.scale(mse_loss(model(x), y)).backward()
            scaler.step(optimizer)
        ends.append(torch.cat([param.detach().flatten() for param in model.parameters()]))
    assert torch.equal(*ends), "the residual was scaled"


def gradients_within_a_machine_and_weights_over_all(comm: Comm) -> None:
    """As docs/averaging.md has it: on each machine the mean gradient at every step, and the mean of all weights."""
    grouped = regrouped(comm, [2 * rank // comm.size for rank in range(comm.size)])
    on_machine = list(grouped.ranks("node"))
    for rule in (LocalSGD(2), SlowMo(2, base=LocalSGD(2))):
        mine, by_hand = Member(rule, PLAIN, grouped), Member(rule, PLAIN, grouped)
        named = mine.model.named_parameters()
        optimizer = dgcopt.DistributedOptimizer(mine.optimizer, named, process_set="node", comm=grouped)
        for step in range(1, 4):
            mine.backward(step)
            optimizer.step()
            by_hand.backward(step)
            grads = torch.cat([param.grad.flatten() for param in by_hand.parameters if param.grad is not None])
            means = gathered(comm, grads)[on_machine].mean(0).split([param.numel() for param in by_hand.parameters])
            for param, grad in zip(by_hand.parameters, means, strict=True):
                param.grad = grad.view_as(param)
            by_hand.optimizer.step()
            what = f"{rule!r} after step {step}"
            assert_close([mine.flat], [by_hand.flat], 1e-9, what)
            rows = gathered(comm, mine.flat)
            alike = (rows == rows[comm.rank]).all(1).nonzero().flatten().tolist()
            assert alike == list(range(comm.size) if rule.due(step) else on_machine), f"{what}: {alike} are alike"
        sent = optimizer.telemetry.sent_bytes
        assert (sent > 0) == (len(on_machine) > 1), f"{sent} bytes on a machine of {len(on_machine)}"
