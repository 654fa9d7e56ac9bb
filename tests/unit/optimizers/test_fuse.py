"""Fused steps are the plain optimizer's, whatever its class, and however parameters, gradients and state lie."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor, nn, optim
from torch.optim import Optimizer

import dgcopt
from dgcopt.gradients.synchronised import synchronised
from tests.support.worlds import Ranks, same, single, small_batch

SETTINGS: dict[str, list[dict[str, Any]]] = {
    "ASGD": [{}, {"weight_decay": 0.1, "t0": 2}],
    "Adadelta": [{}, {"weight_decay": 0.1}],
    "Adagrad": [{"fused": False}, {"fused": False, "lr_decay": 0.1, "initial_accumulator_value": 0.1}],
    "Adam": [{"fused": False}, {"fused": False, "amsgrad": True, "weight_decay": 0.1, "maximize": True}],
    "AdamW": [{"fused": False}],
    "Adamax": [{}, {"weight_decay": 0.1}],
    "NAdam": [{}, {"weight_decay": 0.1, "decoupled_weight_decay": True}],
    "RAdam": [{}],
    "RMSprop": [{}, {"momentum": 0.9, "centered": True}],
    "Rprop": [{}],
    "SGD": [
        {"lr": 0.1},
        {"lr": 0.1, "fused": False},
        {"lr": 0.1, "momentum": 0.9, "nesterov": True, "weight_decay": 0.1, "fused": False},
        {"lr": 0.1, "momentum": 0.9, "dampening": 0.5, "maximize": True, "foreach": True},
    ],
}
CASES = [(name, settings) for name, each in SETTINGS.items() for settings in each]
ALL = {name for name, kind in vars(optim).items() if isinstance(kind, type) and issubclass(kind, Optimizer)}
REFUSED = {"Adafactor", "LBFGS", "Muon", "SparseAdam"} & ALL


def test_every_optimizer_of_torch_is_one_or_the_other() -> None:
    assert ALL - {"Optimizer"} == SETTINGS.keys() | REFUSED


def make_params(dtype: torch.dtype = torch.float32) -> list[nn.Parameter]:
    """Small and large, channels last, transposed, of no dimension and of no elements."""
    generator = torch.Generator().manual_seed(1)

    def draw(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator).to(dtype)

    tensors = [draw(3, 5), draw(7), draw(200, 100), draw(64), draw(2, 3, 4, 5).to(memory_format=torch.channels_last)]
    tensors += [draw(), draw(6, 4).t(), draw(0), draw(1), draw(33), draw(130, 130)]
    return [nn.Parameter(tensor) for tensor in tensors]


def give_gradients(params: Sequence[Tensor], step: int, missing: Sequence[int] = ()) -> None:
    generator = torch.Generator().manual_seed(100 + step)
    for place, param in enumerate(params):
        grad = torch.randn(param.shape, generator=generator).to(param)
        param.grad = None if place in missing else torch.empty_like(param).copy_(grad)


def groups_of(params: Sequence[Tensor]) -> list[dict[str, Any]]:
    return [{"params": list(params[:6])}, {"params": list(params[6:]), "lr": 0.02}]


def pair(make: Callable[[list[dict[str, Any]]], Optimizer], **how: Any) -> tuple[list[Any], Optimizer, list[Any], Any]:
    one, other = make_params(), make_params()
    return one, make(groups_of(one)), other, dgcopt.fuse_optimizer(make(groups_of(other)), **how)


def assert_same(one: Sequence[Tensor], other: Sequence[Tensor], plain: Optimizer, fused: Optimizer) -> None:
    for place, (left, right) in enumerate(zip(one, other, strict=True)):
        assert same(left.detach(), right.detach()), f"parameter {place}"
    ours, theirs = fused.state_dict(), plain.state_dict()
    assert ours["param_groups"] == theirs["param_groups"]
    assert ours["state"].keys() == theirs["state"].keys()
    for place, state in theirs["state"].items():
        assert dict_of(ours["state"][place]) == dict_of(state), f"state of parameter {place}"


def dict_of(state: dict[str, Any]) -> dict[str, Any]:
    return {name: value.tolist() if isinstance(value, Tensor) else value for name, value in sorted(state.items())}


@pytest.mark.parametrize(("name", "settings"), CASES)
@pytest.mark.parametrize("do_flatten", [True, False])
def test_equals_the_plain_optimizer(name: str, settings: dict[str, Any], do_flatten: bool) -> None:
    """Also where some parameters have no gradient, now and then."""
    kind = getattr(optim, name)
    one, plain, other, fused = pair(lambda groups: kind(groups, **settings), do_flatten=do_flatten)
    for step in range(8):
        missing = {2: [1, 9], 3: [1], 6: list(range(11))}.get(step, ())
        for params, optimizer in ((one, plain), (other, fused)):
            give_gradients(params, step, missing)
            optimizer.step()
        assert_same(one, other, plain, fused)


@pytest.mark.parametrize(
    ("name", "settings"), [("Adagrad", {}), ("Adam", {}), ("AdamW", {}), ("SGD", {"nesterov": True})]
)
def test_fused_kernels_are_taken_where_it_is_left_open(name: str, settings: dict[str, Any]) -> None:
    kind = getattr(optim, name)
    more = {"momentum": 0.9, "weight_decay": 0.1} if name == "SGD" else {}
    one, plain, other, fused = pair(lambda groups: kind(groups, **settings, **more, fused=True))
    _, _, third, left_open = pair(lambda groups: kind(groups, **settings, **more))
    for step in range(4):
        for params, optimizer in ((one, plain), (other, fused), (third, left_open)):
            give_gradients(params, step)
            optimizer.step()
        assert left_open.param_groups[0]["fused"] is None
    for left, right in zip(other, third, strict=True):
        assert same(left.detach(), right.detach())
    torch.testing.assert_close(one, other, rtol=1e-6, atol=1e-7)


@pytest.mark.parametrize("name", ["Adagrad", "Adam", "AdamW", "SGD"])
@pytest.mark.parametrize("apart", ["gradient", "state", "gaps"])
@pytest.mark.parametrize("do_flatten", [True, False])
def test_fused_kernels_are_left_out_where_memory_orders_differ(name: str, apart: str, do_flatten: bool) -> None:
    """torch's go through parameter, gradient and state as if all had one order, and step by wrong numbers."""
    settings = {"lr": 0.1, "momentum": 0.9} if name == "SGD" else {"lr": 0.1}

    def trained(fuses: bool) -> Tensor:
        draws = torch.Generator().manual_seed(1)
        whole = torch.randn(4, 9, generator=draws)
        param = nn.Parameter(whole[:, :6] if apart == "gaps" else whole[:, :6].clone())
        optimizer = getattr(optim, name)([param], **settings)
        if fuses:
            dgcopt.fuse_optimizer(optimizer, do_flatten=do_flatten)
        for step in range(4):
            if apart == "state" and step == 2:
                param.data = param.data.t().contiguous().t()
            grad = torch.randn(6, 4, generator=draws).t()
            param.grad = grad if apart == "gradient" else torch.empty_like(param).copy_(grad)
            optimizer.step()
        return torch.cat([param.detach().flatten(), whole[:, 6:].flatten()])

    torch.testing.assert_close(trained(True), trained(False), rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_fused_kernels_are_left_out_in_half_precision(dtype: torch.dtype) -> None:
    """torch's SGD was off by ten times its rounding after six steps."""

    def trained(dtype: torch.dtype, fuses: bool) -> Tensor:
        draws = torch.Generator().manual_seed(1)
        param = nn.Parameter(torch.randn(100, generator=draws).to(dtype))
        optimizer = optim.SGD([param], lr=0.01, momentum=0.9)
        if fuses:
            dgcopt.fuse_optimizer(optimizer)
        for _ in range(6):
            param.grad = torch.randn(100, generator=draws).to(param)
            optimizer.step()
        return param.detach().double()

    torch.testing.assert_close(trained(dtype, True), trained(torch.float64, False), rtol=0, atol=0.04)


@pytest.mark.parametrize("numel", [4, 20_000])
def test_a_parameter_without_a_gradient_in_the_first_steps_of_sgd(numel: int) -> None:
    """torch's fused SGD takes the momentum of all parameters or of none, and raised a TypeError."""

    def trained(fuses: bool) -> list[Tensor]:
        params = [nn.Parameter(torch.ones(numel)) for _ in range(3)]
        optimizer = optim.SGD(params, lr=0.1, momentum=0.9)
        if fuses:
            dgcopt.fuse_optimizer(optimizer)
        for step in range(4):
            give_gradients(params, step, [0] if step < 2 else [])
            optimizer.step()
        return [param.detach() for param in params]

    torch.testing.assert_close(trained(True), trained(False), rtol=1e-6, atol=1e-6)


class Spy(optim.SGD):
    """Writes down what it steps."""

    def step(self, closure: Any = None) -> Any:
        self.seen = [
            [param.numel() for param in group["params"] if param.grad is not None] for group in self.param_groups
        ]
        return super().step(closure)


def test_small_tensors_are_stepped_together_and_long_ones_by_themselves() -> None:
    sizes = [10, 64, 1000, 20_000, 5, 300_000, 30]
    params = [nn.Parameter(torch.zeros(size)) for size in sizes]
    fused = dgcopt.fuse_optimizer(Spy(params, lr=0.1, momentum=0.9, foreach=False), elementwise=True)
    for step in range(2):
        give_gradients(params, step)
        fused.step()
    # the last comes first, and each begins on a block of 64
    assert fused.seen == [[30, 300_000, 5, 20_000, 1024 + 64 + 10]]
    start = params[-1].data_ptr()
    assert [(param.data_ptr() - start) // 4 for param in reversed(params)] == [
        0,
        64,
        300_096,
        300_160,
        320_192,
        321_216,
        321_280,
    ]


def test_adjacent_parameters_are_stepped_together_without_moving() -> None:
    memory, grads = torch.zeros(30), torch.ones(30)
    params = [nn.Parameter(memory[start : start + 10]) for start in (0, 10, 20)]
    for place, param in enumerate(params):
        param.grad = grads[10 * place : 10 * place + 10]
    fused = dgcopt.fuse_optimizer(Spy(params, lr=0.5, foreach=False), do_flatten=False, elementwise=True)
    fused.step()
    assert fused.seen == [[30]] and memory.eq(-0.5).all()
    params[1].grad = torch.ones(10)
    fused.step()
    assert fused.seen == [[30]] and memory.eq(-1).all(), "small gradients are copied together"
    params[1].grad = None
    fused.step()
    assert fused.seen == [[10, 10]] and memory.eq(torch.tensor([-1.5, -1, -1.5]).repeat_interleave(10)).all()


@pytest.mark.parametrize("do_flatten", [True, False])
@pytest.mark.parametrize("tied", ["parts of one", "transposed", "of two groups"])
def test_parameters_that_share_memory_stay_tied(tied: str, do_flatten: bool) -> None:
    def train(fuse: bool) -> list[Tensor]:
        memory = torch.arange(60.0).view(6, 10)
        views = {
            "parts of one": [memory, memory[1], memory[4]],
            "transposed": [memory, memory.t(), torch.zeros(3)],
            "of two groups": [torch.zeros(3), memory, memory.view(60)],
        }
        params = [nn.Parameter(view) for view in views[tied]]
        optimizer: Any = optim.SGD([{"params": params[:2]}, {"params": params[2:]}], lr=0.5)
        if tied != "of two groups":
            optimizer = optim.SGD(params, lr=0.5)
        if fuse:
            optimizer = dgcopt.fuse_optimizer(optimizer, do_flatten)
        for _ in range(2):
            for param in params:
                param.grad = torch.ones_like(param)
            optimizer.step()
        return [param.detach() for param in params]

    assert same(train(True), train(False))


def test_gradients_that_are_views_of_their_negatives() -> None:
    def train(fuse: bool) -> list[Tensor]:
        params = [nn.Parameter(torch.ones(numel)) for numel in (3, 1, 1)]
        optimizer: Any = optim.SGD(params, lr=0.1, momentum=0.9)
        if fuse:
            optimizer = dgcopt.fuse_optimizer(optimizer)
        for _ in range(3):
            optimizer.zero_grad()
            product = torch.complex(*params[1:]).conj() * torch.tensor([1 + 2j])
            (params[0].sum() + product.real.sum()).backward()
            assert params[2].grad is not None and params[2].grad.is_neg()
            optimizer.step()
        return [param.detach() for param in params]

    assert torch.allclose(torch.cat(train(True)), torch.cat(train(False)))


def test_gradients_that_lie_together_now_and_then() -> None:
    def train(fuse: bool) -> Any:
        params = [nn.Parameter(torch.zeros(10)) for _ in range(3)]
        optimizer: Any = optim.SGD(params, lr=0.1, momentum=0.9, foreach=False)
        if fuse:
            optimizer = dgcopt.fuse_optimizer(optimizer)
        copied = []
        for step, way in enumerate(("apart", "together", "together", "one apart", "together", "apart", "turned")):
            memory = torch.randn(3 * 64, generator=torch.Generator().manual_seed(step))
            for place, param in enumerate(reversed(params)):
                param.grad = memory[64 * place : 64 * place + 10]
                if way == "apart" or (way == "one apart" and place == 1):
                    param.grad = param.grad.clone()
            if way == "turned":
                params[0].grad, params[2].grad = params[2].grad, params[0].grad
            optimizer.step()
            copied.append(fuse and [run.flat_grad is not None for plan in optimizer._plans for run in plan.runs])
        return [param.detach() for param in params], copied

    weights, copied = train(True)
    assert same(weights, train(False)[0])
    assert copied == [[True], [False], [False], [True], [False], [True], [False]]


@pytest.mark.parametrize("name", ["Adam", "SGD", "NAdam", "ASGD"])
def test_states_go_both_ways(name: str) -> None:
    kind = getattr(optim, name)
    more = {"momentum": 0.9} if name == "SGD" else {}
    one, plain, other, fused = pair(lambda groups: kind(groups, **more, foreach=False))
    for step in range(6):
        for params, optimizer in ((one, plain), (other, fused)):
            give_gradients(params, step)
            optimizer.step()
        if step == 2:
            kept = copy.deepcopy(plain.state_dict()), copy.deepcopy(fused.state_dict())
            plain.load_state_dict(kept[1])
            fused.load_state_dict(kept[0])
        assert_same(one, other, plain, fused)


def test_in_place_changes_of_the_state_count() -> None:
    one, plain, other, fused = pair(lambda groups: optim.Adam(groups, foreach=False))
    for step in range(4):
        for params, optimizer in ((one, plain), (other, fused)):
            give_gradients(params, step)
            optimizer.step()
            if step == 0:
                optimizer.state[params[3]]["step"].add_(2)  # of one that is stepped with others
            if step == 1:
                for param in params:
                    optimizer.state[param]["exp_avg"].mul_(2)
                    optimizer.state[param]["step"].add_(5)
            if step == 2:
                optimizer.state[params[1]]["exp_avg"] = torch.ones(7)
        assert_same(one, other, plain, fused)


def test_a_closure_a_schedule_and_parameters_that_come_or_move() -> None:
    def train(fuse: bool) -> tuple[list[Tensor], list[float]]:
        torch.manual_seed(0)
        model, late = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 2)), nn.Parameter(torch.ones(2))
        inputs, losses = torch.randn(10, 4), []
        optimizer = optim.Adam(model.parameters(), lr=0.1, foreach=False)
        schedule = optim.lr_scheduler.OneCycleLR(optimizer, 0.1, total_steps=8, cycle_momentum=False)
        if fuse:
            assert dgcopt.fuse_optimizer(optimizer) is optimizer and isinstance(optimizer, optim.Adam)

        def closure() -> Tensor:
            optimizer.zero_grad(set_to_none=len(losses) % 2 == 0)
            loss = (model(inputs) * late).square().mean()
            loss.backward()
            return loss

        for step in range(8):
            losses.append(optimizer.step(closure).item())
            schedule.step()
            if step == 2:
                optimizer.add_param_group({"params": [late], "max_lr": 0.1, "initial_lr": 0.1, "min_lr": 1e-6})
            if step == 4:
                model[0].weight.data = model[0].weight.detach().clone()
        return [param.detach() for param in [*model.parameters(), late]], losses

    plain, fused = train(False), train(True)
    assert same(plain[0], fused[0]) and plain[1] == fused[1]


