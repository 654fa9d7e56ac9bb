"""Schedules, weights or parameters that differ between ranks, and weights that are not finite."""

from __future__ import annotations

import torch

import dgcopt
from dgcopt import Comm, DivergenceError, LocalSGD, MismatchError
from dgcopt.averaging import (
    SlowMo,
)

from ..training import assert_same_on_all_ranks, refused
from .member import PLAIN, Member, gathered, train, usable


def schedules_differ(comm: Comm) -> None:
    """Found when the optimizer is wrapped."""
    for settings in ({"every": 8 if comm.rank else 4}, {"every": 4, "overlap": comm.rank == 1}):
        (name,) = [name for name in settings if name != "every" or len(settings) == 1]
        with refused(comm, MismatchError, f"rank {comm.rank}", f"{name}={settings[name]}", "LocalSGD(", "rank 1 has"):
            Member(LocalSGD(**settings), PLAIN, comm)
        usable(comm)


def weights_differ_at_the_start(comm: Comm) -> None:
    """Found at the first step; once they have been broadcast, training goes on."""
    for rule in (LocalSGD(2), LocalSGD(2, overlap=True), LocalSGD(2, warmup_steps=1), SlowMo(2)):
        mine = Member(rule, PLAIN, comm)
        if comm.rank == comm.size - 1:
            mine.model.get_parameter("2.bias").data[3] += 1e-12
        mine.backward(0)
        with refused(comm, DivergenceError, f"rank {comm.rank}", "'2.bias'", f"[{comm.size - 1}]", "broadcast"):
            mine.optimizer.step()
        usable(comm)
        dgcopt.broadcast_parameters(mine.model.state_dict(), comm=comm)
        train([mine], range(2 + rule.warmup_steps))
        mine.averaging.finish_round()
        assert_same_on_all_ranks(comm, mine.parameters, "after broadcast")


def weights_are_not_finite(comm: Comm) -> None:
    """Found before anything is averaged, by all ranks; mended, training goes on."""
    last = comm.size - 1
    for rule in (LocalSGD(2), LocalSGD(2, overlap=True)):
        mine = Member(rule, PLAIN, comm)
        train([mine], range(1))
        mine.backward(1)
        bias = mine.model.get_parameter("2.bias")
        kept = bias.detach().clone()
        if comm.rank == last:
            bias.data[3] = (torch.nan, torch.inf)[rule.overlap]
        words = [f"rank {comm.rank}: after local step 2", f"rank(s) [{last}] hold NaN or Inf", "Nothing was averaged"]
        with refused(comm, DivergenceError, *words, *(["'2.bias'"] if comm.rank == last else [])):
            mine.optimizer.step()
            before = mine.flat
            mine.optimizer.step()
        usable(comm)
        rows = gathered(comm, mine.flat)
        assert bool(rows[:last].isfinite().all()) and not bool(rows[last].isfinite().all())
        assert comm.size == 2 or not torch.equal(rows[0], rows[1]), "something was averaged"
        assert not rule.overlap or torch.equal(before.nan_to_num(), mine.flat.nan_to_num()), "the step went on"
        with torch.no_grad():
            bias.copy_(kept)
        train([mine], range(2, 2 + 2))
        mine.averaging.finish_round()
        assert_same_on_all_ranks(comm, mine.parameters, "mended")


def ranks_train_different_parameters(comm: Comm) -> None:
    mine = Member(LocalSGD(2), PLAIN, comm)
    train([mine], range(3))
    mine.model.get_parameter("2.weight").requires_grad_(comm.rank != comm.size - 1)
    mine.backward(3)
    with refused(comm, MismatchError, "requires_grad"):
        mine.optimizer.step()
    for overlap in (False, True):
        mine = Member(LocalSGD(2, overlap=overlap), PLAIN, comm)
        train([mine], range(2))
        frozen = mine.model.get_parameter("2.weight").requires_grad_(False)
        mine.backward(2)
        frozen.grad = None if comm.rank == comm.size - 1 else torch.zeros_like(frozen)
        mine.optimizer.step()
        with refused(comm, MismatchError, "gradients of frozen parameters to None on all ranks or none"):
            mine.optimizer.step()
            mine.averaging.finish_round()
    gathered(comm, mine.flat)  # the wire goes on
