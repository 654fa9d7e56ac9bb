"""Training goes on from a checkpoint, and with another number of ranks."""

from __future__ import annotations

import torch

import dgcopt
from dgcopt import Comm, LocalSGD
from dgcopt.comm import LocalComm

from ..persistence import shared_folder
from ..training import assert_close
from .member import AVERAGED, LIKE_OTHERS, PLAIN, STEPS, Member, gathered, train


def training_continues(comm: Comm) -> None:
    """From a checkpoint, in the middle of windows, or while exchanges are under way.

    One process goes on from the mean of all ranks' weights.
    """
    saved_after = 4
    chosen = {name: how for name, how in AVERAGED.items() if name not in LIKE_OTHERS}
    whole = {name: Member(*how, comm) for name, how in chosen.items()}
    train([*whole.values()], range(saved_after))
    rows = {name: gathered(comm, member.flat) for name, member in whole.items()}
    with shared_folder(comm) as folder:
        states = {name: member.state() for name, member in whole.items()}
        dgcopt.checkpoint.save(folder, states, saved_after, comm)
        loaded = dgcopt.checkpoint.load(folder, comm)
        for_one = dgcopt.checkpoint.load(folder, LocalComm())
    assert loaded is not None and for_one is not None
    resumed = {name: Member(*how, comm) for name, how in chosen.items()}
    train([*resumed.values()], range(50, 52))  # an optimizer that has been used forgets what it was
    for name, member in resumed.items():
        member.load(loaded[1][name])
    train([*whole.values(), *resumed.values()], range(saved_after, STEPS))
    for name, member in resumed.items():
        # libraries add up in another order from one time to the next
        assert_close([member.flat], [whole[name].flat], 1e-12, name)
        assert member.averaging.step == whole[name].averaging.step == STEPS
    for name in [*chosen][comm.rank :: comm.size]:
        alone = Member(*chosen[name], LocalComm())
        alone.load(for_one[1][name])
        alone.averaging.average()
        assert_close([alone.flat], [rows[name].mean(0)], 1e-9, f"{name}, in one process")
        train([alone], range(saved_after, STEPS))
        assert bool(alone.flat.isfinite().all())


def ranks_come_and_go(comm: Comm) -> None:
    """`rejoin`, in the middle of a window: the next step is made from the mean of the weights that there are."""
    mine = Member(LocalSGD(4), PLAIN, comm)
    for where in (comm, LocalComm(), comm):
        train([mine], range(2))
        center = gathered(comm, mine.flat).mean(0) if where.size > 1 else mine.flat
        mine.averaging.rejoin(where)
        mine.optimizer.param_groups[0]["lr"] = 0.0
        train([mine], range(2, 3))
        assert_close([mine.flat], [center], 1e-12, f"rejoined {where.wire}")
        mine.optimizer.param_groups[0]["lr"] = 0.1
        train([mine], range(3, 4))
        assert torch.equal(*gathered(comm, mine.flat)[:2]) == (where.size > 1), "after the fourth step"
    assert mine.averaging.step == 12
