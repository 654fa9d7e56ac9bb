"""Promise 4 and the drop-in: N ranks on parts of a batch train as one process on the whole of it."""

from __future__ import annotations

import functools
import inspect
import itertools
from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import ExponentialLR, OneCycleLR

import dgcopt
from dgcopt import Comm
from dgcopt.collectives import AllReduce
from dgcopt.errors import ConfigError
from tests.support.optimizers import ZerosForNone
from tests.support.wires import only, share

from .training import (
    TINY,
    Recipe,
    Replica,
    assert_close,
    assert_same_on_all_ranks,
    generator,
    make_model,
    tensors_in,
    train,
)

STEPS = 4


def optimizer_classes() -> dict[str, type[Optimizer]]:
    """Every optimizer of this version of torch."""
    found = {name: value for name, value in vars(torch.optim).items() if inspect.isclass(value)}
    return {n: c for n, c in sorted(found.items()) if issubclass(c, Optimizer) and c is not Optimizer}


EXTRA: dict[str, list[dict[str, Any]]] = {
    "SGD": [
        {"momentum": 0.9},
        {"momentum": 0.9, "nesterov": True, "weight_decay": 0.01},
        {"momentum": 0.9, "dampening": 0.3, "weight_decay": 0.01, "maximize": True},
    ],
    "Adam": [{"amsgrad": True}],
    "RMSprop": [{"centered": True, "momentum": 0.9}],
    "LBFGS": [{"line_search_fn": "strong_wolfe"}],
}


def settings_of(kind: type[Optimizer]) -> Iterator[dict[str, Any]]:
    """The optimizer as it is, as `foreach` maximizing, as `fused`, and as EXTRA says, where it can be so."""
    can = inspect.signature(kind).parameters
    yield {}
    if "foreach" in can:
        yield {"foreach": True, **({"maximize": True} if "maximize" in can else {})}
    if "fused" in can:
        yield {"fused": True}
    yield from EXTRA.get(kind.__name__, [])


def one_cycle(optimizer: Optimizer) -> OneCycleLR:
    """Changes learning rate and, where there is one, momentum or beta at every step."""
    cycles = "momentum" in optimizer.defaults or "betas" in optimizer.defaults
    return OneCycleLR(optimizer, max_lr=0.05, total_steps=10, cycle_momentum=cycles)


WAYS: dict[str, dict[str, Any]] = {
    "scheduler made before": {"schedule": one_cycle, "schedule_first": True},
    "scheduler made after, two passes per step": {"schedule": one_cycle, "accumulate": 2, "buckets": (*TINY.items(),)},
    "no_sync": {
        "schedule": functools.partial(ExponentialLR, gamma=0.7),
        "schedule_first": True,
        "accumulate": 3,
        "no_sync": True,
        "buckets": (*TINY.items(),),
    },
}


