"""Optimizers that are not torch's own: other bases, names, methods and closures, and wrappers around optimizers."""

import contextlib
import copy
import pickle
import warnings
from abc import ABC
from contextlib import nullcontext
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim import SGD

import dgcopt
from dgcopt.gradients.optimizer import ADDED
from dgcopt.gradients.subclass import bare_class
from tests.support.worlds import Ranks, assert_close, momentum_sgd, same, small_batch, small_model


def test_an_optimizer_whose_first_base_is_none() -> None:
    """As in other packages: Python refused to give an object of such a class ours."""

    class Descent(ABC, torch.optim.Optimizer):
        def __init__(self, params: Any) -> None:
            super().__init__(params, {"lr": 0.1})

        @torch.no_grad()
        def step(self, closure: Any = None) -> None:
            for param in self.param_groups[0]["params"]:
                param.sub_(param.grad, alpha=0.1)

    ranks, plain = Ranks(2, Descent), Ranks(2, lambda params: torch.optim.SGD(params, lr=0.1))
    for seed in range(2):
        ranks.step(seed)
        plain.step(seed)
    assert all(torch.equal(*pair) for pair in zip(ranks.weights(), plain.weights(), strict=True))
    assert type(pickle.loads(pickle.dumps(plain.optimizers[0]))) is torch.optim.SGD
    assert bare_class(copy.deepcopy(ranks.optimizers[0])) is Descent


class Taken(torch.optim.Optimizer):
    """Momentum-free descent whose attributes and private methods have names that a wrapper might use."""

    FREE = (
        "mode",
        "comm",
        "engine",
        "wrapped",
        "names",
        "parameter_names",
        "bare",
        "bare_step",
        "settings",
        "optimizer",
    )
    METHODS = ("_join", "_restore", "_connect", "_average", "_end_step", "_use_gradients", "_within", "_named")

    def __init__(self, params: Any, lr: float = 0.1) -> None:
        super().__init__(params, {"lr": lr})
        vars(self).update({name: f"my {name}" for name in self.FREE})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        self.check()
        for group in self.param_groups:
            for param in group["params"]:
                if param.grad is not None:
                    param.sub_(param.grad, alpha=group["lr"])

    def check(self) -> None:
        assert all(vars(self)[name] == f"my {name}" for name in self.FREE)
        assert all(getattr(self, name)() == f"my {name}" for name in self.METHODS)


for method in Taken.METHODS:
    setattr(Taken, method, lambda self, *args, method=method: f"my {method}")


@pytest.mark.parametrize("compression", [None, dgcopt.DGC(0.1), dgcopt.Adasum()])
def test_attributes_and_methods_of_an_optimizer_stay_its_own(compression):
    """It is averaged like one without them."""
    ranks = Ranks(2, Taken, compression=compression)
    plain = Ranks(2, lambda params: SGD(params, lr=0.1), compression=compression)
    for seed in range(3):
        ranks.step(seed)
        plain.step(seed)
    ranks.assert_replicas_equal()
    assert_close(ranks.weights(), plain.weights())
    optimizer = ranks.optimizers[0]
    optimizer.check()
    assert {*vars(optimizer)} - {*vars(Taken([torch.nn.Parameter(torch.ones(1))]))} == {"_dgcopt"}


@pytest.mark.parametrize("name", ADDED)
@pytest.mark.parametrize("where", ["object", "class"])
def test_a_public_name_that_an_optimizer_has_already_is_refused(name, where):
    kind = type("Mine", (SGD,), {name: lambda self: None} if where == "class" else {})
    optimizer = kind([torch.nn.Parameter(torch.ones(2))], lr=0.1)
    if where == "object":
        setattr(optimizer, name, 1)
    with pytest.raises(dgcopt.ConfigError, match=rf"Mine has an attribute '{name}' of its own"):
        dgcopt.DistributedOptimizer(optimizer, comm=dgcopt.simulated_world(2)[0])
    assert type(optimizer) is kind


def test_an_attribute_averaging_of_its_own():
    """Gradients are averaged; weights are not, since `optimizer.averaging` would be replaced."""
    optimizer = SGD([torch.nn.Parameter(torch.ones(2))], lr=0.1)
    optimizer.averaging = True
    comm = dgcopt.simulated_world(2)[0]
    with pytest.raises(dgcopt.ConfigError, match="SGD has an attribute 'averaging' of its own"):
        dgcopt.LocalSGD(optimizer, 2, comm=comm)
    dgcopt.DistributedOptimizer(optimizer, comm=comm)
    dgcopt.sync_buffers(torch.nn.BatchNorm1d(2), optimizer)
    assert optimizer.averaging is True


