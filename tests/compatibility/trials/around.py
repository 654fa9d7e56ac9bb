"""What scripts do around an optimizer: groups, schedulers, hooks, state, precision, averages of weights."""

from __future__ import annotations

import contextlib
import copy
import functools
import pickle
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer, lr_scheduler

import dgcopt
from dgcopt import Comm
from tests.compatibility.replicas import ALONE, STEPS, Replicas, assert_close, batch, check, flat, perceptron, squared
from tests.compatibility.table import trial

AROUND = "Around an optimizer"


def sgd(model: nn.Module) -> Optimizer:
    return torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)


def adam(model: nn.Module) -> Optimizer:
    return torch.optim.AdamW(model.parameters(), lr=0.01)


class Projected(Optimizer):
    """Makes gradients orthogonal to their weights before the step of the optimizer inside, as OrthoGrad does."""

    def __init__(self, inner: Optimizer) -> None:
        self.inner, self.param_groups = inner, inner.param_groups

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for param in (param for group in self.param_groups for param in group["params"]):
            param.grad.sub_(param, alpha=float((param * param.grad).sum() / (param * param).sum()))
        self.inner.step()


@trial(
    AROUND,
    "a wrapper that changes gradients or weights in its step (OrthoGrad, TRAC, Magma)",
    note="the optimizer inside is wrapped; `inner.synchronize()` before `outer.step()`, within "
    "`inner.skip_synchronize()`. Without it the wrapper reads each rank's own gradients, and ranks may come apart",
)
def wrapper_outside() -> None:
    ends = []
    for comms in (None, ALONE):
        ranks = Replicas(sgd, comms=comms)
        outside = [Projected(optimizer) for optimizer in ranks.optimizers]
        for step in range(STEPS):
            ranks.backward(step)
            for optimizer in ranks.optimizers if comms is None else ():
                optimizer.synchronize()
            for outer, inner in zip(outside, ranks.optimizers, strict=True):
                with inner.skip_synchronize() if comms is None else contextlib.nullcontext():
                    outer.step()
        ranks.assert_equal()
        ends.append(ranks.weights)
    assert_close(*ends, "gradients were changed outside")


@trial(AROUND, "a wrapper without torch's `Optimizer.__init__`, given to `DistributedOptimizer`")
def wrapper_inside() -> str | None:
    try:
        Replicas(lambda model: Projected(sgd(model)))
    except dgcopt.ConfigError as error:
        return str(error)
    return None


@trial(AROUND, "parameter groups")
def groups() -> None:
    def make(model: nn.Module) -> Optimizer:
        first, *others = model.parameters()
        return torch.optim.SGD([{"params": [first], "lr": 0.01}, {"params": others, "weight_decay": 0.1}], lr=0.1)

    check(make)


@trial(AROUND, "`add_param_group` while training")
def group_added() -> None:
    ends = []
    for comms in (None, ALONE):
        ranks = Replicas(lambda model: torch.optim.SGD(model[0].parameters(), lr=0.1, momentum=0.9), comms=comms)
        ranks.train(range(2))
        for model, optimizer in zip(ranks.models, ranks.optimizers, strict=True):
            optimizer.add_param_group({"params": list(model[2].parameters()), "lr": 0.05})
        ends.append(ranks.train(range(2, 5)).weights)
    assert_close(*ends, "a group was added")


def scheduled(first: bool) -> None:
    kinds: list[Any] = [
        functools.partial(lr_scheduler.OneCycleLR, max_lr=0.1, total_steps=10),
        functools.partial(lr_scheduler.CosineAnnealingLR, T_max=5),
        functools.partial(lr_scheduler.LambdaLR, lr_lambda=lambda step: 1 / (1 + step)),
        functools.partial(lr_scheduler.ReduceLROnPlateau, patience=0),
    ]
    for kind in kinds:
        ends = []
        for comms in (None, ALONE):
            made: list[Any] = []

            def make(model: nn.Module, kind: Any = kind, made: list[Any] = made) -> Optimizer:
                optimizer = sgd(model)
                if first:
                    made.append(kind(optimizer))
                return optimizer

            ranks = Replicas(make, comms=comms)
            if not first:
                made += [kind(optimizer) for optimizer in ranks.optimizers]
            for step in range(STEPS):
                ranks.step(step)
                for scheduler in made:
                    scheduler.step(*([1.0] if isinstance(scheduler, lr_scheduler.ReduceLROnPlateau) else []))
            ranks.assert_equal()
            ends.append(ranks.weights)
        assert_close(*ends, str(kind))


