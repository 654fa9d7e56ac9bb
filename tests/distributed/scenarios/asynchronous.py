"""Averaging in a thread of its own: what is promised while steps and exchanges fall as they like."""

from __future__ import annotations

import logging
import math
import os
import threading
import time
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

import dgcopt
from dgcopt import Comm
from dgcopt.averaging.asynchronous import AsyncAverage, AsyncRounds
from dgcopt.collectives import AllGather, AllReduce, Barrier, Exchange

Scenario = Callable[[Comm], None]
SCENARIOS: dict[str, Scenario] = {}
INTERVAL = 0.01
PATIENCE = 30


def scenario(run: Scenario) -> Scenario:
    SCENARIOS["asynchronous: " + run.__name__.replace("_", " ")] = run
    return run


# -- a replica, its thread, and how to look at them -------------------------------------------------------------------


class Counted(AsyncAverage):
    """Counts its exchanges, each of one bucket, and can hold them between their sum and their end."""

    def __init__(self, interval: float = INTERVAL, warmup_steps: int = 0) -> None:
        super().__init__(interval, warmup_steps)
        self._count = 0
        self._copies: list[Tensor] = []

    def exchange(self, x, ctx) -> Exchange:
        own = x.clone()
        result = yield from super().exchange(x, ctx)
        self._copies.append(own)
        self._count += 1
        for _ in range(100 * PATIENCE):
            if self._count <= OPEN[0]:
                break
            time.sleep(0.01)
        return result


OPEN = [math.inf]
"""So many exchanges may come to their end."""


class Replica:
    """Two layers, trained on gradients that differ over ranks and steps."""

    def __init__(self, comm: Comm, rule: AsyncAverage | None = None, lr: float = 0.1) -> None:
        torch.manual_seed(1)
        self.comm = comm
        self.model = nn.Sequential(nn.Linear(6, 5), nn.Tanh(), nn.Linear(5, 3)).double()
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=lr)
        (rule or Counted()).attach(self.optimizer, self.model.named_parameters(), comm)
        self.updates = torch.zeros_like(self.flat())

    @property
    def rounds(self) -> AsyncRounds:
        return self.optimizer.averaging

    @property
    def count(self) -> int:
        return self.rounds.rule._count

    def flat(self) -> Tensor:
        return torch.cat([param.detach().reshape(-1) for param in self.model.parameters()])

    def step(self, value: float | None = None) -> None:
        """A step along random gradients, or such as to add `value` to every weight; how far is kept in `updates`."""
        generator = torch.Generator().manual_seed(1000 * self.comm.rank + self.rounds.step)
        (group,) = self.optimizer.param_groups
        for param in self.model.parameters():
            param.grad = torch.randn(param.shape, generator=generator, dtype=param.dtype)
            if value is not None:
                param.grad.fill_(-value / group["lr"])
            if not param.requires_grad:
                param.grad.zero_()
        self.updates -= group["lr"] * torch.cat([param.grad.reshape(-1) for param in self.model.parameters()])
        self.optimizer.step()

    def until(self, condition: Callable[[], bool]) -> None:
        """Step without moving until it holds, as others' threads get there."""
        deadline = time.monotonic() + PATIENCE
        while not condition():
            assert time.monotonic() < deadline, "it never came"
            self.step(0.0)
            time.sleep(0.002)

    def wait_for_exchanges(self, number: int = 2) -> None:
        """Until so many have come to their end, without a step."""
        seen, deadline = self.count, time.monotonic() + PATIENCE
        while self.count < seen + number:
            assert time.monotonic() < deadline, "they never came"
            time.sleep(0.002)

    def mean(self, x: Tensor) -> Tensor:
        return self.comm.run(AllReduce(x.clone()))


class Told(logging.Handler):
    """What dgcopt logs from now on."""

    def __init__(self) -> None:
        super().__init__()
        self.lines: list[str] = []
        self.note: Path | None = None  # is there as soon as something is
        logging.getLogger("dgcopt").addHandler(self)

    def emit(self, record: logging.LogRecord) -> None:
        self.lines.append(record.getMessage().removeprefix("dgcopt: "))
        if self.note is not None:
            self.note.touch()