class SAM(torch.optim.Optimizer):
    """Sharpness-aware minimization in two steps, without `step`, as scripts write it."""

    def __init__(self, params: Any, lr: float = 0.1, rho: float = 0.05) -> None:
        super().__init__(params, {"rho": rho})
        self.base_optimizer = SGD(self.param_groups, lr=lr, momentum=0.9)
        self.param_groups = self.base_optimizer.param_groups

    @torch.no_grad()
    def first_step(self) -> None:
        params = [param for group in self.param_groups for param in group["params"]]
        norm = torch.stack([param.grad.norm() for param in params]).norm()
        for param in params:
            self.state[param]["old"] = param.data.clone()
            param.add_(param.grad, alpha=0.05 / float(norm))
        self.zero_grad()

    def descend(self) -> None:
        for group in self.param_groups:
            for param in group["params"]:
                param.data = self.state[param]["old"]

    def second_step(self) -> None:
        """After `descend`, which simulated ranks do before any of them steps."""
        self.base_optimizer.step()
        self.zero_grad()


@pytest.mark.parametrize("compression", [None, dgcopt.TopK(0.2), dgcopt.DGC(0.2)])
def test_an_optimizer_that_steps_by_other_methods_is_noticed(compression, caplog):
    """Weights move, and nothing is sent: said once a rank. With the one inside it wrapped, ranks stay together."""
    for what in ("outside", "synchronised", "inside"):
        comms, models = dgcopt.simulated_world(2), [small_model() for _ in range(2)]
        sams = [SAM(model.parameters()) for model in models]
        wrapped = sams if what != "inside" else [sam.base_optimizer for sam in sams]
        for optimizer, model, comm in zip(wrapped, models, comms, strict=True):
            dgcopt.DistributedOptimizer(optimizer, model.named_parameters(), compression, comm=comm)
        caplog.clear()
        for seed in range(4):
            for methods in (["first_step"], ["descend", "second_step"]):
                inputs, targets = small_batch(seed=seed)
                for rank, model in enumerate(models):
                    nn.functional.cross_entropy(model(inputs[rank::2]), targets[rank::2]).backward()
                for optimizer in wrapped if what == "synchronised" else ():
                    optimizer.synchronize()
                for method in methods:
                    for sam in sams:
                        getattr(sam, method)()
        weights = [[param.detach() for param in model.parameters()] for model in models]
        told = [
            record.getMessage()
            for record in caplog.records
            if "this SAM's step() was not called" in record.getMessage()
        ]
        assert all(map(torch.equal, *weights)) == (what != "outside")
        assert len(told) == (2 if what == "outside" else 0)
        if told:
            assert "sam.base_optimizer = dgcopt.DistributedOptimizer(sam.base_optimizer, ...)" in told[0]


def test_backward_passes_without_a_step_that_are_meant(caplog):
    """Gradients that are looked at, accumulated, or made by a loop within the loop in no_sync()."""
    ranks = Ranks(2, momentum_sgd)
    for seed in range(12):
        ranks.backward(seed)
        if seed % 3:
            for optimizer in ranks.optimizers:
                optimizer.zero_grad()
    every = [param for model in ranks.models for param in model.parameters()]
    before = [weight.detach().clone() for weight in every]
    with contextlib.ExitStack() as inside, torch.no_grad():
        for optimizer in ranks.optimizers:
            inside.enter_context(optimizer.no_sync())
        for seed in range(8):
            with torch.enable_grad():
                ranks.backward(seed)
            for weight in every:
                weight.sub_(weight.grad, alpha=0.1)
        for weight, old in zip(every, before, strict=True):
            weight.copy_(old)
    for seed in range(5):
        ranks.step(seed)
        for weight in every:
            weight.detach().mul_(0.99)
    ranks.assert_replicas_equal()
    assert not [record for record in caplog.records if "was not called" in record.getMessage()]


