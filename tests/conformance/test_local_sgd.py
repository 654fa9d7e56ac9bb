"""Local SGD does what an independent, naive implementation of its rule does, in all its variants."""

from __future__ import annotations

import functools
import inspect
import itertools
from collections.abc import Callable, Iterable

import pytest
import torch
from torch import Tensor, nn
from torch.optim import SGD, Adam, Optimizer

import dgcopt
from dgcopt import LocalSGD
from tests.conformance import naive_local_sgd as naive

STEPS = 10
LRS = [0.1 * 0.8**step for step in range(STEPS)]
SHAPES = ((5, 7), (7,), (7, 3), (3,))
OPTIMIZERS: dict[str, Callable[[Iterable[Tensor]], Optimizer]] = {
    "SGD": functools.partial(SGD, lr=0.1),
    "momentum": functools.partial(SGD, lr=0.1, momentum=0.9),
    "Nesterov": functools.partial(SGD, lr=0.1, momentum=0.9, nesterov=True, weight_decay=0.01),
    "Adam": functools.partial(Adam, lr=0.1, weight_decay=0.01),
}


def seeded(*key: int) -> torch.Generator:
    return torch.Generator().manual_seed(sum(part * 1009**place for place, part in enumerate(key)))


def start() -> list[Tensor]:
    return [torch.randn(shape, generator=seeded(place), dtype=torch.float64) / 2 for place, shape in enumerate(SHAPES)]


@functools.cache
def batch(step: int, rank: int) -> tuple[Tensor, Tensor]:
    """Ranks pull in different directions."""
    x = torch.randn(6, 5, generator=seeded(step, rank, 1), dtype=torch.float64)
    return x, torch.randn(6, 3, generator=seeded(step, rank, 2), dtype=torch.float64) + rank


def loss_of(step: int, rank: int, params: Iterable[Tensor]) -> Tensor:
    """A small network's, on data of the step and the rank."""
    first, shift, second, bias = params
    x, y = batch(step, rank)
    return nn.functional.mse_loss((x @ first + shift).tanh() @ second + bias, y)


def losses(ranks: int, steps: int = STEPS):
    return [[functools.partial(loss_of, step, rank) for rank in range(ranks)] for step in range(steps)]


class Ranks:
    """N ranks, each with its weights and its wrapped optimizer."""

    def __init__(self, rule: LocalSGD, make: Callable[..., Optimizer], size: int, nodes: int = 1) -> None:
        self.params = [[nn.Parameter(tensor) for tensor in start()] for _ in range(size)]
        self.optimizers = [
            rule.attach(make(mine), [(f"p{i}", param) for i, param in enumerate(mine)], comm)
            for mine, comm in zip(self.params, dgcopt.simulated_world(size, nodes), strict=True)
        ]

    def step(self, step: int, lr: float) -> list[list[Tensor]]:
        for rank, (mine, optimizer) in enumerate(zip(self.params, self.optimizers, strict=True)):
            optimizer.zero_grad()
            loss_of(step, rank, mine).backward()
        for optimizer in self.optimizers:
            optimizer.param_groups[0]["lr"] = lr
        for optimizer in self.optimizers:
            optimizer.step()
        return [naive.copies(mine) for mine in self.params]

    def train(self) -> list[list[list[Tensor]]]:
        """As the naive implementation: weights of every rank after every step."""
        return [self.step(step, lr) for step, lr in enumerate(LRS)]


def assert_close(ours: Iterable[Tensor], theirs: Iterable[Tensor], tolerance: float = 1e-12, what: str = "") -> None:
    here, there = (torch.cat([tensor.flatten() for tensor in tensors]) for tensors in (ours, theirs))
    torch.testing.assert_close(here, there, rtol=tolerance, atol=tolerance, msg=lambda text: f"{what}: {text}")


def assert_histories_close(ours, theirs) -> None:
    for step, (here, there) in enumerate(zip(ours, theirs, strict=True), 1):
        for rank, (mine, reference) in enumerate(zip(here, there, strict=True)):
            assert_close(mine, reference, what=f"rank {rank} after step {step}")


