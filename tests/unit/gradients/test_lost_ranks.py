"""A step that is aborted because a rank was lost leaves no trace: made again, it has the bits of an undisturbed one."""

from __future__ import annotations

import copy
import functools
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

import dgcopt
from dgcopt.collectives import Collective
from dgcopt.comm import Handle, LocalComm
from dgcopt.errors import CommError, ConfigError
from tests.support.library import SETTINGS

STEPS, LOSSES = 7, (0, 2, 3, 5)


class Losing(LocalComm):
    """One rank whose confirmations fail, once at each of some steps, as if all had lost another rank."""

    survives = True

    def __init__(self, losses: tuple[int, ...], commits_all_the_same: bool = False) -> None:
        super().__init__()
        self.losses = [*losses]
        self.commits_all_the_same = commits_all_the_same
        self.steps_begun = 0

    def begin_step(self) -> None:
        self.steps_begun += 1

    def confirm(self, start: Callable[[Collective, str], Handle]) -> bool:
        if self.commits not in self.losses:
            self.commits += 1
            return True
        self.losses.remove(self.commits)
        if self.commits_all_the_same:
            self.generation, self.commits = self.generation + 1, self.commits + 1
            return False
        raise CommError("a rank is lost")

    def recover(self, error: CommError | None = None) -> None:
        self.generation += 1


def trained(comm: Losing, compressor: Any, kind: Callable[..., Any], bad: int | None = None) -> list[Any]:
    """Train, with an Inf in one step's gradient; return weights and state after every step."""
    torch.manual_seed(3)
    model = nn.Sequential(nn.Linear(24, 40), nn.ReLU(), nn.Linear(40, 5))
    optimizer = dgcopt.DistributedOptimizer(
        kind(model.parameters()), model.named_parameters(), copy.deepcopy(compressor), comm=comm
    )
    told = []
    for step in range(STEPS):
        optimizer.zero_grad()
        model(torch.randn(8, 24)).square().mean().backward()
        if step == bad:
            next(model.parameters()).grad[0, 0] = torch.inf
        optimizer.step()
        state = optimizer.state_dict()
        told.append(copy.deepcopy([[*model.parameters()], state["state"], state["dgcopt"]["memory"]]))
    assert not comm.losses
    return told


def assert_same(one: Any, other: Any, at: str = "") -> None:
    if isinstance(one, torch.Tensor):
        assert torch.equal(one, other), at
    elif isinstance(one, dict):
        assert one.keys() == other.keys(), at
        for key in one:
            assert_same(one[key], other[key], f"{at}/{key}")
    elif isinstance(one, list):
        assert len(one) == len(other), at
        for place, (mine, theirs) in enumerate(zip(one, other, strict=True)):
            assert_same(mine, theirs, f"{at}/{place}")
    else:
        assert one == other, at


@pytest.mark.parametrize("commits_all_the_same", [False, True])
@pytest.mark.parametrize(("compressor", "given"), SETTINGS, ids=lambda value: f"{value}"[:60])
def test_an_aborted_step_leaves_no_trace(compressor: Any, given: dict[str, Any], commits_all_the_same: bool) -> None:
    """For every compressor; also where the step counts although a rank was lost, and after a step with Inf."""
    momentum = 0.0 if isinstance(compressor, dgcopt.DeMo | dgcopt.Signum) else 0.9
    kind = given.get("optimizer", lambda params: torch.optim.SGD(params, lr=0.05, momentum=momentum))
    undisturbed = trained(Losing(()), compressor, kind, bad=3)
    assert_same(trained(Losing(LOSSES, commits_all_the_same), compressor, kind, bad=3), undisturbed)


class LosingVotes(Losing):
    """Fails in the vote instead of at its confirmation."""

    def wait(self, handle: Handle) -> torch.Tensor:
        if self.commits in self.losses and handle.collective.label.endswith(" vote"):
            self.losses.remove(self.commits)
            raise CommError("a rank is lost")
        return super().wait(handle)


@pytest.mark.parametrize("source", ["gradient", "update"])
def test_a_step_that_fails_in_its_vote_leaves_no_trace(source: Any) -> None:
    kind = functools.partial(torch.optim.Adam, lr=0.05)
    undisturbed = trained(Losing(()), dgcopt.TopK(0.1, source=source), kind)
    assert_same(trained(LosingVotes(LOSSES), dgcopt.TopK(0.1, source=source), kind), undisturbed)


def test_two_optimizers_of_one_loop() -> None:
    """Ranks come in before the first of them steps, and in no other place."""
    comm = Losing((1, 4))
    models = [nn.Linear(5, 3), nn.Linear(3, 2)]
    optimizers = [
        dgcopt.DistributedOptimizer(torch.optim.SGD(m.parameters(), lr=0.1), m.named_parameters(), comm=comm)
        for m in models
    ]
    for _ in range(4):
        models[1](models[0](torch.randn(2, 5))).sum().backward()
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
    assert comm.commits == 8
    assert not comm.losses
    assert comm.steps_begun == 4 + 1  # a loss in the first optimizer's step, and none in the second's


def test_closures_are_refused() -> None:
    model = nn.Linear(3, 2)
    optimizer = dgcopt.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.1), comm=Losing(()))
    with pytest.raises(ConfigError, match="call step\\(\\) after backward\\(\\)"):
        optimizer.step(lambda: model(torch.ones(1, 3)).sum())


def test_the_hook_of_ddp_is_refused() -> None:
    with pytest.raises(ConfigError, match="DistributedOptimizer"):
        dgcopt.ddp_hook(dgcopt.DGC(), comm=Losing(()))


def test_nothing_leaves_before_the_vote_nor_after_a_loss() -> None:
    """A loss must fail the step, which is made again, and not backward; ranks that are left compare at the next one."""
    comm, labels = Losing((2,), commits_all_the_same=True), list[str]()
    start = comm.start
    comm.start = lambda collective: labels.append(collective.label) or start(collective)  # type: ignore
    model = nn.Linear(5, 3)
    optimizer = dgcopt.DistributedOptimizer(
        torch.optim.SGD(model.parameters(), lr=0.1),
        model.named_parameters(),
        dgcopt.DGC(0.1, overlap=True),
        comm=comm,
        check_replicas_every=1,
    )
    compared = []
    for _ in range(5):
        labels.clear()
        model(torch.randn(2, 5)).sum().backward()
        assert not labels
        optimizer.step()
        compared.append(any("digests of parameters" in label for label in labels))
    assert compared == [True, True, False, True, True]