class Around(torch.optim.Optimizer):
    """A wrapper that leaves out torch's own `__init__`: it makes gradients of each parameter orthogonal to it."""

    def __init__(self, inner: torch.optim.Optimizer) -> None:
        self.inner = inner
        self.param_groups, self.state, self.defaults = inner.param_groups, inner.state, inner.defaults
        self._optimizer_step_pre_hooks, self._optimizer_step_post_hooks = {}, {}

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for param in (param for group in self.param_groups for param in group["params"]):
            along = (param * param.grad).sum() / (param * param).sum()
            param.grad.sub_(param, alpha=float(along))
            param.mul_(1 - 0.01 * float(param.grad.norm()))  # as TRAC and Magma move weights by local gradients
        self.inner.step()


@pytest.mark.parametrize("compression", [None, dgcopt.TopK(0.2), dgcopt.DGC(0.2)])
def test_a_wrapper_around_an_optimizer_is_put_around_the_wrapped_one(compression):
    """Averaged first, ranks stay together."""
    wrapper = Around(SGD(small_model().parameters(), 0.1))
    with pytest.raises(
        dgcopt.ConfigError, match=r"Around .* goes around SGD. Wrap that one \(optimizer\.inner\) before"
    ):
        dgcopt.DistributedOptimizer(wrapper, comm=dgcopt.simulated_world(2)[0])
    ranks = Ranks(2, momentum_sgd, compression=compression)
    around = [Around(optimizer) for optimizer in ranks.optimizers]
    for seed in range(4):
        for optimizer in ranks.optimizers:
            optimizer.zero_grad()
        ranks.backward(seed)
        for optimizer in ranks.optimizers:
            optimizer.synchronize()
        for wrapper, optimizer in zip(around, ranks.optimizers, strict=True):
            with optimizer.skip_synchronize():
                wrapper.step()
    ranks.assert_replicas_equal()


class WithoutHooks(SGD):
    """Saves and loads state by itself, as bitsandbytes' optimizers load theirs."""

    def state_dict(self) -> dict[str, Any]:
        params = [param for group in self.param_groups for param in group["params"]]
        state = {place: self.state[param] for place, param in enumerate(params) if param in self.state}
        groups = [{**group, "params": [*range(len(group["params"]))]} for group in self.param_groups]
        return {"state": state, "param_groups": groups}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        saved = copy.deepcopy(state_dict)
        params = [param for group in self.param_groups for param in group["params"]]
        groups = [
            {**new, "params": old["params"]} for new, old in zip(saved["param_groups"], self.param_groups, strict=True)
        ]
        state = {params[place]: kept for place, kept in saved["state"].items()}
        self.__setstate__({"state": state, "param_groups": groups})


def test_an_optimizer_whose_state_is_saved_and_loaded_without_hooks():
    """What ranks hold back is in its state, and restored."""
    make, resume = [Ranks(2, lambda p: WithoutHooks(p, 0.1, 0.9), compression=dgcopt.TopK(0.1)) for _ in range(2)]
    for seed in range(3):
        make.step(seed)
    for ours, theirs, mine, yours in zip(make.optimizers, resume.optimizers, make.models, resume.models, strict=True):
        yours.load_state_dict(mine.state_dict())
        state = ours.state_dict()
        assert ours.residual_norm() > 0 and state["dgcopt"]["step"] == 3
        theirs.load_state_dict(state)
        assert same(theirs.state_dict()["dgcopt"]["memory"], state["dgcopt"]["memory"])
        assert not any(key.startswith("dgcopt") for o in (ours, theirs) for group in o.param_groups for key in group)
    for seed in range(3, 6):
        make.step(seed)
        resume.step(seed)
    assert_close(make.weights(), resume.weights(), 0)


def test_averaging_notices_state_that_was_loaded_without_hooks(caplog):
    for kind, told in ((WithoutHooks, 1), (SGD, 0)):
        caplog.clear()
        model = small_model()
        optimizer = dgcopt.SlowMo(kind(model.parameters(), 0.1), comm=dgcopt.simulated_world(1)[0])
        for _ in range(2):
            model(small_batch()[0]).square().sum().backward()
            optimizer.step()
            optimizer.load_state_dict(SGD.state_dict(optimizer))
        optimizer.step()
        assert sum("without torch's load_state_dict hooks" in text for text in caplog.messages) == 2 * told
        optimizer.__setstate__({"state": optimizer.state, "param_groups": [*optimizer.param_groups]})
        optimizer.step()
        assert sum("without torch's load_state_dict hooks" in text for text in caplog.messages) == 2 * told + 1


