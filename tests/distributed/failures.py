"""What goes wrong in a user's script, on the last rank; nothing here is caught, as nothing would be there."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import time
from collections.abc import Iterable

import torch
from torch import Tensor, nn

import dgcopt
from dgcopt import DGC, Comm, hvd
from dgcopt.tuning.probe import probe
from tests.distributed.scenarios.asynchronous.replica import Replica as AsynchronousReplica
from tests.distributed.scenarios.training import TINY, Recipe, Replica, train

FROZEN = {"torch": 15}
"""Seconds after which a frozen rank is ended: torchrun waits for it, the other launchers do not."""


def replica(comm: Comm) -> Replica:
    def sgd(named: Iterable[tuple[str, Tensor]]) -> torch.optim.Optimizer:
        return torch.optim.SGD([param for _, param in named], lr=0.1)

    return Replica(Recipe(sgd, compression=DGC(0.1), buckets=(*TINY.items(),)), comm)


def is_last(comm: Comm) -> bool:
    return comm.rank == comm.size - 1


def other_shape(comm: Comm) -> None:
    model = nn.Sequential(nn.Linear(2, 4 if is_last(comm) else 3))
    dgcopt.DistributedOptimizer(torch.optim.SGD(model.parameters(), 0.1), model.named_parameters(), comm=comm)


def raises(comm: Comm) -> None:
    mine = replica(comm)
    train([mine], range(2))
    mine.backward(2)
    if is_last(comm):
        raise ZeroDivisionError("the last rank had enough")
    mine.step(2)


def raises_while_weights_are_averaged(comm: Comm) -> None:
    mine = AsynchronousReplica(comm)
    for step in range(200):
        mine.step()
        time.sleep(0.01)
        if step == 20 and is_last(comm):
            raise ZeroDivisionError("the last rank had enough")


def probes_alone(comm: Comm) -> None:
    """As with `if rank == 0:` around the measurement of a link."""
    if is_last(comm):
        time.sleep(60)
    else:
        probe(comm, deadline=3)


def takes_another_path(comm: Comm) -> None:
    """As with `if rank == 0:` around what all ranks must call."""
    mine = replica(comm)
    train([mine], range(2))
    if is_last(comm):
        dgcopt.check_replicas({"weight": torch.ones(3)})
    train([mine], range(2, 4))


def scales_otherwise(comm: Comm) -> None:
    hvd.init()
    hvd.allreduce(torch.ones(2), op=hvd.Sum, prescale_factor=2 - is_last(comm), name="loss")


def reduces_another_number(comm: Comm) -> None:
    hvd.init()
    started = hvd.grouped_allreduce_async([torch.ones(2)] * (3 if is_last(comm) else 2))
    total = hvd.allreduce(torch.full((2,), 10.0), op=hvd.Sum)
    assert total.tolist() == [10 * comm.size] * 2, "it met a tensor of the group"
    hvd.synchronize(started)


def sleeps(comm: Comm) -> None:
    mine = replica(comm)
    train([mine], range(2))
    if is_last(comm):
        time.sleep(120)
    train([mine], range(2, 4))


def freezes(comm: Comm) -> None:
    """Not even the library's own threads go on, as when a machine dies."""
    mine, frozen = replica(comm), FROZEN.get(comm.wire, 60)
    train([mine], range(2))
    if is_last(comm):
        me = os.getpid()
        records = os.environ["DGCOPT_TEST_RECORDS"]
        note = json.dumps({"scenario": "was still frozen", "rank": comm.rank})
        wake = f"sleep {frozen}; kill -0 {me} && echo '{note}' >{records}/rank-{comm.rank}.jsonl; kill -KILL {me}"
        apart = {"stdout": subprocess.DEVNULL, "stderr": subprocess.DEVNULL, "env": {"PATH": os.environ["PATH"]}}
        subprocess.Popen(["sh", "-c", wake], start_new_session=True, **apart)
        os.kill(me, signal.SIGSTOP)
    train([mine], range(2, 4))


def dies(comm: Comm) -> None:
    mine = replica(comm)
    train([mine], range(2))
    if is_last(comm):
        os.kill(os.getpid(), signal.SIGKILL)
    train([mine], range(2, 4))


def has_fewer_batches(comm: Comm) -> None:
    mine = replica(comm)
    train([mine], range(2 if is_last(comm) else 3))