def assert_identical(weights: list[list[Tensor]], what: str = "") -> None:
    for rank, mine in enumerate(weights):
        assert all(torch.equal(x, y) for x, y in zip(mine, weights[0], strict=True)), f"{what}: rank {rank} differs"


@pytest.mark.parametrize("optimizer", ["momentum", "Nesterov", "Adam"])
@pytest.mark.parametrize(
    ("size", "every"), [*itertools.product((1, 2, 3), (1, 2, 3, 5)), (4, 1), (4, 3), (8, 2), (8, 5)]
)
def test_mean_of_weights_every_so_many_steps(size: int, every: int, optimizer: str) -> None:
    make = OPTIMIZERS[optimizer]
    ours = Ranks(LocalSGD(every), make, size).train()
    assert_histories_close(ours, naive.local_sgd(start(), losses(size), make, LRS, every))
    for step, weights in enumerate(ours, 1):
        if step % every == 0:
            assert_identical(weights, f"after step {step}")
        elif size > 1:
            assert not torch.equal(weights[0][0], weights[1][0]), f"ranks are equal after step {step}, without exchange"


@pytest.mark.parametrize("optimizer", ["momentum", "Adam"])
@pytest.mark.parametrize("every", [1, 2, 3])
def test_overlap_lands_before_the_next_update(every: int, optimizer: str) -> None:
    make = OPTIMIZERS[optimizer]
    ours = Ranks(LocalSGD(every, overlap=True), make, 3).train()
    assert_histories_close(ours, naive.local_sgd(start(), losses(3), make, LRS, every, overlap=True))


@pytest.mark.parametrize("overlap", [False, True])
@pytest.mark.parametrize(("size", "nodes"), [(4, 2), (6, 3), (2, 1)])
def test_machines_average_among_themselves(size: int, nodes: int, overlap: bool) -> None:
    each = size // nodes
    machines = [list(range(node * each, (node + 1) * each)) for node in range(nodes)]
    for optimizer in ("momentum", "Adam"):
        make = OPTIMIZERS[optimizer]
        ours = Ranks(LocalSGD(6, node_every=2, overlap=overlap), make, size, nodes).train()
        theirs = naive.local_sgd(start(), losses(size), make, LRS, 6, 2, machines, overlap=overlap)
        assert_histories_close(ours, theirs)


@pytest.mark.parametrize(
    ("optimizer", "state_every"),
    [("Adam", {"exp_avg": 4, "exp_avg_sq": 5}), ("Adam", {"exp_avg": 3}), ("momentum", {"momentum_buffer": 2})],
)
def test_optimizer_state_is_averaged_on_periods_of_its_own(optimizer: str, state_every: dict[str, int]) -> None:
    """DES-LOC."""
    make = OPTIMIZERS[optimizer]
    ours = Ranks(LocalSGD(3, state_every=state_every), make, 3).train()
    assert_histories_close(ours, naive.local_sgd(start(), losses(3), make, LRS, 3, state_every=state_every))


def test_a_state_that_is_not_finite_or_not_there_moves_nothing() -> None:
    ranks = Ranks(LocalSGD(1, state_every={"exp_avg_sq": 1}), OPTIMIZERS["Adam"], 2)
    ranks.step(0, 0.1)
    ranks.optimizers[1].state[ranks.params[1][0]]["exp_avg_sq"][0] = torch.inf  # whose update is zero
    ranks.step(1, 0.1)
    assert ranks.optimizers[0].averaging.telemetry.skipped == 1
    assert not torch.equal(ranks.params[0][0], ranks.params[1][0])
    assert ranks.optimizers[0].state[ranks.params[0][0]]["exp_avg_sq"].isfinite().all()
    with pytest.raises(dgcopt.ConfigError, match=r"'p0'.*no state 'exp_average'.*'exp_avg', 'exp_avg_sq'"):
        Ranks(LocalSGD(1, state_every={"exp_average": 1}), OPTIMIZERS["Adam"], 2).train()