trial(AROUND, "schedulers, made before wrapping")(functools.partial(scheduled, True))
trial(AROUND, "schedulers, made after wrapping")(functools.partial(scheduled, False))


@trial(
    AROUND,
    "step hooks of the optimizer and of all optimizers",
    note="run once per step, in the order of registration",
)
def step_hooks() -> None:
    from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook

    called: dict[str, int] = dict.fromkeys(("pre", "post", "all pre", "all post"), 0)

    def count(what: str) -> Any:
        def hook(*args: Any) -> None:
            called[what] += 1

        return hook

    removable = [
        register_optimizer_step_pre_hook(count("all pre")),
        register_optimizer_step_post_hook(count("all post")),
    ]
    try:
        for wrapped_first in (True, False):

            def make(model: nn.Module, early: bool = not wrapped_first) -> Optimizer:
                optimizer = adam(model)
                if early:
                    optimizer.register_step_pre_hook(count("pre"))
                    optimizer.register_step_post_hook(count("post"))
                return optimizer

            ranks = Replicas(make, compression=dgcopt.DGC(0.1))
            for optimizer in ranks.optimizers if wrapped_first else []:
                optimizer.register_step_pre_hook(count("pre"))
                optimizer.register_step_post_hook(count("post"))
            ranks.train()
    finally:
        for hook in removable:
            hook.remove()
    assert set(called.values()) == {2 * 2 * STEPS}, called


@trial(AROUND, "hooks of `state_dict` and `load_state_dict`")
def state_hooks() -> None:
    called: list[str] = []
    ranks = Replicas(sgd, compression=dgcopt.DGC(0.1)).train()
    other = Replicas(sgd, compression=dgcopt.DGC(0.1))
    for optimizer in (*ranks.optimizers, *other.optimizers):
        optimizer.register_state_dict_pre_hook(lambda optimizer: called.append("before saving"))
        optimizer.register_state_dict_post_hook(lambda optimizer, state: called.append("after saving"))
        optimizer.register_load_state_dict_pre_hook(lambda optimizer, state: called.append("before loading"))
        optimizer.register_load_state_dict_post_hook(lambda optimizer: called.append("after loading"))
    other.load(ranks.states())
    assert sorted(called) == sorted(2 * ["before saving", "after saving", "before loading", "after loading"]), called
    ranks.train(range(9, 12))
    assert torch.equal(other.train(range(9, 12)).weights, ranks.weights)


@trial(AROUND, "`copy.deepcopy`, pickle", note="a pickled one is the bare optimizer")
def copies() -> None:
    ranks = Replicas(sgd, compression=dgcopt.DGC(0.1)).train()
    bare = pickle.loads(pickle.dumps(ranks.optimizers[0]))
    assert type(bare) is torch.optim.SGD
    pairs = [copy.deepcopy((model, optimizer)) for model, optimizer in zip(ranks.models, ranks.optimizers, strict=True)]
    twins = copy.copy(ranks)
    twins.models, twins.optimizers = [pair[0] for pair in pairs], [pair[1] for pair in pairs]
    twins.train(range(9, 11))
    assert torch.equal(twins.weights, ranks.train(range(9, 11)).weights)


