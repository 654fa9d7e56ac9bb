"""Weights that are not finite, ranks that idle, and threads that fail."""

from __future__ import annotations

import math
import os
import time
from pathlib import Path

import pytest
from torch import Tensor

import dgcopt
from dgcopt import Comm
from dgcopt.collectives import Exchange

from .registry import Scenario, registered_in
from .replica import PATIENCE, Counted, Replica, Told, impatient

SCENARIOS: dict[str, Scenario] = {}
scenario = registered_in(SCENARIOS)


@scenario
def not_finite(comm: Comm) -> None:
    """No rank takes it over; all of them say where it is, and can go on from a checkpoint."""
    mine = Replica(comm)
    mine.step()
    state = mine.optimizer.state_dict()
    if comm.rank == comm.size - 1:
        mine.model[2].bias.data[1] = math.nan
    with pytest.raises(
        dgcopt.DivergenceError, match=rf"AsyncAverage has stopped: .* weights of rank\(s\) \[{comm.size - 1}\] hold"
    ):
        mine.until(lambda: False)
    if comm.rank < comm.size - 1:
        assert mine.flat().isfinite().all()
    mine.model[2].bias.data.zero_()
    mine.optimizer.load_state_dict(state)
    seen = mine.count
    mine.until(lambda: mine.count > seen)
    mine.rounds.abort()


@scenario
def an_idle_rank(comm: Comm) -> None:
    """One that evaluates until all others have waited for longer than their deadline: its thread goes on."""
    mine, told = Replica(comm.among(range(comm.size))), Told()
    told.note = Path(os.environ["DGCOPT_TEST_RECORDS"]) / f"waits {comm.rank}"
    mine.step()
    seen, others = mine.count, [told.note.with_name(f"waits {rank}") for rank in range(1, comm.size)]
    mine.comm.deadline = 0.2  # of the training's thread; that of the exchanges is what it was
    if comm.rank == 0:
        end = time.monotonic() + PATIENCE
        while mine.count <= seen + 10 or not all(other.exists() for other in others):
            assert time.monotonic() < end, "its thread stands still, or nobody says that he waits"
            time.sleep(0.01)
    mine.rounds.abort()
    assert mine.count > seen + 10
    waited = f"rank {comm.rank} exchanges weights until rank(s) [0], which are alive, also call abort() or end"
    assert set(told.lines) == ({waited} if comm.rank else set())


@scenario
def some_of_the_ranks(comm: Comm) -> None:
    """Only MPI makes the thread a group of them."""
    part = comm.among([0, comm.size - 1])
    if 1 < part.size < comm.size and comm.wire != "mpi":
        with pytest.raises(
            dgcopt.ConfigError, match=rf"second group of the same {part.size} ranks.*ask the comm of all"
        ):
            Replica(part)
    elif part.size > 1:
        mine = Replica(part)
        mine.until(lambda: mine.count > 1)
        mine.rounds.abort()


@scenario
def a_thread_that_fails(comm: Comm) -> None:
    """Its rank says so in the next step, and in each that follows; the others once they have waited for it."""

    class Failing(Counted):
        def exchange(self, x: Tensor, ctx: dgcopt.averaging.Weights) -> Exchange:
            if self._count == 2:
                mine.rounds.background.scheduler.comm.deadline = 0.5  # so long do the others wait in vain
                if ctx.rank == ctx.size - 1:
                    raise ZeroDivisionError("the thread had enough")
            return (yield from super().exchange(x, ctx))

    mine = Replica(impatient(comm, 5.0), Failing())  # what the library has begun goes on for so long
    if comm.rank == comm.size - 1:
        error = pytest.raises(dgcopt.CommError, match="AsyncAverage has stopped: the thread had enough")
    else:
        error = pytest.raises(dgcopt.CommError, match=rf"has stopped: rank {comm.rank}.*AllReduce.*bucket 0")
    with error:
        mine.until(lambda: False)
    with pytest.raises(dgcopt.CommError, match="AsyncAverage has stopped"):
        mine.step()
