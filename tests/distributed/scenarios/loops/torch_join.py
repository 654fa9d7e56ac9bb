"""torch's Join around our optimizer, and ours around what takes part in torch's."""

from __future__ import annotations

import functools
from typing import Any

import torch
from torch.nn.functional import mse_loss

import dgcopt
from dgcopt import DGC, Comm
from tests.support.wires import HOROVOD, only

from ..persistence import shared_folder
from ..training import assert_close, batch, make_model, refused
from .pair import SGD, Loop, wrap
from .uneven_data import batches_of


@only(wires=["horovod-gloo", "mpi"], sizes=[2])
def join_with_one_of_torchs(comm: Comm) -> Loop:
    """In one loop with what takes part in torch's Join, in a process group beside this wire."""
    import torch.distributed as dist
    from torch.distributed.algorithms import Join, JoinHook
    from torch.distributed.algorithms.join import Joinable

    class Served(JoinHook):
        def __init__(self, counter: Any) -> None:
            self.counter = counter

        def main_hook(self) -> None:
            dist.all_reduce(torch.zeros(1))

        def post_hook(self, is_last_joiner: bool) -> None:
            self.counter.was_last = is_last_joiner

    class Counter(Joinable):
        """Counts the batches of all ranks, as torch's documentation shows."""

        def __init__(self) -> None:
            super().__init__()
            self.count = 0.0

        @property
        def join_device(self) -> torch.device:
            return torch.device("cpu")

        @property
        def join_process_group(self) -> Any:
            return dist.group.WORLD

        def join_hook(self, **kwargs: Any) -> JoinHook:
            assert kwargs == {"divide_by_initial_world_size": False}
            return Served(self)

        def one_more(self) -> None:
            Join.notify_join_context(self)
            total = torch.ones(1)
            dist.all_reduce(total)
            self.count += float(total)

    with shared_folder(comm) as folder:
        dist.init_process_group("gloo", f"file://{folder}/store", rank=comm.rank, world_size=comm.size)
        counter, models = Counter(), []
        for together in (True, False):
            models.append(make_model())
            optimizer = wrap(SGD(models[-1].parameters()), models[-1], comm, DGC(0.3, values="fp64"))
            with dgcopt.join(counter, optimizer) if together else dgcopt.join(optimizer):
                for step in range(batches_of(comm.rank)):
                    if together:
                        counter.one_more()
                    optimizer.zero_grad()
                    x, y = batch(step, 0, comm)
                    mse_loss(models[-1](x), y).backward()
                    optimizer.step()
        assert counter.count == sum(min(batches_of(comm.rank), batches_of(rank)) for rank in range(comm.size))
        assert counter.was_last == (comm.rank == comm.size - 1)
        assert_close(list(models[0].parameters()), list(models[1].parameters()), 1e-9, "with one of torch's")
        with refused(comm, dgcopt.ConfigError, "(Counter) first"), dgcopt.join(optimizer, counter):
            raise AssertionError("entered")
        dist.destroy_process_group()
    yield


@only(wires=["torch"])
def torch_join(comm: Comm) -> Loop:
    """torch's own Join takes our optimizer; averages divide by all ranks unless it is told otherwise, as in DDP.

    So does ours, and either may be given one that shares out its state: by itself, torch's ZeroRedundancyOptimizer goes
    on with the last gradient of a rank that has run out of data.
    """
    from torch.distributed.algorithms import Join
    from torch.distributed.optim import ZeroRedundancyOptimizer

    sharded = functools.partial(ZeroRedundancyOptimizer, optimizer_class=torch.optim.SGD, **SGD.keywords)
    told = {"divide_by_initial_world_size": True}, {"divide_by_initial_world_size": False}
    for kind, join, by_all in (
        (SGD, lambda ours: Join([ours]), True),
        (SGD, lambda ours: Join([ours], **told[0]), True),
        (SGD, lambda ours: Join([ours], **told[1]), False),
        (sharded, lambda ours: Join([ours]), True),
        (sharded, dgcopt.join, False),
    ):
        whole, mine = make_model(), make_model()
        bare = SGD(whole.parameters())
        ours = wrap(kind(mine.parameters()), mine, comm)
        for step in range(batches_of(comm.size - 1)):
            bare.zero_grad()
            active = [rank for rank in range(comm.size) if step < batches_of(rank)]
            for rank in active:
                x, y = batch(step, 0, None)
                loss = mse_loss(whole(x[rank :: comm.size]), y[rank :: comm.size])
                (loss / (comm.size if by_all else len(active))).backward()
            bare.step()
        with join(ours):
            for step in range(batches_of(comm.rank)):
                ours.zero_grad()
                x, y = batch(step, 0, comm)
                mse_loss(mine(x), y).backward()
                ours.step()
        assert_close(list(mine.parameters()), list(whole.parameters()), 1e-9, f"{kind}, divided by all: {by_all}")
    alone = sharded(make_model().parameters())
    with refused(comm, dgcopt.ConfigError, "last batch", "DistributedOptimizer"), dgcopt.join(ours, alone):
        raise AssertionError("entered")
    yield


@only(wires=[*HOROVOD, "mpi", "simulated"], sizes=range(2, 2**10))
def torch_join_elsewhere(comm: Comm) -> Loop:
    """Refused before the first batch, with what to use."""
    from torch.distributed.algorithms import Join

    model = make_model()
    optimizer = wrap(SGD(model.parameters()), model, comm)
    with refused(comm, dgcopt.ConfigError, "dgcopt.join"):
        Join([optimizer])
    yield
