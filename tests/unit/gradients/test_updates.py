"""Optimizers that are not torch's own: what travels in front of them, and steps that none of theirs may take."""

import functools
import logging
import warnings
from collections.abc import Iterable

import pytest
import torch
from torch import Tensor, nn
from torch.optim import Adam, Optimizer
from torch.optim.lr_scheduler import StepLR

import dgcopt
from dgcopt.compressors.own_step import passes_over_missing_gradients, updates_add_up
from tests.support.optimizers import ZerosForNone
from tests.support.worlds import Ranks, single, small_batch, small_model

STEPS = 5


class ScheduleFree(Optimizer):
    """Weights that are recomputed from the optimizer's own state when training stops and goes on."""

    def __init__(self, params: Iterable[Tensor], lr: float = 0.1) -> None:
        super().__init__(params, {"lr": lr})

    @torch.no_grad()
    def step(self, closure: None = None) -> None:
        for group in self.param_groups:
            for param in group["params"]:
                if param.grad is not None:
                    z = self.state[param].setdefault("z", param.clone())
                    param.lerp_(z, 0.2)
                    z.sub_(param.grad, alpha=group["lr"])

    @torch.no_grad()
    def eval(self) -> None:
        for param, state in self.state.items():
            param.lerp_(state["z"], -0.5)

    @torch.no_grad()
    def train(self) -> None:
        for param, state in self.state.items():
            param.lerp_(state["z"], 1 / 3)


class Signs(Optimizer):
    """An ordinary elementwise one, which passes over parameters without a gradient."""

    def __init__(self, params: Iterable[Tensor], lr: float = 0.01) -> None:
        super().__init__(params, {"lr": lr})

    @torch.no_grad()
    def step(self, closure: None = None) -> None:
        for group in self.param_groups:
            for param in group["params"]:
                if param.grad is not None:
                    m = self.state[param].setdefault("m", torch.zeros_like(param))
                    param.sub_(m.lerp(param.grad, 0.1).sign(), alpha=group["lr"])
                    m.lerp_(param.grad, 0.01)


class Scaled(torch.optim.Adam):
    """Torch's own with something before it."""

    @torch.no_grad()
    def step(self, closure: None = None) -> None:
        for group in self.param_groups:
            for param in group["params"]:
                if param.grad is not None:
                    param.grad.mul_(0.5)
        super().step()


OTHERS = [ZerosForNone, ScheduleFree, Signs, Scaled]
ELEMENTWISE = [
    torch.optim.Adadelta,
    torch.optim.Adagrad,
    torch.optim.Adam,
    torch.optim.AdamW,
    torch.optim.Adamax,
    torch.optim.NAdam,
    torch.optim.RAdam,
    torch.optim.RMSprop,
    torch.optim.Rprop,
]


def state_of(optimizer: Optimizer) -> list[Tensor]:
    """All that an optimizer remembers, and its parameters."""
    params = [param for group in optimizer.param_groups for param in group["params"]]
    held = [value for param in params for _, value in sorted(optimizer.state.get(param, {}).items())]
    return [tensor.detach().clone() for tensor in [*params, *held] if isinstance(tensor, Tensor)]


def assert_same(ours: list[Tensor], theirs: list[Tensor]) -> None:
    assert len(ours) == len(theirs)
    assert all(torch.equal(one, other) for one, other in zip(ours, theirs, strict=True))


def backward_on_the_same_batch(ranks: Ranks, seed: int) -> None:
    inputs, targets = small_batch(seed=seed)
    for model, optimizer in zip(ranks.models, ranks.optimizers, strict=True):
        optimizer.zero_grad()
        nn.functional.cross_entropy(model(inputs), targets).backward()