def impatient(comm: Comm, deadline: float) -> Comm:
    """The same ranks, which wait for each other no longer than that."""
    usual, comm.deadline = comm.deadline, deadline
    try:
        return comm.among(range(comm.size))
    finally:
        comm.deadline = usual


# -- what is promised -------------------------------------------------------------------------------------------------


@scenario
def no_update_is_lost(comm: Comm) -> None:
    """However steps and exchanges fall: the mean of all weights is where the mean of all updates has moved it."""
    mine = Replica(comm)
    start = mine.flat()
    steps = 0
    while steps < 200 or mine.count <= 5:
        assert steps < 100_000, "weights are not exchanged"
        mine.step()
        time.sleep(0.001 * (1 + comm.rank))
        steps += 1
    mine.rounds.abort()
    assert comm.run(AllGather(torch.tensor([mine.count]))).unique().numel() == 1
    assert (mine.flat() - start - mine.updates).norm() > 1e-3, "nothing came from other ranks"
    expected = start + mine.mean(mine.updates)
    torch.testing.assert_close(mine.mean(mine.flat()), expected, rtol=1e-12, atol=1e-12)

    # apart once more, they stand still and so come together
    mine.step()
    assert mine.rounds.consensus_distance() > 1e-3
    expected = start + mine.mean(mine.updates)
    mine.rounds.resume()
    seen = mine.count
    mine.until(lambda: mine.count > seen + 1)
    mine.rounds.abort()
    assert mine.rounds.consensus_distance() < 1e-12
    torch.testing.assert_close(mine.flat(), expected, rtol=1e-12, atol=1e-12)


@scenario
def the_thread_uses_the_device_of_the_weights(comm: Comm) -> None:
    """A thread begins on device 0, and NCCL's groups are of the device that is current."""
    entered, device_of = [], torch.cuda.device_of
    torch.cuda.device_of = lambda x: entered.append((threading.current_thread().name, x)) or device_of(x)
    try:
        mine = Replica(comm)
        mine.until(lambda: mine.count > 0)
        mine.rounds.abort()
    finally:
        torch.cuda.device_of = device_of
    params = set(mine.model.parameters())
    assert [x in params for name, x in entered if name == "dgcopt AsyncAverage"] == [True], entered


@scenario
def updates_made_meanwhile(comm: Comm) -> None:
    """Weights and updates that binary fractions hold exactly, and an exchange held until some steps have been made."""
    mine, me, size = Replica(comm, lr=1.0), comm.rank + 1, comm.size
    for param in mine.model.parameters():
        param.data.zero_()
    mine.rounds.abort()
    mine.step(me)
    OPEN[0] = 0
    mine.rounds.resume()
    mine.until(lambda: mine.count == 1)
    assert (mine.rounds.rule._copies[0] == 0).logical_or(mine.rounds.rule._copies[0] == me).all()
    mine.step(8 * me)
    mine.step(12 * me)
    assert (mine.flat() == 21 * me).all(), "something came before the exchange was over"
    OPEN[0] = 1
    mine.until(lambda: bool((mine.flat() != 21 * me).all()) or 2 * me == size + 1)
    if 2 * me != size + 1:
        assert (mine.flat() == 21 * me + (size + 1) / 2 - me).all()
    OPEN[0] = math.inf
    mine.until(lambda: bool((mine.flat() == 21 * (size + 1) / 2).all()))
    mine.rounds.abort()
    assert (mine.flat() == 21 * (size + 1) / 2).all()


@scenario
def between_two_steps(comm: Comm) -> None:
    """Weights stand still, however many exchanges there are; and all of these together make the mean."""
    mine, size = Replica(comm, lr=1.0), comm.size
    for param in mine.model.parameters():
        param.data.zero_()
    mine.rounds.abort()
    mine.step(comm.rank + 1)
    mine.rounds.resume()
    loss = mine.model(torch.ones(1, 6, dtype=torch.float64)).sum()
    mine.wait_for_exchanges(4)
    assert (mine.flat() == comm.rank + 1).all()
    loss.backward()
    mine.step(0.0)
    assert (mine.flat() == (size + 1) / 2).all()
    mine.rounds.abort()


