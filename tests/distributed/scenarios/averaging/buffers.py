"""Batch norm's statistics beside averaged weights."""

from __future__ import annotations

import functools

import torch

import dgcopt
from dgcopt import Comm, LocalSGD
from dgcopt.averaging import (
    SGP,
)

from ..loops.buffers import normalised
from ..training import assert_same_on_all_ranks
from .member import PLAIN, Member, gathered, train
from .uneven_data import batches_of


def buffers_come_along(comm: Comm) -> None:
    """Batch norm's statistics are those of rank 0 after an exchange at a multiple of so many steps, else their own."""
    for rule, every in ((LocalSGD(2), 4), (LocalSGD(1, overlap=True), 2), (SGP(), 2), (LocalSGD(2, warmup_steps=3), 1)):
        mine = Member(rule, PLAIN, comm, functools.partial(normalised, 3))
        dgcopt.sync_buffers(mine.model, mine.optimizer, every)
        for step in range(1, 5 + rule.warmup_steps):
            mine.backward(step)
            before = [gathered(comm, buffer.double()) for buffer in mine.model.buffers()]
            mine.optimizer.step()
            local = step - rule.warmup_steps
            shared = local <= 0 or (rule.due(local) and local % every == 0)
            for rows, buffer in zip(before, mine.model.buffers(), strict=True):
                found = rows[0 if shared else comm.rank]
                assert torch.equal(buffer.double(), found), f"{rule}: buffers after step {step}"
        assert not torch.equal(before[0][0], before[0][1]), "they were the same before"
        mine.averaging.average()
        assert_same_on_all_ranks(comm, [*mine.model.buffers()], "in the end")


def buffers_of_the_last(comm: Comm) -> None:
    """Ranks that have run out of data take over the statistics of one that had some."""
    mine = Member(LocalSGD(2), PLAIN, comm, functools.partial(normalised, 3))
    dgcopt.sync_buffers(mine.model, mine.optimizer)
    with dgcopt.join(mine.optimizer):
        train([mine], range(batches_of(comm.rank)))
        last = mine.model[1].running_mean.clone()
    assert_same_on_all_ranks(comm, [*mine.model.buffers()], "after join")
    assert torch.equal(gathered(comm, last)[-1], mine.model[1].running_mean), "not the last one's"
