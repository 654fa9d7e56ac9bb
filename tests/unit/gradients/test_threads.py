"""Gradients that come in from several threads: as autograd has one for each device, and as users may start them."""

from __future__ import annotations

import functools
import sys
import threading
import time
from collections.abc import Callable, Iterator

import pytest
import torch
from torch import Tensor, nn

import dgcopt
from dgcopt.gradients.engine import Engine
from dgcopt.gradients.synchronised import synchronised

WIDTH, DEPTH = 8, 40


@pytest.fixture(autouse=True)
def turns_change_often() -> Iterator[None]:
    """So that threads come between any two lines of each other."""
    before = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    yield
    sys.setswitchinterval(before)


def make_model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(*(nn.Linear(WIDTH, WIDTH) for _ in range(DEPTH)))


def at_once(*calls: Callable[[], object]) -> None:
    """Run calls in a thread each; raises what they raise."""
    errors: list[BaseException] = []

    def run(call: Callable[[], object]) -> None:
        try:
            start.wait()
            call()
        except BaseException as error:
            errors.append(error)

    start = threading.Barrier(len(calls))
    threads = [threading.Thread(target=run, args=(call,)) for call in calls]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if errors:
        raise errors[0]


def one_by_one(*calls: Callable[[], object]) -> None:
    for call in calls:
        call()


def inputs_of(step: int, rank: int, part: int) -> Tensor:
    return torch.randn(4, WIDTH, generator=torch.Generator().manual_seed(100 * step + 10 * rank + part))


def backward(model: nn.Module, step: int, rank: int, part: int) -> None:
    (1e3 * model(inputs_of(step, rank, part))).sum().backward()


def arrive(model: nn.Module, optimizer: torch.optim.Optimizer, step: int, rank: int, part: int) -> None:
    """What autograd does in the thread of one of two devices: every other parameter's gradient, the last one first."""
    for param in reversed([*model.parameters()][part::2]):
        param.grad = torch.full_like(param, 1.0 + step + rank + part)
        synchronised(optimizer).gradient_arrived(param)


def train(how: str, run: Callable[..., None]) -> list[Tensor]:
    """Steps of two ranks, on each of which gradients come in from two threads, or as much from one."""
    comms = dgcopt.simulated_world(2)
    models = [[make_model() for _ in range(2 if how == "two models" else 1)] for _ in comms]
    optimizers = [
        [
            dgcopt.DistributedOptimizer(
                torch.optim.SGD(model.parameters(), lr=1e-6, momentum=0.9),
                model.named_parameters(),
                dgcopt.DGC(0.1, overlap=True),
                comm=comm,
                bucket_mb=1e-3,
                first_bucket_mb=1e-3,
            )
            for model in mine
        ]
        for comm, mine in zip(comms, models, strict=True)
    ]
    for step in range(4):
        for rank, (mine, of_rank) in enumerate(zip(models, optimizers, strict=True)):
            for optimizer in of_rank:
                optimizer.zero_grad()
            pairs = [(mine[-part], of_rank[-part]) for part in range(2)]
            together = run if step else one_by_one  # the first step learns the order of gradients
            if how == "two devices":
                together(*(functools.partial(arrive, *pair, step, rank, part) for part, pair in enumerate(pairs)))
            else:
                together(
                    *(functools.partial(backward, model, step, rank, part) for part, (model, _) in enumerate(pairs))
                )
        for place in range(len(optimizers[0])):
            for of_rank in optimizers:
                of_rank[place].step()
    for mine in zip(*models, strict=True):
        assert all(map(torch.equal, mine[0].parameters(), mine[1].parameters())), "replicas differ"
    return [param.detach() for model in models[0] for param in model.parameters()]


@pytest.mark.parametrize("how", ["two models", "one model", "two devices"])
def test_gradients_from_two_threads_make_the_same_steps_as_from_one(how: str) -> None:
    expected = train(how, one_by_one)
    for _ in range(3):
        assert all(map(torch.equal, train(how, at_once), expected))


def test_one_thread_at_a_time_takes_gradients_in(monkeypatch: pytest.MonkeyPatch) -> None:
    arrived, inside, most = Engine.arrived, [0], [0]

    def slowly(engine: Engine, param: Tensor) -> None:
        inside[0] += 1
        most[0] = max(most[0], inside[0])
        time.sleep(1e-3)  # another thread comes meanwhile, if it can
        arrived(engine, param)
        inside[0] -= 1

    monkeypatch.setattr(Engine, "arrived", slowly)
    train("two devices", at_once)
    assert most == [1]
