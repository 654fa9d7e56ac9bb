"""MuonAdamW: both parts are torch's, on one rank and on several, through schedulers and checkpoints."""

from __future__ import annotations

import copy
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.optim import SGD, AdamW
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook

import dgcopt

pytestmark = pytest.mark.skipif(not hasattr(torch.optim, "Muon"), reason="torch before 2.9")

DATA = torch.randn(8, 4, 6, generator=torch.Generator().manual_seed(5))


def make_model() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 16), nn.Tanh(), nn.Linear(16, 16), nn.Tanh(), nn.Linear(16, 3))


def make_optimizer(model: nn.Module) -> dgcopt.MuonAdamW:
    return dgcopt.MuonAdamW(model.named_parameters(), lr=0.02, adamw=("4.*",))


def backward(model: nn.Module, batch: Tensor) -> None:
    model.zero_grad()
    model(batch).square().mean().backward()


def test_matrices_are_stepped_by_muon_and_all_others_by_adamw() -> None:
    ours, theirs = make_model(), make_model()
    optimizer = make_optimizer(ours)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 2, gamma=0.5)
    named = dict(theirs.named_parameters())
    matrices = [named["0.weight"], named["2.weight"]]
    rest = [param for name, param in named.items() if name not in ("0.weight", "2.weight")]
    parts: list[Any] = [
        torch.optim.Muon(matrices, lr=0.02, adjust_lr_fn="match_rms_adamw"),
        AdamW(rest, lr=0.02, betas=(0.9, 0.95), weight_decay=0.1),
    ]
    schedulers = [torch.optim.lr_scheduler.StepLR(part, 2, gamma=0.5) for part in parts]
    for batch in DATA:
        backward(ours, batch)
        backward(theirs, batch)
        for steps in (optimizer, scheduler, *parts, *schedulers):
            steps.step()
    for name, param in ours.named_parameters():
        assert torch.equal(param, named[name]), name


def test_hooks_of_all_optimizers_run_once() -> None:
    model, seen = make_model(), []
    optimizer = make_optimizer(model)
    backward(model, DATA[0])
    handles = [
        register_optimizer_step_pre_hook(lambda *_: seen.append("before")),
        register_optimizer_step_post_hook(lambda *_: seen.append("after")),
    ]
    try:
        optimizer.step()
    finally:
        for handle in handles:
            handle.remove()
    assert seen == ["before", "after"]


def test_a_checkpoint_goes_on_with_the_same_bits() -> None:
    model = make_model()
    optimizer = make_optimizer(model)
    for batch in DATA[:4]:
        backward(model, batch)
        optimizer.step()
    other = copy.deepcopy(model)
    resumed = make_optimizer(other)
    resumed.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    for batch in DATA[4:]:
        for each, steps in ((model, optimizer), (other, resumed)):
            backward(each, batch)
            steps.step()
    for mine, theirs in zip(model.parameters(), other.parameters(), strict=True):
        assert torch.equal(mine, theirs)


def test_a_copy_of_model_and_optimizer_trains_by_itself() -> None:
    model = make_model()
    optimizer = make_optimizer(model)
    backward(model, DATA[0])
    optimizer.step()
    other, copied = copy.deepcopy((model, optimizer))
    for each, steps in ((model, optimizer), (other, copied)):
        backward(each, DATA[1])
        steps.step()
    for mine, theirs in zip(model.parameters(), other.parameters(), strict=True):
        assert mine is not theirs and torch.equal(mine, theirs)


def test_a_group_of_adamw_that_is_added_to_a_model_of_matrices_is_stepped() -> None:
    torch.manual_seed(0)
    model = nn.Linear(6, 3, bias=False)
    bias, theirs = (nn.Parameter(torch.zeros(3)) for _ in range(2))
    optimizer = dgcopt.MuonAdamW(model.named_parameters(), lr=0.02)
    optimizer.load_state_dict(optimizer.state_dict())
    optimizer.add_param_group({"params": [bias], "muon": False, "eps": 1e-4})
    adam = AdamW([theirs], lr=0.02, betas=(0.9, 0.95), eps=1e-4, weight_decay=0.1)
    for batch in DATA:
        for each, steps in ((bias, optimizer), (theirs, adam)):
            steps.zero_grad()
            (model(batch).detach() + each).square().mean().backward()
            steps.step()
    assert bool(bias.count_nonzero()) and torch.equal(bias, theirs)


