"""Ranks with different numbers of batches, in dgcopt.join."""

from __future__ import annotations

import itertools
from typing import Any

import torch
from torch import nn
from torch.nn.functional import mse_loss

import dgcopt
from dgcopt import DGC, Comm
from dgcopt.data import LoadBalancingDistributedSampler
from tests.support.wires import WIRES, only

from ..training import assert_close, batch, make_model, refused
from .pair import SGD, Loop, wrap


def batches_of(rank: int) -> int:
    return 3 + 2 * rank


def uneven_data(comm: Comm) -> Loop:
    """Rank r has 3 + 2r batches: averages divide by the ranks that have one, or by all; then all go on together.

    Gradients are set to zero before each backward pass, or after each step.
    """
    most = batches_of(comm.size - 1)
    for divide_by in ("active", "all"):
        for compression, before in ((None, False), (None, True), (DGC(1.0, overlap=True), False)):
            whole, mine = make_model(), make_model()
            bare = SGD(whole.parameters())
            ours = wrap(SGD(mine.parameters()), mine, comm, compression)
            for step in range(most + 2):
                bare.zero_grad()
                active = [rank for rank in range(comm.size) if step < batches_of(rank) or step >= most]
                for rank in active:
                    x, y = batch(step, 0, None)
                    loss = mse_loss(whole(x[rank :: comm.size]), y[rank :: comm.size])
                    (loss / (len(active) if divide_by == "active" else comm.size)).backward()
                bare.step()

            def train(step: int, mine: nn.Module = mine, ours: Any = ours, before: bool = before) -> Loop:
                if before:
                    ours.zero_grad()
                x, y = batch(step, 0, comm)
                mse_loss(mine(x), y).backward()
                yield
                ours.step()
                if not before:
                    ours.zero_grad()
                yield

            with dgcopt.join(ours, divide_by=divide_by):
                for step in range(batches_of(comm.rank)):
                    yield from train(step)
            for _ in range(2 * (most - batches_of(comm.rank)) + 1):
                yield
            for step in (most, most + 1):
                yield from train(step)
            assert_close(list(mine.parameters()), list(whole.parameters()), 1e-9, f"divided by {divide_by}")


@only(wires=WIRES)
def uneven_data_of_two(comm: Comm) -> Loop:
    """Two optimizers that step in turn, and residuals that are still sent after their rank has run out of data.

    Of gradients for SGD, of updates for Adam.
    """
    models = [make_model(torch.float32, seed=place) for place in (1, 2)]
    made = [SGD(models[0].parameters()), torch.optim.AdamW(models[1].parameters(), lr=0.01)]
    optimizers = [
        wrap(optimizer, model, comm, DGC(0.3, overlap=True)) for optimizer, model in zip(made, models, strict=True)
    ]
    with dgcopt.join(*optimizers):
        for step in range(batches_of(comm.rank)):
            for model, optimizer in zip(models, optimizers, strict=True):
                optimizer.zero_grad()
                x, y = batch(step, 0, comm, torch.float32)
                mse_loss(model(x), y).backward()
                optimizer.step()
            held = [optimizer.residual_norm() for optimizer in optimizers]
    if comm.rank == 0:
        for optimizer, norm in zip(optimizers, held, strict=True):
            assert optimizer.telemetry.steps == batches_of(comm.size - 1) and norm > 0
    dgcopt.check_replicas([(f"{i}.{n}", p) for i, m in enumerate(models) for n, p in m.named_parameters()], comm=comm)
    yield


@only(wires=WIRES)
def uneven_data_is_an_error(comm: Comm) -> Loop:
    """If asked for: all ranks are told which have none, and can go on; nobody is told where all end alike."""
    model = make_model()
    optimizer = wrap(SGD(model.parameters()), model, comm, DGC(0.3, overlap=True))

    def train(steps: int) -> None:
        for step in range(steps):
            optimizer.zero_grad()
            x, y = batch(step, 0, comm)
            mse_loss(model(x), y).backward()
            optimizer.step()

    for _ in range(2):
        with dgcopt.join(optimizer, throw_on_early_termination=True):
            train(2)
        before = optimizer.telemetry.steps
        with (
            refused(comm, dgcopt.OutOfData, f"rank(s) 0 of {comm.size} have run out of data", "same number of batches"),
            dgcopt.join(optimizer, throw_on_early_termination=True),
        ):
            train(batches_of(comm.rank))
        assert optimizer.telemetry.steps == before + batches_of(0)
    with dgcopt.join(optimizer, enable=False):
        train(2)
    dgcopt.check_replicas(model.state_dict(), comm=comm)
    yield


@only(wires=WIRES)
def samples_of_like_cost(comm: Comm) -> Loop:
    """No sample comes twice or is left out, though they cannot be shared out evenly: some ranks have one step less."""
    costs = [(37 * sample) % 101 for sample in range(4 * comm.size + 1)]
    whole, mine = make_model(), make_model()
    bare, ours = SGD(whole.parameters()), wrap(SGD(mine.parameters()), mine, comm)
    samplers = [
        LoadBalancingDistributedSampler(costs, costs, comm.size, rank, uneven=True) for rank in range(comm.size)
    ]
    assert sorted(itertools.chain(*samplers)) == [*range(len(costs))], "a sample is left out or comes twice"
    for samples in itertools.zip_longest(*samplers):
        bare.zero_grad()
        active = [sample for sample in samples if sample is not None]
        for sample in active:
            x, y = batch(sample, 0, None)
            (mse_loss(whole(x), y) / len(active)).backward()
        bare.step()
    with dgcopt.join(ours):
        for sample in LoadBalancingDistributedSampler(costs, costs, uneven=True):
            ours.zero_grad()
            x, y = batch(sample, 0, None)
            mse_loss(mine(x), y).backward()
            ours.step()
    assert_close(list(mine.parameters()), list(whole.parameters()), 1e-9, "samples of like cost")
    yield