@pytest.mark.parametrize("rule", [dgcopt.LocalSGD(2), dgcopt.DiLoCo(2)])
def test_schedule_free_optimizers_are_not_averaged(rule):
    """They keep a second set of weights in their state."""
    kind = type("SGDScheduleFree", (SGD,), {"train": lambda self: None, "eval": lambda self: None})
    optimizer = kind([nn.Parameter(torch.ones(2))], 0.1)
    with pytest.raises(dgcopt.ConfigError, match=r"SGDScheduleFree is schedule-free: .* Use DistributedOptimizer"):
        rule.attach(optimizer, comm=dgcopt.simulated_world(2)[0])
    dgcopt.DistributedOptimizer(optimizer, comm=dgcopt.simulated_world(2)[0])


class Hessian(torch.optim.Optimizer):
    """Differentiates gradients in its step, as AdaHessian does."""

    def step(self, closure: Any = None) -> None:
        params = [param for group in self.param_groups for param in group["params"]]
        torch.autograd.grad([param.grad for param in params], params, [torch.ones_like(param) for param in params])


@pytest.mark.parametrize("compression", [None, dgcopt.DGC(0.2)])
def test_gradients_that_have_a_graph(compression):
    """Are averaged; a step that goes through the graph is refused."""
    for make in (momentum_sgd, lambda params: Hessian(params, {})):
        ranks = Ranks(2, make, compression=compression)
        for model in ranks.models:
            with warnings.catch_warnings(action="ignore"):
                model(small_batch()[0]).square().mean().backward(create_graph=True)
        refused = pytest.raises(dgcopt.ConfigError, match=r"Hessian\.step\(\) differentiates gradients, as AdaHessian")
        for optimizer in ranks.optimizers:
            with nullcontext() if make is momentum_sgd else refused:
                optimizer.step()
        ranks.assert_replicas_equal()


class Given(torch.optim.Optimizer):
    """Descent by the gradients that its step is given."""

    def __init__(self, params: Any) -> None:
        super().__init__(params, {"lr": 0.1})

    @torch.no_grad()
    def step(self, grads: Any = None, loss: Any = None) -> None:
        for param, grad in zip(self.param_groups[0]["params"], grads, strict=True):
            param.sub_(grad, alpha=0.1)


def test_tensors_given_to_a_step() -> None:
    """They are this rank's own: ranks came apart, and a log line said that nothing was changed."""
    ranks = Ranks(2, Given)
    ones = [torch.ones_like(param) for param in ranks.models[0].parameters()]
    for optimizer in ranks.optimizers:
        for arguments in ({"grads": ones}, {"grads": [], "loss": ones[0].sum()}):
            with pytest.raises(dgcopt.ConfigError, match=r"rank \d: Given.step\(\) is given tensors, .* param.grad"):
                optimizer.step(**arguments)
        with pytest.raises(dgcopt.ConfigError, match="is given tensors"):
            optimizer.step(ones)
    before = ranks.weights()
    for optimizer in ranks.optimizers:
        with optimizer.skip_synchronize():
            optimizer.step(ones)  # averaged by the user
    assert_close(ranks.weights(), [weight - 0.1 for weight in before])


@pytest.mark.parametrize("is_wrapped", [True, False])
def test_an_optimizer_that_another_one_of_the_same_parameters_has_followed(is_wrapped: bool, caplog: Any) -> None:
    """Its step is never called again, and garbage collection may leave it for long: no warning."""
    ranks = Ranks(2, lambda params: torch.optim.AdamW(params, lr=0.01))
    ranks.step()
    first = ranks.optimizers  # kept, as a cycle of references would
    bare = [momentum_sgd(model.parameters()) for model in ranks.models]
    if is_wrapped:
        for optimizer, model, comm in zip(bare, ranks.models, ranks.comms, strict=True):
            dgcopt.DistributedOptimizer(optimizer, model.named_parameters(), comm=comm)
    ranks.optimizers = bare
    for seed in range(6):
        ranks.step(seed)
    assert len(first) == 2 and ("weights changed after the last backward" in caplog.text) is not is_wrapped


def test_weights_that_move_once_in_each_step(caplog: Any) -> None:
    """Between its two passes: the next step begins the count anew."""
    ranks = Ranks(2, momentum_sgd, backward_passes_per_step=2)
    for seed in range(4):
        ranks.backward(seed)
        with torch.no_grad():
            for model in ranks.models:
                for param in model.parameters():
                    param.mul_(0.99)
        ranks.backward(seed)
        for optimizer in ranks.optimizers:
            optimizer.step()
            optimizer.zero_grad()
    assert "weights changed after the last backward" not in caplog.text