@scenario
def within_a_step(comm: Comm) -> None:
    """What an optimizer only tries is seen by nobody, and a step that fails does not keep the others waiting."""
    mine = Replica(comm)
    far = 1e6

    def closure() -> float:
        for sign in (1, -1):
            for param in mine.model.parameters():
                param.data.add_(sign * far)
            time.sleep(5 * INTERVAL * (sign == 1))
        return 0.0

    for _ in range(3):
        mine.optimizer.step(closure)
        mine.wait_for_exchanges()
    assert max(float(x.abs().max()) for x in mine.rounds.rule._copies) < far / 2
    with pytest.raises(ZeroDivisionError):
        mine.optimizer.step(lambda: 1 / 0)
    mine.rounds.abort()


@scenario
def abort_and_resume(comm: Comm) -> None:
    mine = Replica(comm)
    before = threads()
    for turn in range(5):
        mine.step()
        assert threads() == before + 1
        mine.until(lambda seen=mine.count: mine.count > seen)
        mine.rounds.abort()
        if turn == 2:
            mine.rounds.abort()
        assert threads() == before
        own, seen = mine.flat(), mine.count
        mine.step(0.0)
        time.sleep(3 * INTERVAL)
        mine.step(0.0)
        assert torch.equal(mine.flat(), own) and mine.count == seen
        mine.rounds.resume()
        if turn == 2:
            mine.rounds.resume()
    mine.rounds.abort()


@scenario
def bytes_are_counted(comm: Comm) -> None:
    """Each exchange sends four blocks of 64 weights, and every round a byte."""
    mine = Replica(comm)
    mine.rounds.abort()
    before = mine.rounds.telemetry.payload_bytes
    mine.rounds.resume()
    mine.until(lambda: mine.count >= 3)
    mine.rounds.abort()
    told, waited = mine.rounds.telemetry, mine.rounds.background.scheduler.telemetry.wait_seconds
    assert told.payload_bytes - before == mine.count * 4 * 64 * 8 + mine.count + 1
    assert told.sent_bytes > 0 and told.steps == mine.rounds.step
    assert waited > 0 and told.wait_seconds == mine.rounds.runner.scheduler.telemetry.wait_seconds, (
        "no step waits for it"
    )


@scenario
def beside_other_collectives(comm: Comm) -> None:
    """Those of the script and those of the thread, of the same kind and size, are not taken for each other."""
    mine = Replica(comm, Counted(interval=1e-3))
    mine.step()
    for turn in range(100):
        x = torch.full((256,), float(turn + comm.rank), dtype=torch.float64)
        assert (comm.run(AllReduce(x)) == turn + (comm.size - 1) / 2).all()
        flag = torch.tensor([turn + comm.rank], dtype=torch.uint8)
        assert comm.run(AllGather(flag, group="control")).flatten().tolist() == [turn + r for r in range(comm.size)]
        assert mine.rounds.consensus_distance() < 1
    mine.wait_for_exchanges(10)
    mine.rounds.abort()


@scenario
def warm_up(comm: Comm) -> None:
    """Dense data-parallel training, bit by bit, and no thread; which then begins with the same weights."""
    mine, dense = Replica(comm, Counted(warmup_steps=6)), Replica.__new__(Replica)
    before = threads()
    torch.manual_seed(1)
    dense.model = nn.Sequential(nn.Linear(6, 5), nn.Tanh(), nn.Linear(5, 3)).double()
    named = dense.model.named_parameters()
    dense.optimizer = dgcopt.DistributedOptimizer(torch.optim.SGD(dense.model.parameters(), lr=0.1), named, comm=comm)
    for step in range(6):
        generator = torch.Generator().manual_seed(100 * step + comm.rank)
        inputs = torch.randn(4, 6, generator=generator, dtype=torch.float64)
        for replica in (mine, dense):
            replica.optimizer.zero_grad()
            replica.model(inputs).square().sum().backward()
            replica.optimizer.step()
        assert torch.equal(mine.flat(), dense.flat())
        assert threads() == before and mine.count == 0
    dgcopt.check_replicas(mine.model.state_dict(), comm=comm)
    mine.step()
    assert threads() == before + 1
    mine.until(lambda: mine.count > 1)
    mine.rounds.abort()


