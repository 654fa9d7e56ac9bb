"""Ranks with different numbers of batches."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn.functional import mse_loss

import dgcopt
from dgcopt import Comm, LocalSGD

from ..training import assert_close, assert_same_on_all_ranks, batch, make_model, refused
from .member import AVERAGED, MOMENTUM, PLAIN, Member, train, usable


def uneven_data_is_an_error(comm: Comm) -> None:
    """If asked for, at the first exchange that some ranks have no data for; where all end alike, all is averaged."""
    mine = Member(LocalSGD(2), PLAIN, comm)
    with dgcopt.join(mine.optimizer, throw_on_early_termination=True):
        train([mine], range(3))
    assert_same_on_all_ranks(comm, mine.parameters, "an even end")
    with (
        refused(comm, dgcopt.OutOfData, f"rank(s) 0 of {comm.size} have run out"),
        dgcopt.join(mine.optimizer, throw_on_early_termination=True),
    ):
        train([mine], range(batches_of(comm.rank)))
    usable(comm)


def batches_of(rank: int) -> int:
    return 3 + 2 * rank


def by_hand(comm: Comm, every: int, divide_by: str, epoch: int) -> tuple[Tensor, Tensor]:
    """Local SGD of all ranks in one process: weights once all have run out of data, and after another epoch."""
    models = [make_model() for _ in range(comm.size)]
    optimizers = [MOMENTUM(model.parameters()) for model in models]
    left = [batches_of(rank) for rank in range(comm.size)]
    step, since, found = 0, [0] * comm.size, []
    for _ in range(2):
        while any(left) or any(since):
            for rank, (model, optimizer) in enumerate(zip(models, optimizers, strict=True)):
                if left[rank]:
                    x, y = batch(step, 0, None)
                    optimizer.zero_grad()
                    mse_loss(model(x[rank :: comm.size]), y[rank :: comm.size]).backward()
                    optimizer.step()
                    since[rank] += 1
                    left[rank] -= 1
            step += 1
            if step % every == 0:
                counted = [rank for rank in range(comm.size) if since[rank] or divide_by == "all"]
                with torch.no_grad():
                    for params in zip(*(model.parameters() for model in models), strict=True):
                        center = sum(params[rank] for rank in counted) / len(counted)
                        for param in params:
                            param.copy_(center)
                since = [0] * comm.size
        found.append(torch.cat([param.detach().flatten() for param in models[0].parameters()]))
        left = [epoch] * comm.size
    return found[0], found[1]


def uneven_data(comm: Comm) -> None:
    """Rank r has 3 + 2r batches: means are of the ranks that have made a step since the last one, or of all."""
    for every in (2, 3):
        for divide_by in ("active", "all"):
            mine = Member(LocalSGD(every, overlap=every == 2), MOMENTUM, comm)
            with dgcopt.join(mine.optimizer, divide_by=divide_by):  # type: ignore[arg-type]
                train([mine], range(batches_of(comm.rank)))
            what = f"every {every} steps, divided by {divide_by}"
            assert_same_on_all_ranks(comm, mine.parameters, what)
            joined, after = by_hand(comm, every, divide_by, epoch=2 * every)
            assert_close([mine.flat], [joined], 1e-9, what)
            train([mine], range(mine.averaging.step, mine.averaging.step + 2 * every))
            mine.averaging.finish_round()
            if every == 3:
                assert_close([mine.flat], [after], 1e-9, f"{what}, in the next epoch")
            assert_same_on_all_ranks(comm, mine.parameters, f"{what}, in the next epoch")


def uneven_data_of_others(comm: Comm) -> None:
    """Nobody waits for ever, all go on from the same step, and the next epoch does what it should."""
    for name in (
        *("LocalSGD, hierarchical", "SlowMo", "SGP", "Decentralized", "LowPrecisionDecentralized, hierarchical"),
        *("SPARTA, strided, overlap", "DiLoCo", "DiLoCo, streaming", "SparseLoCo"),
    ):
        rule, make = AVERAGED[name]
        mine = Member(rule, make, comm)
        with dgcopt.join(mine.optimizer):
            train([mine], range(batches_of(comm.rank)))
        step = mine.averaging.step
        assert_same_on_all_ranks(comm, [torch.tensor(step)], f"{name}: the number of steps")
        assert step >= batches_of(comm.size - 1) and rule.due(step), f"{name}: left after step {step}"
        if rule.identical(step):
            assert_same_on_all_ranks(comm, [mine.flat], name)
        train([mine], range(20, 24))
        mine.averaging.average()
        assert mine.averaging.step == step + 4
        assert_same_on_all_ranks(comm, [mine.flat], f"{name}, in the next epoch")
        assert bool(mine.flat.isfinite().all())