@trial(AROUND, "`zero_grad(set_to_none=False)`, gradient accumulation")
def accumulation() -> None:
    ends = []
    for comms in (None, ALONE):
        ranks = Replicas(sgd, comms=comms)
        for step in range(STEPS):
            for optimizer in ranks.optimizers:
                optimizer.zero_grad(set_to_none=False)
            for micro in range(3):
                for loss in ranks.losses(10 * step + micro):
                    (loss / 3).backward()
            for optimizer in ranks.optimizers:
                optimizer.step()
        ranks.assert_equal()
        ends.append(ranks.weights)
    assert_close(*ends, "accumulated")


@trial(AROUND, "clipping", note="`optimizer.clip_grad_norm_` clips the averaged gradient")
def clipping() -> None:
    ends = []
    for comms in (None, ALONE):
        ranks = Replicas(sgd, comms=comms)
        for step in range(STEPS):
            ranks.backward(step)
            for model, optimizer in zip(ranks.models, ranks.optimizers, strict=True):
                if comms is None:
                    optimizer.clip_grad_norm_(0.1)
                else:
                    nn.utils.clip_grad_norm_(model.parameters(), 0.1)
            for optimizer in ranks.optimizers:
                optimizer.step()
        ranks.assert_equal()
        ends.append(ranks.weights)
    assert_close(*ends, "clipped")
    ranks = Replicas(sgd, compression=dgcopt.DGC(0.1))
    for step in range(STEPS):
        ranks.backward(step)
        for model in ranks.models:
            nn.utils.clip_grad_norm_(model.parameters(), 0.1)
            nn.utils.clip_grad_value_(model.parameters(), 0.05)
        for optimizer in ranks.optimizers:
            optimizer.step()
        ranks.assert_equal()


@trial(AROUND, "several optimizers of one model")
def several() -> None:
    ends = []
    for comms in (None, ALONE):
        places = dgcopt.simulated_world(2) if comms is None else comms
        models, optimizers = [perceptron() for _ in places], []
        for place, model in zip(places, models, strict=True):
            pair = [
                torch.optim.SGD(model[0].parameters(), lr=0.1, momentum=0.9),
                torch.optim.AdamW(model[2].parameters(), lr=0.01),
            ]
            if place is not None:
                for part, optimizer in zip((0, 2), pair, strict=True):
                    dgcopt.DistributedOptimizer(optimizer, model[part].named_parameters(str(part)), comm=place)
            optimizers.append(pair)
        for step in range(STEPS):
            for place, model, pair in zip(places, models, optimizers, strict=True):
                for optimizer in pair:
                    optimizer.zero_grad()
                squared(model, *batch(step, None if place is None else place.rank)).backward()
            for which in (0, 1):
                for pair in optimizers:
                    pair[which].step()
        ends.append(flat(models[0]))
        assert all(torch.equal(flat(model), ends[-1]) for model in models)
    assert_close(*ends, "two optimizers")


def scaled(place: Comm | None, overflow: bool, unscale: bool) -> Tensor:
    model = perceptron().float()
    optimizer = sgd(model)
    if place is not None:
        dgcopt.DistributedOptimizer(optimizer, model.named_parameters(), comm=place)
    scaler = torch.amp.GradScaler("cpu", init_scale=256.0)
    for step in range(STEPS):
        optimizer.zero_grad()
        loss = squared(model, *batch(step, None if place is None else place.rank, dtype=torch.float32))
        spoilt = overflow and step == 2 and (place is None or place.rank == 1)
        scaler.scale(loss * torch.inf if spoilt else loss).backward()
        if unscale:
            scaler.unscale_(optimizer)
        scaler.step(optimizer)
        scaler.update()
    found = scaler.get_scale()
    assert found == (128.0 if overflow else 256.0), f"the scale is {found} on a rank that did not overflow itself"
    return flat(model)


def grad_scaler(unscale: bool, comm: Comm) -> None:
    for overflow in (False, True):
        assert_close(scaled(comm, overflow, unscale), scaled(None, overflow, unscale), "GradScaler", 1e-5)