def test_local_sgd_averages_moments_where_adamw_has_them() -> None:
    """Muon's matrices have none, which is no error; a state that neither part has is one."""

    def start(state_every: dict[str, int]) -> tuple[list[nn.Sequential], list[Any]]:
        models = [make_model() for _ in range(2)]
        rule = partial(dgcopt.LocalSGD, every=8, state_every=state_every)
        steps = [
            rule(make_optimizer(model), named_parameters=model.named_parameters(), comm=comm)
            for model, comm in zip(models, dgcopt.simulated_world(2), strict=True)
        ]
        return models, steps

    def train(models: list[nn.Sequential], optimizers: list[Any]) -> list[list[dict[str, Tensor]]]:
        for batch in DATA[:2]:
            for model, part in zip(models, batch.chunk(2), strict=True):
                backward(model, part)
            for optimizer in optimizers:
                optimizer.step()
        return [
            [optimizer.state[param] for param in model.parameters()]
            for model, optimizer in zip(models, optimizers, strict=True)
        ]

    ours, local = (train(*start(state_every)) for state_every in ({"exp_avg": 2}, {}))
    for place, (one, other) in enumerate(zip(*ours, strict=True)):
        mine, theirs = (states[place] for states in local)
        if "exp_avg" in one:
            assert torch.equal(one["exp_avg"], other["exp_avg"])
            torch.testing.assert_close(one["exp_avg"], (mine["exp_avg"] + theirs["exp_avg"]) / 2)
            assert not torch.equal(one["exp_avg_sq"], other["exp_avg_sq"])
        else:
            assert torch.equal(one["momentum_buffer"], mine["momentum_buffer"])
            assert torch.equal(other["momentum_buffer"], theirs["momentum_buffer"])
    with pytest.raises(dgcopt.ConfigError, match="no state 'exp_average'"):
        train(*start({"exp_average": 2}))


def test_averaged_gradients_equal_those_of_the_whole_batch() -> None:
    alone, models = make_model(), [make_model() for _ in range(2)]
    single = make_optimizer(alone)
    optimizers = [
        dgcopt.DistributedOptimizer(make_optimizer(model), model.named_parameters(), comm=comm)
        for model, comm in zip(models, dgcopt.simulated_world(2), strict=True)
    ]
    for batch in DATA:
        backward(alone, batch)
        single.step()
        for model, part in zip(models, batch.chunk(2), strict=True):
            backward(model, part)
        for optimizer in optimizers:
            optimizer.step()
    for mine, theirs in zip(models[0].parameters(), alone.parameters(), strict=True):
        torch.testing.assert_close(mine, theirs, rtol=1e-3, atol=1e-3)  # Newton-Schulz runs in bfloat16


def test_diloco_over_it_resumes_with_the_same_bits() -> None:
    """MuLoCo, with its outer gradient in 2 bits."""
    code = dgcopt.TopK(0.25, values="int2", indices="rice")
    rule = partial(dgcopt.DiLoCo, every=2, outer=partial(SGD, lr=0.7, momentum=0.6, nesterov=True), compression=code)

    def start() -> tuple[list[nn.Sequential], list[Any]]:
        models = [make_model() for _ in range(2)]
        comms = dgcopt.simulated_world(2)
        steps = [
            rule(make_optimizer(model), named_parameters=model.named_parameters(), comm=comm)
            for model, comm in zip(models, comms, strict=True)
        ]
        return models, steps

    def train(models: list[nn.Sequential], optimizers: list[Any], batches: Tensor) -> None:
        for batch in batches:
            for model, part in zip(models, batch.chunk(2), strict=True):
                backward(model, part)
            for optimizer in optimizers:
                optimizer.step()

    models, optimizers = start()
    train(models, optimizers, DATA[:5])
    others, resumed = start()
    for model, other, before, after in zip(models, others, optimizers, resumed, strict=True):
        other.load_state_dict(model.state_dict())
        after.load_state_dict(copy.deepcopy(before.state_dict()))
    for each in ((models, optimizers), (others, resumed)):
        train(*each, DATA[5:])
    for mine, theirs in zip(models[0].parameters(), others[0].parameters(), strict=True):
        assert torch.equal(mine, theirs)
    for mine, theirs in zip(models[0].parameters(), models[1].parameters(), strict=True):
        assert torch.equal(mine, theirs)


def test_parameters_without_names_and_models_without_matrices_are_refused() -> None:
    model = make_model()
    with pytest.raises(dgcopt.ConfigError, match="by names: give it"):
        dgcopt.MuonAdamW(model.parameters())  # type: ignore[arg-type]
    with pytest.raises(dgcopt.ConfigError, match="has no matrix"):
        dgcopt.MuonAdamW(model.named_parameters(), adamw=("*",))
    with pytest.raises(dgcopt.ConfigError, match=r"adamw must be a sequence of patterns, such as \('0.weight',\)"):
        dgcopt.MuonAdamW(model.named_parameters(), adamw="0.weight")
    with pytest.raises(dgcopt.ConfigError, match='needs "muon"'):
        make_optimizer(model).add_param_group({"params": [nn.Parameter(torch.zeros(2))]})
    optimizer = make_optimizer(model)
    groups = list(optimizer.param_groups)
    with pytest.raises(dgcopt.ConfigError, match=r'the parameter of shape \(2,\) with "muon": False'):
        optimizer.add_param_group({"params": [nn.Parameter(torch.zeros(2))], "muon": True})
    assert optimizer.param_groups == groups