def test_a_graph_that_needs_the_old_values_says_so() -> None:
    """As with the plain optimizer: a tensor's version tells of each step."""
    params = [nn.Parameter(torch.ones(3)) for _ in range(3)]
    fused = dgcopt.fuse_optimizer(optim.SGD(params, lr=0.1))
    loss = torch.stack([param.square() for param in params]).sum()
    give_gradients(params, 0)
    fused.step()
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()


def test_loss_scaling() -> None:
    for settings in ({}, {"fused": True}):
        params = [nn.Parameter(torch.ones(3)) for _ in range(2)]
        fused = dgcopt.fuse_optimizer(optim.Adam(params, lr=0.1, **settings))
        scaler = torch.amp.GradScaler("cpu", init_scale=4.0)
        scaler.scale(params[0].sum() + params[1].sum()).backward()
        scaler.step(fused)
        scaler.update()
        before = [param.detach().clone() for param in params]
        assert all(param.detach().sub(0.9).abs().max() < 1e-5 for param in params)
        scaler.scale(params[0].sum() * torch.inf + params[1].sum()).backward()
        scaler.step(fused)
        assert same([param.detach() for param in params], before), settings


def test_copied_and_pickled_it_is_the_plain_optimizer() -> None:
    params = make_params()
    fused = dgcopt.fuse_optimizer(optim.Adam(params, foreach=False))
    give_gradients(params, 0)
    fused.step()
    for twin in (copy.deepcopy(fused), pickle.loads(pickle.dumps(fused))):
        assert type(twin) is optim.Adam
        theirs = twin.param_groups[0]["params"]
        give_gradients(params, 1)
        give_gradients(theirs, 1)
    fused.step()
    twin.step()
    assert same([param.detach() for param in params], [param.detach() for param in theirs])


