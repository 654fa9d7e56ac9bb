"""DiLoCo whose unsent progress stays in the local weights, against its rule written as matrices, on simulated ranks."""

from __future__ import annotations

import copy
import functools
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.optim import SGD

import dgcopt
from dgcopt import DiLoCo, TopK

SIZE, EVERY, LR = 3, 4, 0.05
TOLERANCE = 1e-6
"""Of weights near 1 in float64; messages are float32."""


class World:
    """Ranks that fit a matrix each to targets of their own, which differ, so that they drift apart."""

    def __init__(self, size: int = SIZE, dtype: torch.dtype = torch.float64, **settings: Any) -> None:
        generator = torch.Generator().manual_seed(0)
        start = torch.randn(8, 5, dtype=dtype, generator=generator)
        self.targets = [torch.randn(8, 5, dtype=dtype, generator=generator) for _ in range(size)]
        self.weights = [nn.Parameter(start.clone()) for _ in range(size)]
        settings = {"every": EVERY, "compression": TopK(0.1), "unsent": "local", **settings}
        self.optimizers: list[Any] = [
            DiLoCo(SGD([weight], lr=LR), [("weight", weight)], comm=comm, **settings)
            for weight, comm in zip(self.weights, dgcopt.simulated_world(size), strict=True)
        ]

    def train(self, steps: int) -> World:
        for _ in range(steps):
            for weight, target in zip(self.weights, self.targets, strict=True):
                weight.grad = weight.detach() - target
            for optimizer in self.optimizers:
                optimizer.step()
        return self

    def values(self) -> Tensor:
        return torch.stack([weight.detach() for weight in self.weights])


def by_the_rule(world: World, rounds: int, lr: float, momentum: float, density: float, decay: float = 1.0) -> Tensor:
    """All ranks' weights after some rounds: those of the anchor less what each rank has not sent."""
    anchor = world.weights[0].detach().clone()
    weights, outer = [anchor.clone() for _ in world.targets], torch.zeros_like(anchor)
    kept = [torch.zeros_like(anchor) for _ in world.targets]
    for _ in range(rounds):
        sent = []
        for rank, target in enumerate(world.targets):
            start = weights[rank].clone()
            for _ in range(EVERY):
                weights[rank] -= LR * (weights[rank] - target)
            moved = decay * kept[rank] + start - weights[rank]
            mask = torch.zeros(anchor.numel(), dtype=torch.bool)
            mask[moved.abs().flatten().topk(round(density * anchor.numel())).indices] = True
            sent.append(moved * mask.view_as(moved))
            kept[rank] = moved - sent[-1]
        mean = torch.stack(sent).mean(0)
        outer = momentum * outer + mean
        anchor = anchor - lr * (mean + momentum * outer)
        weights = [anchor - unsent for unsent in kept]
    return torch.stack(weights)


@pytest.mark.parametrize(("lr", "momentum", "decay"), [(1.0, 0.0, 1.0), (0.7, 0.5, 1.0), (0.7, 0.9, 0.8)])
def test_weights_are_the_anchor_less_the_residual(lr: float, momentum: float, decay: float) -> None:
    outer = functools.partial(SGD, lr=lr, momentum=momentum, nesterov=momentum > 0)
    world = World(outer=outer, compression=TopK(0.1, decay=decay))
    expected = by_the_rule(world, 6, lr, momentum, 0.1, decay)
    found = world.train(6 * EVERY).values()
    torch.testing.assert_close(found, expected, rtol=0, atol=TOLERANCE)
    assert not torch.equal(found[0], found[1])
    norms = [optimizer.averaging.residual_norm() for optimizer in world.optimizers]
    anchor = next(iter(world.optimizers[0].averaging.sync.anchors.values())).detach()
    torch.testing.assert_close(torch.tensor(norms, dtype=torch.float64), (found - anchor).flatten(1).norm(dim=1))


def test_nothing_unsent_is_plain_diloco() -> None:
    ours, dense = World(compression=TopK(1.0)).train(12), World(compression=None, unsent="apart").train(12)
    torch.testing.assert_close(ours.values(), dense.values(), rtol=0, atol=TOLERANCE)


def test_an_outer_step_of_lr_1_leaves_the_mean_of_weights() -> None:
    """Progress is sent or kept, and neither twice."""
    world = World(outer=functools.partial(SGD, lr=1.0))
    for _ in range(3):
        world.train(EVERY - 1)
        mean = world.values().mean(0)
        mean -= LR * (mean - torch.stack(world.targets).mean(0))
        torch.testing.assert_close(world.train(1).values().mean(0), mean, rtol=0, atol=TOLERANCE)


@pytest.mark.parametrize("after", [EVERY, EVERY + 2])
def test_a_checkpoint_goes_on_with_the_same_bits(after: int) -> None:
    settings = {"compression": TopK(0.1), "outer": functools.partial(SGD, lr=0.7, momentum=0.5, nesterov=True)}
    world = World(**settings).train(after)
    states = [copy.deepcopy(optimizer.state_dict()) for optimizer in world.optimizers]
    weights = world.values().clone()
    other = World(**settings)
    for weight, value, optimizer, state in zip(other.weights, weights, other.optimizers, states, strict=True):
        weight.data.copy_(value)
        optimizer.load_state_dict(state)
    assert torch.equal(world.train(7).values(), other.train(7).values())


def test_half_precision_comes_to_the_mean_of_targets() -> None:
    world = World(dtype=torch.bfloat16, compression=TopK(0.2), outer=functools.partial(SGD, lr=1.0))
    values = world.train(40 * EVERY).values().float()
    best = torch.stack(world.targets).float().mean(0)
    assert (values.mean(0) - best).norm() < 0.1 * best.norm()


@pytest.mark.parametrize(
    "settings",
    [
        {"alpha": 0.5},
        {"compression": None},
        {"compression": TopK(0.1, source="update")},
        {"unsent": "nowhere"},
        {"unsent": True},
    ],
)
def test_settings_that_it_cannot_have(settings: dict[str, Any]) -> None:
    with pytest.raises(dgcopt.ConfigError, match="unsent"):
        DiLoCo(**{"every": EVERY, "compression": TopK(0.1), "unsent": "local", **settings})


def test_a_delay_of_sparse_outer_gradients_is_warned_of(caplog: pytest.LogCaptureFixture) -> None:
    for quiet in ({"delay": 1}, {"compression": TopK(0.1)}, {"delay": 1, "compression": dgcopt.FP16()}):
        DiLoCo(EVERY, **quiet)
    assert not caplog.messages
    DiLoCo(EVERY, delay=1, compression=dgcopt.FP16(TopK(0.1)))
    assert "delay=1" in caplog.text and "TopK(ratio=0.1" in caplog.text
