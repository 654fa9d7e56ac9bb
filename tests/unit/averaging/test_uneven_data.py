"""Averaging while ranks run out of data: weights and buffers are those of the ranks that have some."""

from __future__ import annotations

import contextlib
import functools
from dataclasses import dataclass

import pytest
import torch
from torch import nn
from torch.optim import SGD
from torch.optim.lr_scheduler import ExponentialLR

import dgcopt
from dgcopt import SGP, DiLoCo, LocalSGD, SlowMo
from dgcopt.averaging import Averaging, Graph
from tests.support.averaging import World, assert_worlds_close, plain


class Counting(nn.Module):
    """A weight that each local step raises by one, and a buffer that each forward pass does."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(1, dtype=torch.float64))
        self.register_buffer("seen", torch.zeros(1, dtype=torch.float64))

    def loss(self) -> torch.Tensor:
        self.seen += 1
        return -self.weight.sum()


class Ranks:
    """Ranks that make these numbers of steps, and then serve the others."""

    def __init__(self, rule: Averaging, batches: tuple[int, ...], nodes: int = 1) -> None:
        self.models = [Counting() for _ in batches]
        self.optimizers = []
        for model, comm in zip(self.models, dgcopt.simulated_world(len(batches), nodes), strict=True):
            optimizer = SGD(model.parameters(), lr=1.0, momentum=1e-30)
            rule.attach(optimizer, model.named_parameters(), comm)
            dgcopt.sync_buffers(model, optimizer)
            self.optimizers.append(optimizer)
        with contextlib.ExitStack() as loops:
            ends = [loops.enter_context(contextlib.ExitStack()) for _ in batches]
            for end, optimizer in zip(ends, self.optimizers, strict=True):
                end.enter_context(dgcopt.join(optimizer))
            for step in range(max(batches) + 1):
                for rank, end in enumerate(ends):
                    if batches[rank] == step:
                        end.close()
                for rank, (model, optimizer) in enumerate(zip(self.models, self.optimizers, strict=True)):
                    if step < batches[rank]:
                        optimizer.zero_grad()
                        model.loss().backward()
                        optimizer.step()

    def weights(self) -> list[float]:
        return [model.weight.item() for model in self.models]

    def seen(self) -> list[float]:
        return [model.seen.item() for model in self.models]


@pytest.mark.parametrize("batches", [(8, 16), (16, 8)])
@pytest.mark.parametrize(
    ("rule", "nodes"), [(LocalSGD(8, state_every={"momentum_buffer": 3}), 1), (LocalSGD(8, node_every=2), 2)], ids=str
)
def test_a_round_that_brings_a_rank_without_data_nothing_gives_it_no_weight(
    rule: Averaging, nodes: int, batches: tuple[int, ...]
) -> None:
    """A round of optimizer state, or one inside a machine without data, has no progress for it to spread."""
    ranks = Ranks(rule, batches, nodes)
    assert ranks.weights() == [16.0, 16.0]


@pytest.mark.parametrize("batches", [(8, 16), (16, 8)])
def test_buffers_are_those_of_ranks_that_have_seen_data_since_the_last_exchange(batches: tuple[int, ...]) -> None:
    """A rank without data may hold progress of its machine's others, but its buffers are old."""
    ranks = Ranks(LocalSGD(8, node_every=2), batches)
    assert ranks.seen() == [16.0, 16.0]


@dataclass(frozen=True)
class Star(Graph):
    """Not balanced: rank 0 receives more than the others."""

    def shares(self, rank: int, size: int, round: int) -> dict[int, float]:
        return {0: 0.5} if rank else dict.fromkeys(range(1, size), 0.5 / (size - 1))


@pytest.mark.parametrize("graph", [dgcopt.averaging.Ring(), Star()], ids=str)
def test_ranks_leave_after_a_round_that_has_sent_their_last_steps(graph: Graph) -> None:
    """An unbalanced graph has rounds after other steps too, which send nothing."""
    ranks = Ranks(SGP(graph, every=3), (2, 2, 2))
    assert [optimizer.averaging.step for optimizer in ranks.optimizers] == [3, 3, 3]


def test_an_outer_step_has_the_progress_that_a_rank_without_data_has_loaded() -> None:
    """As a round of local SGD has, which it is with an outer SGD of lr 1."""
    runs = []
    for rule in (LocalSGD(4), DiLoCo(4, functools.partial(SGD, lr=1.0))):
        world = World(2, rule, plain)
        world.load(World(2, rule, plain).train(range(3)).states())
        with dgcopt.join(world.optimizers[0]):
            with dgcopt.join(world.optimizers[1]):
                pass
            world.backward(3)
            world.optimizers[0].step()
        runs.append(world)
    assert_worlds_close(*runs)


@pytest.mark.parametrize("sharded", [True, False])
def test_a_slow_step_has_the_learning_rate_of_ranks_with_data_if_all_count_in_the_mean(sharded: bool) -> None:
    """The schedule of a rank without data stands still, though its weights count."""
    runs = []
    for goes_on in (False, True):
        world = World(2, SlowMo(2, base=LocalSGD(2), sharded=sharded), plain)
        schedules = [ExponentialLR(optimizer, 0.8) for optimizer in world.optimizers]
        with dgcopt.join(world.optimizers[1], divide_by="all"):
            with dgcopt.join(world.optimizers[0], divide_by="all"):
                world.train(range(3))
            for seed in range(3, 9):
                world.backward(seed)
                world.optimizers[1].step()
                for schedule in schedules if goes_on else schedules[1:]:
                    schedule.step()
        runs.append(world)
    assert_worlds_close(*runs, 0)