SGD = {"lr": 0.1, "momentum": 0.9, "foreach": False}


@pytest.mark.parametrize("compression", [None, dgcopt.DGC(ratio=1.0, values="fp64")])
@pytest.mark.parametrize("kind", ["SGD", "Adam"])
@pytest.mark.parametrize("set_to_none", [True, False])
def test_under_distributed_optimizer(kind: str, compression: Any, set_to_none: bool) -> None:
    def make(params: Any) -> Optimizer:
        settings: dict[str, Any] = SGD if kind == "SGD" else {"lr": 0.01, "foreach": False}
        return getattr(optim, kind)(params, **settings)

    ranks = Ranks(
        2,
        lambda params: dgcopt.fuse_optimizer(make(params)),
        compression=compression,
        bucket_mb=0.003,
        first_bucket_mb=0.001,
    )
    for seed in range(5):
        for optimizer in ranks.optimizers:
            optimizer.zero_grad(set_to_none=set_to_none)
        ranks.backward(seed)
        for optimizer in ranks.optimizers:
            optimizer.step()
    ranks.assert_replicas_equal()
    torch.testing.assert_close(ranks.weights(), single(make, 5), rtol=1e-9, atol=1e-11)
    if compression is None:
        (optimizer, _) = ranks.optimizers
        runs = [run for plan in optimizer._plans for run in plan.runs]
        assert len(runs) == len(synchronised(optimizer).engine.layout.buckets) > 1
        assert all(run.flat_grad is None for run in runs), "a gradient is copied that lies in a bucket"


