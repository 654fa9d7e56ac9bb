"""An aborted round leaves no trace, and a rank that comes back goes on like the live rank that gave it its state."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import nn

import dgcopt
from dgcopt.errors import ConfigError
from tests.unit.gradients.test_lost_ranks import Losing, assert_same

ROUNDS, EVERY = 6, 3
SUPPORTED = [
    dgcopt.LocalSGD(EVERY),
    dgcopt.SlowMo(EVERY, base=dgcopt.LocalSGD(EVERY), sharded=False),
    dgcopt.DiLoCo(EVERY),
    dgcopt.DiLoCo(EVERY, compression=dgcopt.TopK(0.1), unsent="local"),
    dgcopt.DiLoCo(EVERY, compression=dgcopt.PowerSGD(2), fragments=3, alpha=0.5),
    dgcopt.SparseLoCo(EVERY),
]


class Trained:
    """One rank whose weights are averaged with those of lost ranks."""

    def __init__(self, averaging: dgcopt.Averaging, comm: Losing, dtype: torch.dtype = torch.float32) -> None:
        torch.manual_seed(3)
        self.model = nn.Sequential(nn.Linear(24, 40), nn.ReLU(), nn.Linear(40, 5)).to(dtype)
        bare = torch.optim.SGD(self.model.parameters(), lr=0.05)
        self.optimizer: Any = copy.deepcopy(averaging).attach(bare, self.model.named_parameters(), comm=comm)

    def step(self, seed: int) -> None:
        draw = torch.Generator().manual_seed(seed)
        self.optimizer.zero_grad()
        inputs = torch.randn(8, 24, generator=draw).to(self.model[0].weight.dtype)
        self.model(inputs).square().mean().backward()
        self.optimizer.step()

    def add_layer(self) -> None:
        """Add a layer of fixed weights to the model, and its parameters to the optimizer as a group of their own."""
        torch.manual_seed(4)
        layer = nn.Linear(5, 5)
        self.model.append(layer)
        self.optimizer.add_param_group({"params": [*layer.parameters()], "lr": 0.02})

    def state(self) -> list[Any]:
        return copy.deepcopy([[*self.model.parameters()], self.optimizer.state_dict()["averaging"]])


@pytest.mark.parametrize("commits_all_the_same", [False, True])
@pytest.mark.parametrize("averaging", SUPPORTED, ids=repr)
def test_an_aborted_round_leaves_no_trace(averaging: dgcopt.Averaging, commits_all_the_same: bool) -> None:
    """Made again, it has the bits of an undisturbed one."""
    told = []
    for losses in ((), (0, 1, 3, 5)):
        comm = Losing(losses, commits_all_the_same)
        rank = Trained(averaging, comm)
        told.append([])
        for step in range(ROUNDS * EVERY):
            rank.step(step)
            told[-1].append(rank.state())
        assert not comm.losses
        assert comm.commits >= ROUNDS
        assert rank.optimizer.averaging.telemetry.lost_steps == (0 if commits_all_the_same else len(losses))
    assert_same(*told)


@pytest.mark.parametrize("averaging", SUPPORTED, ids=repr)
def test_a_rank_that_comes_back_goes_on_like_its_giver(averaging: dgcopt.Averaging) -> None:
    """It has the same weights, anchors and outer momentum; its residual is empty."""
    giver, taker = (Trained(averaging, Losing(())) for _ in range(2))
    for step in range(2 * EVERY):
        giver.step(step)
    states = [dgcopt.survive.State(model=one.model, optimizer=one.optimizer) for one in (giver, taker)]
    states[1]._load(copy.deepcopy(states[0]._own()))
    assert taker.optimizer.averaging.residual_norm() == 0
    if giver.optimizer.averaging.residual_norm() > 0:
        return
    for step in range(2 * EVERY, 4 * EVERY):
        giver.step(step)
        taker.step(step)
        assert_same(taker.state(), giver.state())


def test_a_late_rank_keeps_its_residual_and_its_progress() -> None:
    """It has missed a round of the others: what it has not sent yet counts from their anchors on."""
    giver, taker = (Trained(dgcopt.DiLoCo(EVERY, compression=dgcopt.TopK(0.1)), Losing(())) for _ in range(2))
    for step in range(2 * EVERY):
        giver.step(step)
    for step in range(EVERY, 2 * EVERY):
        taker.step(step)
    residual = taker.optimizer.averaging.residual_norm()
    anchors = [param.detach().clone() for param in taker.model.parameters()]
    for step in range(2):
        taker.step(step)
    moved = [param.detach() - anchor for param, anchor in zip(taker.model.parameters(), anchors, strict=True)]
    states = [dgcopt.survive.State(model=one.model, optimizer=one.optimizer) for one in (giver, taker)]
    states[1]._load(copy.deepcopy(states[0]._own()))
    assert taker.optimizer.averaging.residual_norm() == pytest.approx(residual) and residual > 0
    assert taker.optimizer.averaging.state()["since"] == 2, "its progress is not of the steps that it has made"
    for ours, theirs, change in zip(taker.model.parameters(), giver.model.parameters(), moved, strict=True):
        torch.testing.assert_close(ours, theirs + change)


@pytest.mark.parametrize("settings", [{}, {"compression": dgcopt.TopK(0.1), "unsent": "local"}], ids=str)
def test_rounding_of_a_late_rank_is_no_progress(settings: dict[str, Any]) -> None:
    """Weights of half precision are the rounded anchors, where it has made no step since."""
    giver, taker = (Trained(dgcopt.DiLoCo(EVERY, **settings), Losing(()), torch.bfloat16) for _ in range(2))
    for step in range(2 * EVERY):
        giver.step(step)
    for step in range(EVERY):
        taker.step(100 + step)
    states = [dgcopt.survive.State(model=one.model, optimizer=one.optimizer) for one in (giver, taker)]
    states[1]._load(copy.deepcopy(states[0]._own()))
    sync = taker.optimizer.averaging.sync
    assert not any(moved.any() for moved in sync.progress().values())
    if not settings:
        assert all(torch.equal(param, anchor.bfloat16()) for param, anchor in sync.anchors.items())


@pytest.mark.parametrize("averaging", [*SUPPORTED, dgcopt.DiLoCo(EVERY, fragments=3)], ids=repr)
def test_layers_that_are_added_are_lost_and_come_back_like_all_others(averaging: dgcopt.Averaging) -> None:
    """Rounds that fail after `add_param_group` leave no trace; a newcomer that has added the same layer goes on."""
    told: list[list[Any]] = []
    for losses in ((), (0, 3, 4, 7)):
        rank = Trained(averaging, Losing(losses, False))
        told.append([])
        for step in range(2 * ROUNDS * EVERY):
            if step == 2 * EVERY + 1:
                rank.add_layer()
            rank.step(step)
            told[-1].append(rank.state())
        assert not rank.optimizer.averaging.comm.losses
    assert_same(*told)
    newcomer = Trained(averaging, Losing(()))
    newcomer.add_layer()
    states = [dgcopt.survive.State(model=one.model, optimizer=one.optimizer) for one in (rank, newcomer)]
    states[1]._load(copy.deepcopy(states[0]._own()))
    assert_same(newcomer.state()[0], rank.state()[0])
    if rank.optimizer.averaging.residual_norm() == 0:
        for step in range(2 * EVERY):
            rank.step(step)
            newcomer.step(step)
            assert_same(newcomer.state(), rank.state())


@pytest.mark.parametrize(
    ("averaging", "remedy"),
    [
        (dgcopt.LocalSGD(4, node_every=2), "node_every=None"),
        (dgcopt.LocalSGD(4, overlap=True), "overlap=False"),
        (dgcopt.SlowMo(4), "sharded=False"),
        (dgcopt.DiLoCo(4, delay=1), "delay=0"),
        (dgcopt.DiLoCo(4, warmup_steps=2), "warmup_steps=0"),
        (dgcopt.DiLoCo(4, fragments=2, quorum=2), "fragments=1"),
        (dgcopt.SGP(), "LocalSGD, SlowMo or DiLoCo"),
    ],
    ids=repr,
)
def test_refused(averaging: dgcopt.Averaging, remedy: str) -> None:
    """The error names the setting with which ranks may be lost."""
    with pytest.raises(ConfigError, match=remedy):
        Trained(averaging, Losing(()))


def test_join_is_refused() -> None:
    """It would serve the ranks of before the loss."""
    averaged = Trained(dgcopt.LocalSGD(EVERY), Losing(())).optimizer
    model = nn.Linear(3, 2)
    wrapped = dgcopt.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.1), comm=Losing(()))
    for optimizer in (averaged, wrapped):
        with pytest.raises(ConfigError, match="give all ranks the same number of batches"), dgcopt.join(optimizer):
            pass


def test_a_quorum_needs_ranks_that_survive() -> None:
    model = nn.Linear(3, 2)
    comm = dgcopt.simulated_world(2)[0]
    with pytest.raises(ConfigError, match=r"needs dgcopt.init\(survive=True\)"):
        dgcopt.DiLoCo(4, quorum=1).attach(torch.optim.SGD(model.parameters(), lr=0.1), comm=comm)
    for wrong in ({"quorum": 0}, {"quorum": 2, "grace": 0.0}):
        with pytest.raises(ConfigError, match=[*wrong][-1]):
            dgcopt.DiLoCo(4, **wrong)  # type: ignore[arg-type]
