"""`dgcopt.survive.State`: the state that a rank takes from a live one, without residuals."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch.optim import SGD
from torch.optim.lr_scheduler import StepLR

import dgcopt
from dgcopt.comm.base import LocalComm
from dgcopt.gradients.synchronised import synchronised
from tests.support.worlds import Ranks, same, small_model


def sgd(params: Any) -> SGD:
    return SGD(params, lr=0.1, momentum=0.9)


def trained(steps: int, **values: Any) -> tuple[Ranks, StepLR, dgcopt.survive.State]:
    """Two ranks after some steps, and the scheduler and State of the first."""
    ranks = Ranks(2, sgd, compression=dgcopt.DGC(0.1))
    schedules = [StepLR(optimizer, step_size=2) for optimizer in ranks.optimizers]
    for seed in range(steps):
        ranks.step(seed)
        for schedule in schedules:
            schedule.step()
    state = dgcopt.survive.State(model=ranks.models[0], optimizer=ranks.optimizers[0], schedule=schedules[0], **values)
    return ranks, schedules[0], state


def test_a_rank_that_comes_back_takes_all_but_the_residual() -> None:
    live, schedule, given = trained(5, step=5, losses=[torch.ones(2)])
    back, its_schedule, taken = trained(0, step=0, losses=[])
    assert not same(back.weights(), live.weights())
    taken._load(given._own())
    assert same(back.weights(), live.weights())
    assert same(taken.losses, given.losses) and taken.step == 5
    assert its_schedule.last_epoch == schedule.last_epoch == 5
    assert back.optimizers[0].param_groups[0]["lr"] == live.optimizers[0].param_groups[0]["lr"] < 0.1
    held = [synchronised(world.optimizers[0]).engine.store.memory() for world in (live, back)]
    assert held[0] and not held[1], "the residual of a rank is sent to no other"


def test_a_process_that_cannot_load_the_state_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    """With a RuntimeError it would ask to join again, for ever, which aborts a step of all ranks each time."""
    _, _, given = trained(1)
    monkeypatch.setattr("dgcopt.survive.broadcast_object", lambda value, comm: given._own())
    model = torch.nn.Linear(3, 2)
    back = dgcopt.survive.State(model=model, optimizer=sgd(model.parameters()))
    with pytest.raises(dgcopt.ConfigError, match=r"cannot load the state of a live rank: (?s:.*) same script and"):
        back._transfer(SimpleNamespace(rank=1))  # type: ignore[arg-type]


def test_a_state_that_cannot_be_made_is_an_error_of_both_ranks() -> None:
    """Of a kind after which its giver goes on: see `SurvivingComm._hand_over`."""

    def state_dict() -> None:
        raise KeyError("epoch")

    schedule, model = SimpleNamespace(state_dict=state_dict, load_state_dict=None), torch.nn.Linear(3, 2)
    state = dgcopt.survive.State(model=model, optimizer=sgd(model.parameters()), schedule=schedule)
    with pytest.raises(dgcopt.ConfigError, match=r"rank 0 cannot be sent: state_dict\(\) .* raises KeyError: 'epoch'"):
        state._transfer(LocalComm())


def test_without_survivors_a_function_is_called_once_and_sync_changes_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("DGCOPT_SURVIVE", raising=False)
    dgcopt.init()
    calls: list[int] = []
    assert dgcopt.survive.complete(lambda: calls.append(1) or len(calls)) == 1 and calls == [1]  # type: ignore[func-returns-value]
    model = small_model()
    before = [param.detach().clone() for param in model.parameters()]
    state = dgcopt.survive.State(model=model, optimizer=sgd(model.parameters()), step=7)
    state.sync()
    assert state.step == 7 and same([param.detach() for param in model.parameters()], before)


def test_its_own_name_is_refused_for_a_value() -> None:
    model = small_model()
    with pytest.raises(dgcopt.ConfigError, match="has 'sync' itself"):
        dgcopt.survive.State(model=model, optimizer=sgd(model.parameters()), sync=1)


def test_a_state_without_model_or_optimizer_is_refused() -> None:
    model = small_model()
    for wrong in ({"model": model, "optimizer": "SGD"}, {"model": None, "optimizer": sgd(model.parameters())}):
        with pytest.raises(dgcopt.ConfigError, match="needs the model, and the optimizer"):
            dgcopt.survive.State(**wrong)  # type: ignore[arg-type]