class Twisted(nn.Module):
    """Layers that are not used in the order in which they are named."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.last, self.first, self.middle = nn.Linear(8, 5), nn.Linear(12, 8), nn.Linear(8, 8)
        self.double()

    def forward(self, x: Tensor) -> Tensor:
        return self.last(self.middle(self.first(x).tanh()).tanh())


def test_parameters_lie_as_their_gradients_do() -> None:
    ranks = Ranks(2, lambda params: dgcopt.fuse_optimizer(optim.Adam(params, foreach=False)), Twisted)
    for seed in range(4):
        ranks.step(seed)
    torch.testing.assert_close(
        ranks.weights(), single(lambda params: optim.Adam(params, foreach=False), 4, Twisted), rtol=1e-9, atol=1e-11
    )
    (plan,) = ranks.optimizers[0]._plans
    (run,) = plan.runs
    assert run.flat_grad is None
    assert run.params[0] is ranks.models[0].last.bias, "what was used last has its gradient first"


@pytest.mark.parametrize("rule", [dgcopt.LocalSGD(2), dgcopt.SlowMo(2), dgcopt.DiLoCo(2)])
def test_averaged_weights_train_alike_when_fused(rule: dgcopt.Averaging) -> None:
    def train(fuse: bool) -> list[Tensor]:
        models = [Twisted() for _ in range(2)]
        optimizers: list[Any] = [optim.SGD(model.parameters(), **SGD) for model in models]
        for optimizer, model, comm in zip(optimizers, models, dgcopt.simulated_world(2), strict=True):
            rule.attach(dgcopt.fuse_optimizer(optimizer) if fuse else optimizer, model.named_parameters(), comm)
        for seed in range(6):
            for rank, (optimizer, model) in enumerate(zip(optimizers, models, strict=True)):
                optimizer.zero_grad()
                inputs, targets = small_batch(seed=seed)
                nn.functional.cross_entropy(model(inputs[rank::2]), targets[rank::2]).backward()
            for optimizer in optimizers:
                optimizer.step()
        return [param.detach() for model in models for param in model.parameters()]

    assert same(train(True), train(False))


def test_sparse_gradients_are_stepped_by_themselves() -> None:
    def train(fuse: bool) -> list[Tensor]:
        torch.manual_seed(0)
        table = nn.Embedding(20, 3, sparse=True)
        params = [nn.Parameter(torch.zeros(3)), table.weight, nn.Parameter(torch.ones(3))]
        optimizer: Any = optim.Adagrad(params, lr=0.1)
        optimizer = dgcopt.fuse_optimizer(optimizer) if fuse else optimizer
        for step in range(4):
            give_gradients(params, step)
            if step in (1, 2):
                optimizer.zero_grad()
                ((table(torch.tensor([1, 5, 1])) + params[0]) * params[2]).square().sum().backward()
            optimizer.step()
        return [param.detach() for param in params]

    torch.testing.assert_close(train(True), train(False), rtol=1e-6, atol=1e-7)


def test_a_distributed_one_is_pickled() -> None:
    ranks = Ranks(2, lambda params: dgcopt.fuse_optimizer(optim.Adam(params)))
    ranks.step()
    assert type(pickle.loads(pickle.dumps(ranks.optimizers[0]))) is optim.Adam


@pytest.mark.parametrize("name", sorted(REFUSED))
def test_refuses_what_is_not_elementwise(name: str) -> None:
    with pytest.raises(dgcopt.ConfigError, match=f"{name} cannot be fused: its? "):
        dgcopt.fuse_optimizer(getattr(optim, name)([nn.Parameter(torch.zeros(2, 2))], lr=0.1))


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda params: Spy(params, lr=0.1), r"elementwise=True"),
        (lambda params: dgcopt.fuse_optimizer(optim.SGD(params, lr=0.1)), "fused already"),
        (lambda params: dgcopt.DistributedOptimizer(optim.SGD(params, lr=0.1)), "fuse the optimizer first"),
        (lambda params: optim.Adam(params, differentiable=True), "part of the graph"),
        (lambda params: nn.Linear(2, 2), "no torch.optim.Optimizer"),
    ],
)
def test_refuses(make: Any, words: str) -> None:
    with pytest.raises(dgcopt.ConfigError, match=words):
        dgcopt.fuse_optimizer(make([nn.Parameter(torch.zeros(2))]))
    dgcopt.shutdown()
