"""A warm-up of averaged weights, in which gradients travel compressed: its last step flushes the residuals."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from torch.optim import SGD, Adam

import dgcopt
from dgcopt import LocalSGD
from dgcopt.checkpoint import reshare
from dgcopt.comm.simulated import _comms
from dgcopt.compressors import Compressor, Threshold

SHAPES = {"a.weight": (40, 33), "a.bias": (130,), "b.weight": (9, 65)}
WARM = 3

COMPRESSORS: dict[str, Compressor] = {
    "TopK": dgcopt.TopK(0.05),
    "TopK, owner": dgcopt.TopK(0.05, reduce="owner"),
    "TopK, updates": dgcopt.TopK(0.05, source="update"),
    "DGC": dgcopt.DGC(0.05, overlap=True),
    "DGC, owner, int8 vectors": dgcopt.DGC(0.05, reduce="owner", vectors="int8"),
    "Threshold": Threshold(1.5),
    "CLTK": dgcopt.CLTK(0.05),
    "PowerSGD": dgcopt.PowerSGD(start_step=0),
    "OneBit": dgcopt.OneBit(),
    "Hierarchical": dgcopt.Hierarchical(dgcopt.TopK(0.05)),
    "PerParameter": dgcopt.PerParameter({"a.*": dgcopt.Hierarchical(dgcopt.DGC(0.05)), "*": dgcopt.OneBit()}),
    "NoCompression": dgcopt.NoCompression(),
}


class Ranks:
    """Ranks that apply gradients as they come, and start at zero: minus their weights is what was applied."""

    def __init__(
        self,
        compressor: Compressor,
        machines: Sequence[int] = (0, 0, 0),
        op: str = "average",
        rule: Any = None,
        make: Any = lambda params: SGD(params, lr=1.0),
    ) -> None:
        self.params: list[dict[str, torch.nn.Parameter]] = []
        self.optimizers: list[Any] = []
        self.given = {name: torch.zeros(shape, dtype=torch.float64) for name, shape in SHAPES.items()}
        for comm in _comms(machines):
            params = {n: torch.nn.Parameter(torch.zeros(s, dtype=torch.float64)) for n, s in SHAPES.items()}
            optimizer = make(params.values())
            dgcopt.DistributedOptimizer(optimizer, params.items(), copy.deepcopy(compressor), comm=comm, op=op)
            rule = rule or LocalSGD(2, warmup_steps=WARM)
            rule.attach(optimizer, params.items(), comm)
            self.params.append(params)
            self.optimizers.append(optimizer)

    def step(self, seed: int, void: bool = False, unused: str = "") -> None:
        generator = torch.Generator().manual_seed(seed)
        for rank, params in enumerate(self.params):
            for name, param in params.items():
                grad = torch.randn(param.shape, generator=generator, dtype=torch.float64) ** 3
                param.grad = None
                if name != unused:
                    (param * (grad * torch.nan if void and rank == 0 else grad)).sum().backward()
                    self.given[name] += 0 if void else grad
        for optimizer in self.optimizers:
            optimizer.step()

    def assert_all_is_applied(self) -> None:
        scale = len(self.params)
        for params in self.params:
            for name, param in params.items():
                torch.testing.assert_close(-param.detach() * scale, self.given[name], rtol=0, atol=1e-4, msg=name)
                assert torch.equal(param, self.params[0][name])
        for optimizer in self.optimizers:
            assert optimizer.residual_norm() == 0


@pytest.mark.parametrize("machines", [(0, 0), (0, 1, 1)], ids=str)
@pytest.mark.parametrize("name", COMPRESSORS)
def test_the_last_step_sends_all_that_was_held_back(name: str, machines: tuple[int, ...]) -> None:
    ranks = Ranks(COMPRESSORS[name], machines)
    for seed in range(WARM):
        assert seed < 2 or name == "NoCompression" or any(o.residual_norm() for o in ranks.optimizers)
        ranks.step(seed)
    ranks.assert_all_is_applied()
    assert [optimizer.averaging.step for optimizer in ranks.optimizers] == [WARM] * len(machines)


def test_also_of_a_parameter_without_a_gradient_then() -> None:
    ranks = Ranks(dgcopt.TopK(0.05))
    for seed, unused in enumerate(("", "", "a.weight")):
        ranks.step(seed, unused=unused)
    ranks.assert_all_is_applied()


def test_a_step_that_nobody_takes_is_none_of_the_warm_up() -> None:
    ranks = Ranks(dgcopt.TopK(0.05))
    for seed, void in enumerate((False, True, False, True, False)):
        ranks.step(seed, void=void)
    ranks.assert_all_is_applied()
    assert [optimizer.averaging.step for optimizer in ranks.optimizers] == [WARM] * 3


def test_a_warm_up_that_goes_on_from_a_checkpoint_ends_alike() -> None:
    ranks, resumed = Ranks(dgcopt.DGC(0.05)), Ranks(dgcopt.DGC(0.05))
    for seed in range(WARM - 1):
        ranks.step(seed)
    for mine, theirs in zip(resumed.params, ranks.params, strict=True):
        for name, param in mine.items():
            param.data.copy_(theirs[name])
    for mine, theirs in zip(resumed.optimizers, ranks.optimizers, strict=True):
        mine.load_state_dict(copy.deepcopy(theirs.state_dict()))
    resumed.given = {name: given.clone() for name, given in ranks.given.items()}
    for each in (ranks, resumed):
        each.step(7)
        each.assert_all_is_applied()


@pytest.mark.parametrize("op", ["average", "sum"])
@pytest.mark.parametrize("inner", [None, dgcopt.Hierarchical(dgcopt.TopK(0.05))], ids=str)
def test_residuals_of_momentum_become_momentum(inner: Compressor | None, op: str) -> None:
    """In the first step in which momentum travels, which is the last: as if it had travelled whole."""
    ranks, whole = (
        Ranks(dgcopt.OneBitAdam(WARM - 1, each), (0, 0, 1), op, make=lambda params: Adam(params, lr=0.1))
        for each in (inner, dgcopt.NoCompression())
    )
    for seed in range(WARM):
        ranks.step(seed)
        whole.step(seed)
    for name, param in ranks.params[0].items():
        torch.testing.assert_close(param, whole.params[0][name], rtol=1e-5, atol=1e-6)
    assert all(optimizer.residual_norm() == 0 for optimizer in ranks.optimizers)


@pytest.mark.parametrize("size", [1, 3])
def test_updates_are_added_to_the_mean_that_another_number_of_ranks_goes_on_from(size: int) -> None:
    """Not before it is taken, at the first step, which would undo the update."""
    rule, compressor = LocalSGD(2, warmup_steps=2 * WARM), dgcopt.TopK(1.0, source="update")
    ranks, others = Ranks(compressor, (0, 0), rule=rule), Ranks(compressor, (0,) * size, rule=rule)
    ranks.step(1)
    states = [copy.deepcopy(optimizer.state_dict()) for optimizer in ranks.optimizers]
    before = {name: param.detach().clone() for name, param in ranks.params[0].items()}
    for rank, (params, optimizer) in enumerate(zip(others.params, others.optimizers, strict=True)):
        for name, param in params.items():
            param.data.copy_(before[name])
        optimizer.load_state_dict(reshare([{"optimizer": state} for state in states], rank, size)["optimizer"])
    others.step(2)
    for params in others.params:
        for name, param in params.items():
            expected = before[name] - others.given[name] / size
            torch.testing.assert_close(param.detach(), expected, rtol=0, atol=1e-4)


@pytest.mark.parametrize("settings", [{}, {"nesterov": True, "weight_decay": 0.1}, {"dampening": 0.3}], ids=str)
@pytest.mark.parametrize(
    "compressor",
    [
        dgcopt.DGC(1.0),
        dgcopt.CSC(1.0, 64),
        dgcopt.PerParameter({"a.*": dgcopt.DGC(1.0), "*": dgcopt.NoCompression()}),
        dgcopt.Hierarchical(dgcopt.DGC(1.0)),
    ],
    ids=lambda compressor: type(compressor).__name__,
)
@pytest.mark.parametrize("op", ["average", "sum"])
def test_momentum_goes_on_after_it(compressor: Compressor, settings: dict[str, Any], op: str) -> None:
    """At ratio 1 it is a dense warm-up, of which the momentum is left."""

    def make(params: Any) -> Any:
        return SGD(params, lr=0.1, momentum=0.9, **settings)

    ranks, dense = (
        Ranks(each, (0, 0, 1), op, LocalSGD(1, warmup_steps=WARM), make)
        for each in (compressor, dgcopt.NoCompression())
    )
    for seed in range(2 * WARM):
        ranks.step(seed)
        dense.step(seed)
        for name, param in ranks.params[0].items():
            torch.testing.assert_close(param, dense.params[0][name], rtol=0, atol=1e-6, msg=f"{name}, step {seed}")
    assert all("decay_momentum" not in state for optimizer in ranks.optimizers for state in optimizer.state.values())


@pytest.mark.parametrize(
    "compressor",
    [
        dgcopt.DGC(0.05),
        dgcopt.Hierarchical(dgcopt.DGC(0.05, residual="bf16")),
        dgcopt.PerParameter({"a.*": dgcopt.DGC(0.05), "*": dgcopt.OneBit()}),
    ],
    ids=lambda compressor: type(compressor).__name__,
)
def test_its_momentum_is_the_same_on_all_ranks(compressor: Compressor) -> None:
    """Though each rank, or the first one of each machine, had that of its own gradients."""
    ranks = Ranks(compressor, (0, 0, 1), make=lambda params: SGD(params, lr=0.1, momentum=0.9))
    for seed in range(WARM):
        ranks.step(seed)
    for mine, optimizer in zip(ranks.params, ranks.optimizers, strict=True):
        for name in ("a.weight", "a.bias"):
            momentum = optimizer.state[mine[name]]["momentum_buffer"]
            assert momentum.any()
            assert torch.equal(momentum, ranks.optimizers[0].state[ranks.params[0][name]]["momentum_buffer"])


@pytest.mark.parametrize("warmup_steps", [1, 2])
def test_a_residual_that_a_shorter_warm_up_never_sends_is_told(
    warmup_steps: int, caplog: pytest.LogCaptureFixture
) -> None:
    old, ours = Ranks(dgcopt.TopK(0.05)), Ranks(dgcopt.TopK(0.05), rule=LocalSGD(2, warmup_steps=warmup_steps))
    for seed in range(WARM - 1):
        old.step(seed)
    for optimizer, saved in zip(ours.optimizers, old.optimizers, strict=True):
        optimizer.load_state_dict(copy.deepcopy(saved.state_dict()))
    for optimizer in ours.optimizers:
        optimizer.averaging.finish_round()
    assert "rank 0: the loaded state is of step 2 of a warm-up" in caplog.text
    assert "Resume with at least warmup_steps=3" in caplog.text