@scenario
def weights_to_evaluate(comm: Comm) -> None:
    mine = Replica(comm)
    for _ in range(20):
        mine.step()
    assert math.isfinite(mine.rounds.consensus_distance())
    mine.rounds.abort()
    mine.step()
    own = mine.flat()
    mine.rounds.resume()
    with mine.rounds.averaged():
        dgcopt.check_replicas(mine.model.state_dict(), comm=comm)
        during, seen = mine.flat(), mine.count
        time.sleep(3 * INTERVAL)
        assert torch.equal(mine.flat(), during) and mine.count == seen
    assert mine.flat().shape == own.shape
    mine.until(lambda: mine.count > seen)
    mine.step()
    mine.rounds.average()
    dgcopt.check_replicas(mine.model.state_dict(), comm=comm)
    with pytest.raises(ZeroDivisionError), mine.rounds.averaged():
        raise ZeroDivisionError
    assert mine.rounds.background.is_running is False


@scenario
def a_checkpoint_is_loaded(comm: Comm) -> None:
    """What was on its way to the weights before does not touch those that were loaded."""
    mine = Replica(comm)
    for _ in range(20):
        mine.step()
    model = {name: tensor.clone() for name, tensor in mine.model.state_dict().items()}
    state, saved = mine.optimizer.state_dict(), mine.flat()
    mine.step(0.1 * comm.rank)
    mine.wait_for_exchanges()
    mine.model.load_state_dict(model)
    mine.optimizer.load_state_dict(state)
    assert torch.equal(mine.flat(), saved) and mine.rounds.background.is_running is False
    mine.rounds.abort()
    mine.step(0.0)
    assert torch.equal(mine.flat(), saved)
    mine.rounds.resume()
    mine.wait_for_exchanges()
    mine.rounds.abort()


@scenario
def other_parameters(comm: Comm) -> None:
    """What is frozen on the way still comes together; what is trained anew is exchanged from `resume()` on."""
    mine = Replica(comm)
    weight, bias = mine.model[0].weight, mine.model[0].bias
    mine.rounds.abort()
    bias.requires_grad_(False)
    mine.rounds.resume()
    mine.step(comm.rank)
    weight.requires_grad_(False)
    comm.run(Barrier())
    mine.wait_for_exchanges(3)  # one that began before, one, and one that begins after it
    mine.step(0.0)
    torch.testing.assert_close(weight.detach(), mine.mean(weight.detach()), rtol=0, atol=1e-12)
    bias.requires_grad_(True)
    with pytest.raises(dgcopt.ConfigError, match=r"the trained parameters changed.*abort\(\)"):
        mine.step()
    mine.rounds.abort()
    mine.rounds.resume()
    mine.step(comm.rank)
    comm.run(Barrier())
    mine.wait_for_exchanges(3)
    mine.rounds.abort()
    torch.testing.assert_close(bias.detach(), mine.mean(bias.detach()), rtol=0, atol=1e-12)
    if comm.rank == 0:
        bias.requires_grad_(False)
    with pytest.raises(dgcopt.MismatchError, match=r"parameter 0\.bias.*frozen"):
        mine.rounds.resume()


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


# -- what ends a script -----------------------------------------------------------------------------------------------


def threads() -> int:
    """How many threads of this process exchange weights."""
    return sum(thread.name == "dgcopt AsyncAverage" for thread in threading.enumerate())


def leave_while_others_exchange(comm: Comm) -> Replica:
    """A script that ends without `abort()`, the last rank's later than the others': those that are ready wait.

    Returns what must live as long as the script.
    """
    last = Replica(comm)
    for _ in range(100 if comm.rank == comm.size - 1 else 20):
        last.step()
        time.sleep(0.01)
    last.wait_for_exchanges()
    return last