# -- what travels ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", OTHERS)
@pytest.mark.parametrize("compressor", [dgcopt.TopK(0.1), dgcopt.DGC(0.1), dgcopt.FP16(dgcopt.TopK(0.1))], ids=repr)
def test_gradients_travel_in_front_of_what_is_not_known(kind, compressor, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO, "dgcopt"):
        ranks = Ranks(3, kind, compression=compressor)
    assert all(optimizer.compressor.sends == "gradient" for optimizer in ranks.optimizers)
    assert any(kind.__name__ in text and "source='update'" in text for text in caplog.messages), caplog.messages
    for seed in range(STEPS):
        ranks.step(seed)
        ranks.assert_replicas_equal()
    for optimizer in ranks.optimizers:
        getattr(optimizer, "eval", lambda: None)()
    ranks.assert_replicas_equal()


@pytest.mark.parametrize("kind", OTHERS)
def test_at_ratio_one_what_is_not_known_trains_as_one_process(kind) -> None:
    ranks = Ranks(2, kind, compression=dgcopt.TopK(1.0, values="fp64"))
    for seed in range(STEPS):
        ranks.step(seed)
    for ours, theirs in zip(ranks.weights(), single(kind, STEPS), strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("kind", ELEMENTWISE)
def test_updates_of_torchs_elementwise_optimizers(kind) -> None:
    """Of equal gradients the mean update is the bare optimizer's; of others replicas stay the same."""
    ranks = Ranks(2, kind, compression=dgcopt.TopK(1.0, values="fp64"))
    assert all(optimizer.compressor.sends == "update" for optimizer in ranks.optimizers)
    for seed in range(STEPS):
        backward_on_the_same_batch(ranks, seed)
        for optimizer in ranks.optimizers:
            optimizer.step()
    for ours, theirs in zip(ranks.weights(), single(kind, STEPS), strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-9, atol=1e-9)

    ranks = Ranks(3, kind, compression=dgcopt.TopK(0.1))
    for seed in range(STEPS):
        ranks.step(seed)
        ranks.assert_replicas_equal()


def test_a_gradient_of_which_all_elements_are_one() -> None:
    """Set by hand, as autograd makes none: the update cannot be written over it."""

    def trained(expanded: bool) -> Ranks:
        ranks = Ranks(2, lambda p: torch.optim.AdamW(p, lr=0.01), compression=dgcopt.TopK(0.1))
        for step in range(3):
            ranks.backward(step)
            for rank, model in enumerate(ranks.models):
                for param in model.parameters():
                    grad = torch.tensor(0.5 - rank + step, dtype=param.dtype).expand(param.shape)
                    param.grad = grad if expanded else grad.clone(memory_format=torch.contiguous_format)
            for optimizer in ranks.optimizers:
                optimizer.step()
        ranks.assert_replicas_equal()
        return ranks

    for mine, other in zip(trained(True).weights(), trained(False).weights(), strict=True):
        assert torch.equal(mine, other)


def test_updates_of_sparse_adam() -> None:
    def rows() -> nn.Module:
        torch.manual_seed(1)
        return nn.EmbeddingBag(30, 4, mode="sum", sparse=True, dtype=torch.float64)

    def step(models: list[nn.Module], optimizers: list[Optimizer], batches: list[Tensor]) -> None:
        for model, optimizer, batch in zip(models, optimizers, batches, strict=True):
            optimizer.zero_grad()
            model(batch).square().sum().backward()
        for optimizer in optimizers:
            optimizer.step()

    adam = functools.partial(torch.optim.SparseAdam, lr=0.05)
    generator = torch.Generator().manual_seed(0)
    batches = torch.randint(30, (STEPS, 3, 4, 5), generator=generator)
    for sparse_as_dense in (False, True):
        alone, settings = rows(), {"compression": dgcopt.TopK(1.0, values="fp64"), "sparse_as_dense": sparse_as_dense}
        bare, ranks = adam(alone.parameters()), Ranks(2, adam, rows, **settings)
        apart = Ranks(3, adam, rows, **settings | {"compression": dgcopt.TopK(0.1)})
        assert ranks.optimizers[0].compressor.sends == "update"
        for batch in batches:
            step([alone], [bare], [batch[0]])
            step(ranks.models, ranks.optimizers, [batch[0]] * 2)
            step(apart.models, apart.optimizers, list(batch))
            apart.assert_replicas_equal()
        torch.testing.assert_close(ranks.weights()[0], alone.weight.detach(), rtol=1e-9, atol=1e-9)


def test_properties_of_torchs_optimizers_are_known() -> None:
    class Renamed(torch.optim.AdamW):
        pass

    param = [nn.Parameter(torch.zeros(3, 3))]
    names = ("SGD", "ASGD", "LBFGS", "Adafactor")  # torch 2.4 has no Adafactor
    apart = tuple(getattr(torch.optim, name) for name in names if hasattr(torch.optim, name))
    assert all(updates_add_up(kind(param)) for kind in [*ELEMENTWISE, torch.optim.SparseAdam, Renamed])
    assert not any(updates_add_up(kind(param)) for kind in [*apart, *OTHERS])
    assert all(passes_over_missing_gradients(kind(param)) for kind in [*ELEMENTWISE, *apart, Renamed])
    assert not any(passes_over_missing_gradients(kind(param)) for kind in OTHERS)
    wrapped = dgcopt.DistributedOptimizer(torch.optim.Adam(param), comm=dgcopt.simulated_world(2)[0])
    assert updates_add_up(wrapped) and passes_over_missing_gradients(wrapped)


@pytest.mark.parametrize("kind", [ZerosForNone, Signs, Scaled])
@pytest.mark.parametrize("first", [False, True], ids=["no scheduler before", "a scheduler before"])
def test_updates_of_any_optimizer_are_taken_once(kind, first: bool) -> None:
    def make(params: Iterable[Tensor]) -> Optimizer:
        optimizer = kind(params)
        if first:
            optimizer.schedule = StepLR(optimizer, 2, 0.5)
        return optimizer

    ranks = Ranks(2, make, compression=dgcopt.TopK(1.0, values="fp64", source="update"))
    for seed in range(STEPS):
        backward_on_the_same_batch(ranks, seed)
        for optimizer in ranks.optimizers:
            optimizer.step()
    for ours, theirs in zip(ranks.weights(), single(kind, STEPS), strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-9, atol=1e-9)
    ranks = Ranks(3, make, compression=dgcopt.TopK(0.1, source="update"))
    for seed in range(STEPS):
        ranks.step(seed)
        ranks.assert_replicas_equal()


# -- a step that no rank takes ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", [*OTHERS, torch.optim.Adam, functools.partial(torch.optim.SGD, lr=0.1, momentum=0.9)])
@pytest.mark.parametrize("compressor", [None, dgcopt.TopK(0.1), dgcopt.TopK(0.1, source="update")], ids=repr)
@pytest.mark.parametrize("first", [False, True], ids=["no scheduler before", "a scheduler before"])
def test_nan_moves_nothing(kind, compressor, first: bool) -> None:
    """Neither weights nor what the optimizer remembers, also where a scheduler was there before it was wrapped."""

    def make(params: Iterable[Tensor]) -> Optimizer:
        optimizer = kind(params)
        if first:
            optimizer.schedule = StepLR(optimizer, 1, 0.9)
        return optimizer

    ranks = Ranks(2, make, compression=compressor)
    for seed in range(3):
        ranks.step(seed)
    before = [state_of(optimizer) for optimizer in ranks.optimizers]
    for optimizer in ranks.optimizers:
        optimizer.zero_grad()
    ranks.backward(3)
    ranks.models[1][0].weight.grad[0, 0] = torch.nan
    for optimizer in ranks.optimizers:
        optimizer.step()
    for optimizer, then in zip(ranks.optimizers, before, strict=True):
        assert_same(state_of(optimizer), then)
    ranks.step(4)
    ranks.assert_replicas_equal()
    assert not torch.equal(ranks.weights()[0], before[0][0])


# -- what others do around the step ----------------------------------------------------------------------------------


@pytest.mark.parametrize("void", [False, True])
@pytest.mark.parametrize("source", ["gradient", "update"])
@pytest.mark.parametrize("first", [False, True])
def test_hooks_and_schedulers_see_one_step(void: bool, source: str, first: bool) -> None:
    seen: list[list[Tensor]] = []

    def make(params: Iterable[Tensor]) -> Optimizer:
        optimizer = torch.optim.Adam(params)
        if first:
            optimizer.schedule = StepLR(optimizer, 1, 0.9)
        optimizer.register_step_post_hook(lambda optimizer, *_: seen.append(state_of(optimizer)))
        return optimizer

    ranks = Ranks(2, make, compression=dgcopt.TopK(0.1, source=source))
    for optimizer in ranks.optimizers:
        optimizer.schedule = getattr(optimizer, "schedule", None) or StepLR(optimizer, 1, 0.9)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for seed in range(3):
            ranks.backward(seed)
            if void:
                ranks.models[0][0].weight.grad[0, 0] = torch.nan
            for optimizer in ranks.optimizers:
                optimizer.step()
                optimizer.schedule.step()
                optimizer.zero_grad()
    assert len(seen) == 6, "one call per rank and step"
    assert_same(seen[-2][:6], seen[-1][:6])
    assert_same(seen[-1][:6], ranks.weights())


def test_a_step_bound_before_wrapping_is_refused_where_it_may_move_weights() -> None:
    comm, _ = dgcopt.simulated_world(2)
    for kind in (torch.optim.Adam, ZerosForNone):
        optimizer = kind(small_model().parameters())
        step = optimizer.step
        optimizer.step = lambda *args, step=step: step(*args)
        if kind is torch.optim.Adam:
            dgcopt.DistributedOptimizer(optimizer, comm=comm)
        else:
            with pytest.raises(dgcopt.ConfigError, match=r"ZerosForNone's `step` was replaced.* wrap"):
                dgcopt.DistributedOptimizer(optimizer, comm=comm)


def test_a_step_that_calls_the_one_above_it_exchanges_once() -> None:
    torch.optim.Adam(small_model().parameters())  # after which torch runs the hooks of Adam.step too
    ranks = Ranks(2, Scaled, compression=dgcopt.TopK(0.1))
    for seed in range(3):
        ranks.step(seed)
    assert [optimizer.telemetry.steps for optimizer in ranks.optimizers] == [3, 3]


# -- the first moment ------------------------------------------------------------------------------------------------


def adamw(params, betas: tuple[float, float], **settings) -> Optimizer:
    return torch.optim.AdamW(params, lr=0.02, betas=betas, weight_decay=0.1, **settings)


def trained(ranks: Ranks, steps: int = STEPS) -> list[Tensor]:
    for seed in range(steps):
        ranks.step(seed)
        ranks.assert_replicas_equal()
    return [param.detach() for param in ranks.models[0].parameters()]


@pytest.mark.parametrize("settings", [{}, {"amsgrad": True}, {"foreach": True}], ids=str)
@pytest.mark.parametrize(
    "compressor",
    [
        functools.partial(dgcopt.TopK, 0.1, "int2", "rice"),
        functools.partial(dgcopt.DGC, 0.1, vectors="int8"),
        lambda **kwargs: dgcopt.FP16(dgcopt.TopK(0.1, **kwargs)),
        lambda **kwargs: dgcopt.PerParameter({"0.*": dgcopt.TopK(0.1, **kwargs), "*": dgcopt.DGC(0.2, **kwargs)}),
    ],
)
def test_the_residual_in_place_of_the_first_moment_is_b1_of_zero(compressor, settings: dict) -> None:
    """While the ratio is below 1: the user's betas stay in the optimizer's groups."""
    kept = Ranks(3, functools.partial(adamw, betas=(0.9, 0.95), **settings), compression=compressor())
    ours = Ranks(
        3, functools.partial(adamw, betas=(0.9, 0.95), **settings), compression=compressor(first_moment="residual")
    )
    by_hand = Ranks(3, functools.partial(adamw, betas=(0.0, 0.95), **settings), compression=compressor())
    found = trained(ours)
    assert_same(found, trained(by_hand))
    assert not torch.equal(found[0], trained(kept)[0])
    assert all(group["betas"] == (0.9, 0.95) for one in ours.optimizers for group in one.param_groups)


@pytest.mark.parametrize("name", ["TopK", "DGC"])
def test_at_ratio_one_the_users_first_moment_stays(name: str) -> None:
    """In a warm-up, and in all of training: updates of one rank are those of the bare optimizer."""
    make, kind = functools.partial(adamw, betas=(0.9, 0.95)), getattr(dgcopt, name)
    warm = {"warmup": dgcopt.Warmup((1.0,), steps=STEPS)}
    ours = Ranks(2, make, compression=kind(0.1, first_moment="residual", source="update", **warm))
    theirs = Ranks(2, make, compression=kind(1.0, source="update"))
    model = small_model()
    bare = make(model.parameters())
    for seed in range(STEPS):
        for ranks in (ours, theirs):
            backward_on_the_same_batch(ranks, seed)
            for optimizer in ranks.optimizers:
                optimizer.step()
        inputs, targets = small_batch(seed=seed)
        bare.zero_grad()
        nn.functional.cross_entropy(model(inputs), targets).backward()
        bare.step()
    assert_same(list(ours.models[0].parameters()), list(theirs.models[0].parameters()))
    for param, expected in zip(ours.models[0].parameters(), model.parameters(), strict=True):
        torch.testing.assert_close(param, expected, rtol=1e-5, atol=1e-6)
    sparse = trained(ours, 2)  # the warm-up is over
    assert not torch.equal(sparse[0], trained(theirs, 2)[0])


@pytest.mark.parametrize(
    ("optimizer", "compressor"),
    [
        (functools.partial(torch.optim.SGD, lr=0.1, momentum=0.9), dgcopt.DGC(0.1, first_moment="residual")),
        (torch.optim.RMSprop, dgcopt.TopK(0.1, first_moment="residual")),
        (torch.optim.Adam, dgcopt.TopK(0.1, source="gradient", first_moment="residual")),
        (
            torch.optim.Adam,
            dgcopt.PerParameter({"0.*": dgcopt.TopK(0.1, first_moment="residual"), "*": dgcopt.TopK(0.1)}),
        ),
    ],
)
def test_a_first_moment_that_is_not_there_to_be_replaced(optimizer, compressor) -> None:
    with pytest.raises(dgcopt.ConfigError, match="first_moment"):
        Ranks(2, optimizer, compression=compressor)


@pytest.mark.parametrize("compression", [None, dgcopt.TopK(1.0)], ids=["gradients", "updates"])
def test_a_fused_step_of_a_transposed_parameter(compression) -> None:
    """torch's fused kernels ignore strides, and buckets hold the parameter in rows."""

    def trained(fused: bool) -> list[Tensor]:
        params = [nn.Parameter(torch.arange(24.0).view(6, 4).t()) for _ in range(2)]
        optimizers = [
            dgcopt.DistributedOptimizer(Adam([param], lr=0.1, fused=fused), None, compression, comm=comm)
            for param, comm in zip(params, dgcopt.simulated_world(2), strict=True)
        ]
        for step in range(4):
            for rank, (param, optimizer) in enumerate(zip(params, optimizers, strict=True)):
                optimizer.zero_grad(set_to_none=step < 2)  # later gradients are added to those of the exchange
                (param * torch.randn(4, 6, generator=torch.Generator().manual_seed(2 * step + rank))).sum().backward()
            for optimizer in optimizers:
                optimizer.step()
        return [param.detach() for param in params]

    for ours, wanted in zip(trained(True), trained(False), strict=True):
        torch.testing.assert_close(ours, wanted, rtol=1e-6, atol=1e-6)


def test_an_empty_parameter_has_a_state_like_the_others() -> None:
    """An empty shard: `torch.distributed.checkpoint` looks for the state of all parameters on all ranks."""
    comms = dgcopt.simulated_world(2)
    models = [nn.ParameterList([torch.ones(3), torch.ones(0)]) for _ in comms]
    optimizers = [
        dgcopt.DistributedOptimizer(torch.optim.AdamW(m.parameters()), m.named_parameters(), dgcopt.TopK(0.5), comm=c)
        for m, c in zip(models, comms, strict=True)
    ]
    for model in models:
        sum(param.sum() for param in model).backward()
    for optimizer in optimizers:
        optimizer.step()
    assert all(len(optimizer.state) == 2 for optimizer in optimizers)