def bags(sparse: bool = True) -> nn.Module:
    """Rows of an embedding, of which each rank sees others, read out by fixed weights."""

    class Bags(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embedding = nn.EmbeddingBag(40, 5, mode="sum", sparse=sparse, dtype=torch.float64)
            self.head = nn.Linear(5, 4, dtype=torch.float64).requires_grad_(False)
            with torch.no_grad():
                for place, param in enumerate(self.parameters()):
                    param.copy_(torch.randn(param.shape, generator=generator(3, place), dtype=torch.float64))

        def forward(self, x: Tensor) -> Tensor:
            return self.head(self.embedding((x * 1000).long().abs() % 40))

    return Bags()


def only_trainable(named: Iterable[tuple[str, Tensor]]) -> list[Tensor]:
    return [param for _, param in named if param.requires_grad]


def recipe_of(kind: type[Optimizer], settings: dict[str, Any]) -> Recipe:
    needs_lr = "lr" in inspect.signature(kind).parameters
    settings = {**({"lr": 0.5 if kind is torch.optim.LBFGS else 0.02} if needs_lr else {}), **settings}
    if kind is torch.optim.LBFGS:
        settings["max_iter"] = 4
    model: Callable[[], nn.Module] = make_model
    if kind is torch.optim.SparseAdam:
        model = bags
    elif kind.__name__ == "Muon":  # takes matrices only
        model = functools.partial(make_model, bias=False)
    return Recipe(lambda named: kind(only_trainable(named), **settings), model=model, closure=kind is torch.optim.LBFGS)


def compare(comm: Comm, recipe: Recipe, what: str, tolerance: float = 1e-9) -> None:
    """Train with and without ranks; parameters and losses must agree, and have moved."""
    whole, mine = Replica(recipe), Replica(recipe, comm)
    start = [param.detach().clone() for param in whole.parameters]
    train([whole], range(STEPS))
    train([mine], range(STEPS))
    assert_same_on_all_ranks(comm, mine.parameters, what)
    assert_close(mine.parameters, whole.parameters, tolerance, what)
    trained = [(param, old) for param, old in zip(whole.parameters, start, strict=True) if param.requires_grad]
    assert all(not torch.allclose(param, old, atol=1e-5) for param, old in trained), f"{what}: nothing was trained"


def every_setting(kind: type[Optimizer], comm: Comm) -> None:
    """The optimizer's defaults in every way, its other settings in one way each."""
    tolerance = 1e-6 if kind is torch.optim.LBFGS else 1e-9  # its curvature magnifies rounding
    cases = [
        (settings, way)
        for number, settings in enumerate(settings_of(kind))
        for place, way in enumerate(WAYS)
        if number == 0 or number % len(WAYS) == place
    ]
    for settings, way in share(comm, cases):
        recipe = replace(recipe_of(kind, settings), **WAYS[way])
        compare(comm, recipe, f"{kind.__name__} {settings} {way}", tolerance)


def sgd_takes_sparse_and_dense(comm: Comm) -> None:
    """An embedding with sparse gradients beside dense layers, in one optimizer."""

    def model() -> nn.Module:
        module = bags()
        module.head.requires_grad_(True)
        return module

    for momentum in (0.0, 0.9):
        sgd = functools.partial(torch.optim.SGD, lr=0.1, momentum=momentum)
        recipe = Recipe(lambda named, sgd=sgd: sgd([param for _, param in named]), model=model)
        compare(comm, recipe, f"sparse and dense, momentum {momentum}")


class Branches(nn.Module):
    """Each rank takes another way through the model at each step, so gradients are missing and come in other orders.

    The whole batch's loss adds up what each of `size` ranks would do with its rows.
    """

    def __init__(self, size: int, rank: int | None) -> None:
        super().__init__()
        self.size, self.rank, self.calls = size, rank, 0
        self.ways = nn.ModuleList(make_model(seed=place) for place in range(3))

    def forward(self, x: Tensor) -> Tensor:
        step, self.calls = self.calls, self.calls + 1
        out = torch.zeros(len(x), 4, dtype=x.dtype)
        for rank in range(self.size) if self.rank is None else [self.rank]:
            rows = slice(rank, None, self.size) if self.rank is None else slice(None)
            one = (rank + step) % 3
            first, second = (one, 2) if rank % 2 else (2, one)
            out[rows] = self.ways[second](torch.cat([self.ways[first](x[rows]), x[rows, 4:]], dim=1))
        return out


def ranks_take_other_branches(comm: Comm) -> None:
    for optimizer in (functools.partial(torch.optim.SGD, lr=0.1, momentum=0.9), torch.optim.Adam):
        for buckets in ((), (*TINY.items(),)):
            recipe = Recipe(lambda named, make=optimizer: make([p for _, p in named]), buckets=buckets)
            whole = Replica(replace(recipe, model=lambda: Branches(comm.size, None)))
            mine = Replica(replace(recipe, model=lambda: Branches(comm.size, comm.rank)), comm)
            train([whole], range(6))
            train([mine], range(6))
            assert_same_on_all_ranks(comm, mine.parameters, "branches")
            assert_close(mine.parameters, whole.parameters, 1e-9, "branches")


def dgc_at_ratio_one_is_dense(comm: Comm) -> None:
    """For momentum, Nesterov, dampening, weight decay and maximize, with momentum and learning rate cycled or not."""
    flavours: list[dict[str, Any]] = [
        {"momentum": 0.0},
        *({"momentum": 0.9, **more} for more in ({}, {"nesterov": True}, {"dampening": 0.3})),
    ]
    for flavour, weight_decay, maximize in share(comm, itertools.product(flavours, (0.0, 0.05), (False, True))):
        settings = {"weight_decay": weight_decay, "maximize": maximize, **flavour}
        recipe = replace(
            recipe_of(torch.optim.SGD, settings),
            compression=dgcopt.DGC(ratio=1.0),
            schedule=one_cycle if weight_decay and flavour["momentum"] else None,
            schedule_first=maximize,
        )
        compare(comm, recipe, f"DGC at ratio 1, {settings}")
    adam = replace(recipe_of(torch.optim.Adam, {"weight_decay": 0.01}), compression=dgcopt.DGC(ratio=1.0))
    compare(comm, adam, "DGC at ratio 1, Adam")


class Oddities(nn.Module):
    """A layer that is used twice, a channels-last convolution, and parameters that are frozen, empty or unused."""

    def __init__(self) -> None:
        super().__init__()
        self.twice = nn.Linear(6, 6)
        self.conv = nn.Conv2d(2, 5, 2)
        self.head = nn.Linear(10, 4)
        self.frozen = nn.Linear(4, 4).requires_grad_(False)
        self.empty = nn.Parameter(torch.empty(0, 3))
        self.unused = nn.Parameter(torch.empty(3, 3))
        self.double().to(memory_format=torch.channels_last)
        with torch.no_grad():
            for place, param in enumerate(self.parameters()):
                param.copy_(torch.randn(param.shape, generator=generator(4, place), dtype=torch.float64) / 2)

    def forward(self, x: Tensor) -> Tensor:
        x = self.twice(torch.tanh(self.twice(x)))
        return self.frozen(self.head(torch.tanh(self.conv(x.view(-1, 2, 3, 1).expand(-1, 2, 3, 2))).flatten(1)))


def odd_parameters(comm: Comm) -> None:
    for compression in (None, dgcopt.DGC(1.0)):
        for buckets in ((), (*TINY.items(),)):
            recipe = Recipe(
                lambda named: torch.optim.SGD([p for _, p in named], 0.1, momentum=0.9),
                model=Oddities,
                compression=compression,
                buckets=buckets,
            )
            whole, mine = Replica(recipe), Replica(recipe, comm)
            assert not mine.model.conv.weight.is_contiguous()
            train([whole], range(STEPS))
            train([mine], range(STEPS))
            assert_same_on_all_ranks(comm, mine.parameters, "odd parameters")
            assert_close(mine.parameters, whole.parameters, 1e-9, f"odd parameters, {compression}")


def two_optimizers(comm: Comm) -> None:
    """Two models in turn, as GANs have them, the second stepping while the first one's gradients are on their way."""
    first, second = (recipe_of(kind, {}) for kind in (torch.optim.Adam, torch.optim.SGD))
    pairs = [(Replica(first), Replica(first, comm)), (Replica(second), Replica(second, comm))]
    for step in range(STEPS):
        for column in (0, 1):
            for pair in pairs:
                pair[column].backward(step)
            for pair in reversed(pairs):
                pair[column].step(step)
    for whole, mine in pairs:
        assert_close(mine.parameters, whole.parameters, 1e-9, "two optimizers")


def average_by_hand(comm: Comm) -> None:
    """synchronize(), gradients changed by hand, and a step inside skip_synchronize(): clipping the averaged norm."""
    for compression in (None, dgcopt.DGC(ratio=1.0)):
        recipe = replace(recipe_of(torch.optim.SGD, {"momentum": 0.9}), compression=compression)
        whole, mine = Replica(recipe), Replica(recipe, comm)
        for step in range(STEPS):
            whole.backward(step)
            nn.utils.clip_grad_norm_(whole.parameters, 0.1)
            whole.step(step)
            mine.backward(step)
            mine.optimizer.synchronize()  # type: ignore[attr-defined]
            nn.utils.clip_grad_norm_(mine.parameters, 0.1)
            with mine.optimizer.skip_synchronize():  # type: ignore[attr-defined]
                mine.step(step)
        # DGC's momentum is applied before the exchange, so there only the replicas can be compared
        assert_same_on_all_ranks(comm, mine.parameters, "clipped by hand")
        if compression is None:
            assert_close(mine.parameters, whole.parameters, 1e-9, "clipped by hand")


def a_closure_that_leaves_nothing_to_do(comm: Comm) -> None:
    """In a step that no rank takes, or that is taken by the updates that ranks make, the optimizer's own one ends."""
    for compression in (None, dgcopt.TopK(0.1), dgcopt.TopK(0.1, source="update")):
        for first in (False, True):
            recipe = Recipe(
                lambda named: ZerosForNone([param for _, param in named]),
                compression=compression,
                schedule=functools.partial(ExponentialLR, gamma=0.9),
                schedule_first=first,
                closure=True,
            )
            what, mine = f"closure, {compression}, {first}", Replica(recipe, comm)
            train([mine], range(2))
            assert_same_on_all_ranks(comm, mine.parameters, what)
            before = [tensor.clone() for tensor in [*mine.parameters, *tensors_in([*mine.optimizer.state.values()])]]

            def spoilt(step: int, mine: Replica = mine) -> Tensor:
                loss = Replica.backward(mine, step)
                if comm.rank == comm.size - 1:
                    mine.parameters[0].grad[0, 0] = torch.nan  # type: ignore[index]
                return loss

            mine.backward = spoilt  # type: ignore[method-assign]
            train([mine], [2])
            after = [*mine.parameters, *tensors_in([*mine.optimizer.state.values()])]
            assert all(map(torch.equal, after, before)), f"{what}: a step that no rank takes has moved something"
            del mine.backward
            train([mine], [3])
            assert_same_on_all_ranks(comm, mine.parameters, what)
            assert not torch.equal(mine.parameters[0], before[0])


def a_closure_without_a_loss(comm: Comm) -> None:
    """The others' loss is the mean over those that have one."""
    recipe = Recipe(lambda named: torch.optim.SGD([param for _, param in named], lr=0.1), closure=True)
    mine = Replica(recipe, comm)

    def closure() -> float | None:
        mine.backward(0)
        return float(comm.rank) or None

    assert mine.optimizer.step(closure) == (comm.size / 2 if comm.rank else None)  # type: ignore[arg-type]
    assert_same_on_all_ranks(comm, mine.parameters, "a closure without a loss")
    closure()
    mine.optimizer.step()
    one, telemetry = mine.optimizer.step, mine.optimizer.telemetry  # type: ignore[attr-defined]
    before = telemetry.payload_bytes
    closure()
    one()
    without = telemetry.payload_bytes - before
    one(closure)  # type: ignore[arg-type]
    assert telemetry.payload_bytes - before - without == without + 16, "the loss is counted too"


def a_step_at_lr_0_after_no_sync(comm: Comm) -> None:
    """Of all ranks, also where one's gradients are zeros, as in the step by which torch's checkpoints make state."""
    param = torch.nn.Parameter(torch.ones(4))
    optimizer = dgcopt.DistributedOptimizer(torch.optim.SGD([param], lr=0.1), [("param", param)], comm=comm)
    for lr in (0.1, 0.0, 0.1):
        optimizer.param_groups[0]["lr"] = lr
        optimizer.zero_grad()
        with optimizer.no_sync():  # type: ignore[attr-defined]
            (param * (comm.rank if lr == 0 else 1)).sum().backward()
        optimizer.step()
    assert optimizer.telemetry.steps == 3  # type: ignore[attr-defined]
    assert_same_on_all_ranks(comm, [param], "a step at lr 0")


@only(wires=["torch"])
def zero_redundancy_optimizer(comm: Comm) -> None:
    """Its own step tells the other ranks what each owner made of the mean: gradients travel in front of it."""
    from torch.distributed.optim import ZeroRedundancyOptimizer

    def zero(named: Iterable[tuple[str, Tensor]], kind: type[Optimizer], settings: dict[str, Any]) -> Optimizer:
        return ZeroRedundancyOptimizer([param for _, param in named], kind, **settings)

    sgd: dict[str, Any] = {"lr": 0.1, "momentum": 0.9, "weight_decay": 0.01}
    dense = (None, dgcopt.TopK(1.0, values="fp64"), dgcopt.DGC(1.0))
    sparse = (dgcopt.TopK(0.1), dgcopt.DGC(0.1), dgcopt.PowerSGD())
    for kind, settings in ((torch.optim.SGD, sgd), (torch.optim.AdamW, {"lr": 0.02})):
        bare = Recipe(lambda named, kind=kind, settings=settings: kind([param for _, param in named], **settings))
        sharded = replace(bare, optimizer=functools.partial(zero, kind=kind, settings=settings))
        whole = Replica(bare)
        train([whole], range(STEPS))
        for compression in dense + sparse:
            what = f"ZeRO of {kind.__name__}, {compression}"
            mine = Replica(replace(sharded, compression=compression, schedule_first=True), comm)
            train([mine], range(STEPS))
            assert_same_on_all_ranks(comm, mine.parameters, what)
            if compression in dense:
                assert_close(mine.parameters, whole.parameters, 1e-9, what)
            before = [param.detach().clone() for param in mine.parameters]
            mine.backward(STEPS)
            if comm.rank == 1:
                mine.parameters[0].grad[0, 0] = torch.nan  # type: ignore[index]
            mine.step(STEPS)
            assert all(map(torch.equal, mine.parameters, before)), f"{what}: a step that no rank takes moved weights"

    def bare_zero() -> Optimizer:
        return zero(make_model().named_parameters(), torch.optim.SGD, {"lr": 0.1})

    for refused in (
        lambda: dgcopt.DistributedOptimizer(bare_zero(), None, dgcopt.TopK(0.1, source="update"), comm=comm),
        lambda: dgcopt.DistributedOptimizer(bare_zero(), op="adasum", comm=comm),
        lambda: dgcopt.LocalSGD(bare_zero(), every=2, comm=comm),
    ):
        try:
            refused()
        except ConfigError as error:
            assert "ZeroRedundancyOptimizer.step() exchanges weights" in str(error), error
        else:
            raise AssertionError("no rank steps by itself")


@only(wires=["torch"])
def zero_redundancy_optimizer_loses_nothing(comm: Comm) -> None:
    """Below ratio 1, applied gradients and residuals add up to all gradients; also through its own state_dict."""
    from torch.distributed.optim import ZeroRedundancyOptimizer

    def make(named: Iterable[tuple[str, Tensor]]) -> Optimizer:
        return ZeroRedundancyOptimizer([param for _, param in named], torch.optim.SGD, lr=0.1)

    def total(tensors: Iterable[Tensor]) -> Tensor:
        return comm.run(AllReduce(torch.cat([tensor.flatten() for tensor in tensors]), op="sum", label="total"))

    for compression in (dgcopt.TopK(0.1, values="fp64"), dgcopt.DGC(0.1, values="fp64")):
        recipe = Recipe(make, compression=compression)
        mine = Replica(recipe, comm)
        start = torch.cat([param.detach().flatten() for param in make_model().parameters()])
        given = torch.zeros_like(start)
        for step in range(STEPS):
            mine.backward(step)
            given += total(param.grad for param in mine.parameters)  # type: ignore[misc]
            mine.step(step)
        try:
            mine.optimizer.state_dict()
            raise AssertionError("each rank has a part of the state only")
        except RuntimeError as error:
            assert "consolidate_state_dict" in str(error)
        for rank in range(comm.size):
            mine.optimizer.consolidate_state_dict(to=rank)  # type: ignore[attr-defined]
            if comm.rank == rank:
                state = mine.optimizer.state_dict()
        residual = state["dgcopt"]["memory"]["residual"]
        assert residual, "something was to be held back"
        held = total(residual.get(name, torch.zeros_like(param)) for name, param in mine.model.named_parameters())
        applied = (start - torch.cat([param.detach().flatten() for param in mine.parameters])) / 0.1 * comm.size
        torch.testing.assert_close(applied + held, given, rtol=1e-9, atol=1e-9)

        resumed = Replica(recipe, comm)
        resumed.model.load_state_dict(mine.model.state_dict())
        resumed.optimizer.load_state_dict(state)
        train([mine, resumed], [STEPS])
        assert all(map(torch.equal, mine.parameters, resumed.parameters)), f"{compression}: resumed otherwise"


SCENARIOS: dict[str, Callable[[Comm], Any]] = {
    f"one process: {name}": functools.partial(every_setting, kind) for name, kind in optimizer_classes().items()
}
SCENARIOS |= {
    f"one process: {function.__name__}": function
    for function in (
        sgd_takes_sparse_and_dense,
        ranks_take_other_branches,
        odd_parameters,
        dgc_at_ratio_one_is_dense,
        two_optimizers,
        average_by_hand,
        a_closure_that_leaves_nothing_to_do,
        a_closure_without_a_loss,
        a_step_at_lr_0_after_no_sync,
        zero_redundancy_optimizer,
        zero_redundancy_optimizer_loses_nothing,
    )
}