for name, unscale in (("GradScaler", False), ("GradScaler, `unscale_` before the step", True)):
    trial(AROUND, name, real=True, note="an overflow on one rank skips the step, and halves the scale, on all")(
        functools.partial(grad_scaler, unscale)
    )


@trial(AROUND, "autocast to bfloat16")
def autocast() -> None:
    def loss(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
        with torch.autocast("cpu", dtype=torch.bfloat16):
            return nn.functional.mse_loss(model(x).float(), y)

    check(sgd, lambda: perceptron().float(), loss=loss, tolerance=3e-2)


@trial(AROUND, "EMA and SWA: AveragedModel, SWALR, update_bn")
def averaged_models() -> None:
    from torch.optim.swa_utils import SWALR, AveragedModel, get_ema_multi_avg_fn, update_bn

    for average in (None, get_ema_multi_avg_fn(0.9)):
        ends = []
        for comms in (None, ALONE):
            ranks = Replicas(sgd, comms=comms)
            means = [AveragedModel(model, multi_avg_fn=average) for model in ranks.models]
            schedulers = [SWALR(optimizer, swa_lr=0.05, anneal_epochs=2) for optimizer in ranks.optimizers]
            for step in range(STEPS):
                ranks.step(step)
                for mean, model, scheduler in zip(means, ranks.models, schedulers, strict=True):
                    mean.update_parameters(model)
                    scheduler.step()
            for mean in means:
                update_bn([batch(1)[0]], mean)
                assert torch.equal(flat(mean), flat(means[0]))
            ends.append(flat(means[0]))
        assert_close(*ends, "averaged model")


@trial(AROUND, "`torch.compile(optimizer.step)`", not_yet="not on torch 2.4", works_from=(2, 13))
def compiled_step() -> None:
    for make in (sgd, adam):
        plain = Replicas(make, compression=dgcopt.DGC(0.1)).train()
        ranks = Replicas(make, compression=dgcopt.DGC(0.1))
        steps = [torch.compile(optimizer.step, backend="aot_eager") for optimizer in ranks.optimizers]
        for step in range(STEPS):
            ranks.backward(step)
            for compiled in steps:
                compiled()
            ranks.assert_equal()
        assert_close(ranks.weights, plain.weights, "a compiled step", 1e-5)


@trial(AROUND, "optimizer in backward: a post-accumulate hook per parameter that steps", real=True)
def in_backward(comm: Comm) -> None:
    ends = []
    for place in (comm, None):
        model = perceptron()
        made: dict[Tensor, Any] = {}
        for name, param in model.named_parameters():
            made[param] = torch.optim.SGD([param], lr=0.1, momentum=0.9)
            if place is not None:
                dgcopt.DistributedOptimizer(made[param], [(name, param)], comm=place)

        def step_now(param: Tensor, made: dict[Tensor, Any] = made) -> None:
            made[param].step()
            made[param].zero_grad()

        for param in model.parameters():
            param.register_post_accumulate_grad_hook(step_now)
        for step in range(STEPS):
            squared(model, *batch(step, None if place is None else place.rank)).backward()
        ends.append(flat(model))
    assert_close(*ends, "stepped in backward")


@trial(
    AROUND,
    "torch.distributed.checkpoint: get_state_dict, set_state_dict",
    note="residuals are not saved, and a warning says so; with `flatten_optimizer_state_dict=True` torch drops the "
    "step too, and there is no warning: use `dgcopt.checkpoint`",
    real=True,
)
def distributed_checkpoint(comm: Comm) -> None:
    from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict

    ranks = Replicas(adam, comms=[comm]).train()
    model_state, state = get_state_dict(ranks.models[0], ranks.optimizers[0])
    model_state, state = copy.deepcopy((model_state, state))
    ranks.train(range(9, 11))
    other = Replicas(adam, comms=[comm])
    set_state_dict(other.models[0], other.optimizers[0], model_state_dict=model_state, optim_state_dict=state)
    assert_close(other.train(range(9, 11)).weights, ranks.weights, "restored")
