"""What was wrapped is freed when it is dropped, though its wire and its parameters live on."""

from __future__ import annotations

import gc
import weakref
from contextlib import nullcontext
from typing import Any

import pytest
import torch
from torch import nn

import dgcopt


def make_models() -> list[nn.Module]:
    torch.manual_seed(0)
    models = [nn.Linear(64, 64) for _ in range(2)]
    models[1].load_state_dict(models[0].state_dict())
    return models


@pytest.mark.filterwarnings("ignore::FutureWarning")  # gc looks at all that torch has deprecated
def test_six_optimizers_one_after_another_on_the_same_models_leave_nothing() -> None:
    comms, models = dgcopt.simulated_world(2), make_models()
    dropped, alive = [], []
    gc.collect()  # of the tests before
    gc.collect()  # and of their finalizers
    for _ in range(6):
        optimizers = [
            dgcopt.DistributedOptimizer(
                torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9),
                model.named_parameters(),
                dgcopt.DGC(0.1),
                comm=comm,
            )
            for model, comm in zip(models, comms, strict=True)
        ]
        for model in models:
            model(torch.ones(2, 64)).sum().backward()
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
        dropped += [weakref.ref(optimizer) for optimizer in optimizers]
        del optimizers, optimizer
        gc.collect()
        alive.append(sum(isinstance(thing, torch.Tensor) for thing in gc.get_objects()))
    assert not any(reference() for reference in dropped)
    assert alive == alive[:1] * 6, "tensors that are alive"
    assert not any(param._post_accumulate_grad_hooks for model in models for param in model.parameters())


def test_averaging_and_hooks_of_ddp_are_freed() -> None:
    comm, model = dgcopt.simulated_world(2)[0], make_models()[0]
    optimizer = dgcopt.LocalSGD(4).attach(torch.optim.SGD(model.parameters(), lr=0.1), model.named_parameters(), comm)
    state, hook = dgcopt.ddp_hook(dgcopt.DGC(0.1), comm=comm)
    assert state.comm is comm and state._runner is not None
    dropped = [weakref.ref(optimizer.averaging), weakref.ref(state)]
    del optimizer, state, hook
    gc.collect()
    assert not any(reference() for reference in dropped)


@pytest.mark.parametrize("freed", [(), (0,), (1,), (0, 1)])
@pytest.mark.parametrize("others", [0, 1])
def test_an_optimizer_replaced_on_its_parameters_is_freed_at_another_time_on_each_rank(freed, others) -> None:
    """Where it is alive yet, gradients of its parameters still come to it: it must not send them, as in a GAN."""

    def wrapped(model: nn.Module, comm: dgcopt.Comm) -> torch.optim.Optimizer:
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        return dgcopt.DistributedOptimizer(optimizer, model.named_parameters(), comm=comm)

    def train(loops: list[list[torch.optim.Optimizer]]) -> None:
        for _ in range(3):
            for optimizers in loops:
                for rank in range(2):
                    sum(one[rank](torch.ones(2, 64)).sum() for one in (models, *besides)).backward()
                for optimizer in optimizers:
                    optimizer.step()
                for optimizer in (*loops[0], *loops[-1]):
                    optimizer.zero_grad()

    comms, models = dgcopt.simulated_world(2), make_models()
    besides = [make_models() for _ in range(others)]
    loops = [[*map(wrapped, each, comms)] for each in (*besides, models)]
    train(loops)
    replaced = loops.pop()
    for rank in freed:
        replaced[rank] = None
    gc.collect()
    loops.append([*map(wrapped, models, comms)])
    train(loops)
    assert torch.equal(*(model.weight for model in models))


def test_an_optimizer_that_was_replaced_counts_no_passes_too_many() -> None:
    """It lives until garbage collection finds it, and hears of gradients that another one steps."""
    comms, models = dgcopt.simulated_world(2), make_models()
    alive = []
    for _ in range(2):  # interrupted after one of two passes, and begun anew
        optimizers = [
            dgcopt.DistributedOptimizer(
                torch.optim.SGD(model.parameters(), lr=0.1), comm=comm, backward_passes_per_step=2
            )
            for model, comm in zip(models, comms, strict=True)
        ]
        alive.append(optimizers)
        for model in models:
            model(torch.ones(2, 64)).sum().backward()
    for model in models:
        model(torch.ones(2, 64)).sum().backward()
    for optimizer in optimizers:
        optimizer.step()
    with pytest.raises(RuntimeError, match="computed 3 times"):
        for _ in range(3):
            models[0](torch.ones(2, 64)).sum().backward()


@pytest.mark.parametrize("freed", [(), (0,), (1,), (0, 1)])
def test_an_optimizer_dropped_between_backward_and_step_is_freed_at_another_time_on_each_rank(freed) -> None:
    """Garbage collection runs at other times on the ranks; the exchanges that were in flight end for all."""

    def wrapped(model: nn.Module, comm: dgcopt.Comm) -> torch.optim.Optimizer:
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        return dgcopt.DistributedOptimizer(optimizer, model.named_parameters(), comm=comm)

    comms, models = dgcopt.simulated_world(2), make_models()
    dropped = [wrapped(model, comm) for model, comm in zip(models, comms, strict=True)]
    for is_last in (False, False, True):
        for model in models:
            model(torch.ones(2, 64)).sum().backward()
        for optimizer in () if is_last else dropped:
            optimizer.step()
            optimizer.zero_grad()
    optimizer = None
    for rank in freed:
        dropped[rank] = None
    gc.collect()
    models = make_models()
    optimizers = [wrapped(model, comm) for model, comm in zip(models, comms, strict=True)]
    for rank, model in enumerate(models):
        model(torch.full((2, 64), rank + 1.0)).sum().backward()
    for optimizer in optimizers:
        optimizer.step()
    expected = make_models()[0].weight - 0.1 * 3.0
    assert all(torch.allclose(model.weight, expected) for model in models)


@pytest.mark.parametrize("freed", [(), (0,), (1,), (0, 1)])
def test_an_optimizer_dropped_without_another_in_its_place_ends_in_an_error_of_all_ranks(freed) -> None:
    """Where it is alive yet, it has sent gradients of its parameters, as in a GAN, to ranks that wait for others."""
    comms, models, besides = dgcopt.simulated_world(2), make_models(), make_models()
    kept, dropped = (
        [
            dgcopt.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.1), comm=comm)
            for model, comm in zip(each, comms, strict=True)
        ]
        for each in (models, besides)
    )

    def step(optimizers: list[Any], failure: type[Exception] | None = None) -> None:
        for model, beside in zip(models, besides, strict=True):
            (model(torch.ones(2, 64)) + beside(torch.ones(2, 64))).sum().backward()
        for optimizer in optimizers:
            with nullcontext() if failure is None else pytest.raises(failure, match=r"freed it on some ranks.*collect"):
                optimizer.step()
                optimizer.zero_grad()

    for optimizers in (kept, dropped) * 2 + (kept,):
        step(optimizers)
    for rank in freed:
        dropped[rank] = None
    del optimizers
    gc.collect()
    step(kept, dgcopt.MismatchError if len(freed) == 1 else None)