def test_a_finite_state_whose_sum_overflows_its_dtype_is_averaged() -> None:
    comms = dgcopt.simulated_world(2)
    params = [torch.zeros(300, dtype=torch.float16, requires_grad=True) for _ in comms]
    rule = functools.partial(LocalSGD, every=1, state_every={"momentum_buffer": 1})
    optimizers = [
        rule(SGD([param], lr=1e-4, momentum=0.9), [("p", param)], comm=comm)
        for param, comm in zip(params, comms, strict=True)
    ]
    for rank, param in enumerate(params):
        param.grad = torch.full_like(param, 300.0 * (1 + rank))
    for optimizer in optimizers:
        optimizer.step()
    states = [optimizer.state[param] for optimizer, param in zip(optimizers, params, strict=True)]
    assert all((state["momentum_buffer"] == 450).all() for state in states)


@pytest.mark.parametrize("overlap", [False, True])
@pytest.mark.parametrize("warmup_steps", [1, 4, STEPS])
@pytest.mark.parametrize("optimizer", ["momentum", "Adam"])
def test_warm_up_is_dense_training(optimizer: str, warmup_steps: int, overlap: bool) -> None:
    make = OPTIMIZERS[optimizer]
    ours = Ranks(LocalSGD(3, warmup_steps=warmup_steps, overlap=overlap), make, 3).train()
    theirs = naive.local_sgd(start(), losses(3), make, LRS, 3, warmup_steps=warmup_steps, overlap=overlap)
    assert_histories_close(ours, theirs)
    for step, weights in enumerate(ours[:warmup_steps], 1):
        assert_identical(weights, f"after step {step} of the warm-up")
    dense = naive.one_process(start(), losses(3), make, LRS)
    assert_close(ours[warmup_steps - 1][0], dense[warmup_steps - 1])


@pytest.mark.parametrize("size", [2, 8])
@pytest.mark.parametrize("optimizer", ["SGD", "momentum", "Nesterov"])
def test_every_step_is_large_batch_training(optimizer: str, size: int) -> None:
    """Of linear methods: what is averaged is a linear function of gradients at the same weights."""
    make = OPTIMIZERS[optimizer]
    dense = naive.one_process(start(), losses(size), make, LRS)
    for weights, expected in zip(Ranks(LocalSGD(1), make, size).train(), dense, strict=True):
        assert_close(weights[0], expected)


def test_every_step_of_adam_is_not() -> None:
    """Its moments are each rank's own; so the test above can fail."""
    dense = naive.one_process(start(), losses(2), OPTIMIZERS["Adam"], LRS)
    ours = Ranks(LocalSGD(1), OPTIMIZERS["Adam"], 2).train()
    assert (ours[-1][0][0] - dense[-1][0]).abs().max() > 1e-3


# -- a world of one --------------------------------------------------------------------------------------------------


def classes() -> dict[str, type[Optimizer]]:
    found = {name: value for name, value in vars(torch.optim).items() if inspect.isclass(value)}
    return {
        name: kind
        for name, kind in sorted(found.items())
        if issubclass(kind, Optimizer) and kind is not Optimizer and name not in ("SparseAdam", "Muon")
    }


@pytest.mark.parametrize("kind", classes().values(), ids=classes())
def test_alone_it_is_the_bare_optimizer(kind: type[Optimizer]) -> None:
    """To the bit, through a closure where there is none without; whether alone in a world or without one."""
    histories = []
    for how in ("bare", "simulated", "local"):
        params = [nn.Parameter(tensor) for tensor in start()]
        optimizer = kind(params, lr=0.05)
        if how != "bare":
            comm = dgcopt.simulated_world(1)[0] if how == "simulated" else dgcopt.comm.LocalComm()
            LocalSGD(2, overlap=how == "local").attach(optimizer, comm=comm)
        history = []
        for step in range(5):

            def closure(step=step, params=params, optimizer=optimizer) -> Tensor:
                optimizer.zero_grad()
                loss = loss_of(step, 0, params)
                loss.backward()
                return loss

            if kind is torch.optim.LBFGS:
                optimizer.step(closure)
            else:
                closure()
                optimizer.step()
            history.append(naive.copies(params))
        histories.append(history)
    bare, *ours = histories
    assert not torch.equal(bare[0][0], bare[-1][0])
    for history in ours:
        for step, (here, there) in enumerate(zip(history, bare, strict=True), 1):
            assert all(torch.equal(x, y) for x, y in zip(here, there, strict=True)), f"after step {step}"
