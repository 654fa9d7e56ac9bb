"""What models are made of."""

from __future__ import annotations

import functools
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.utils.checkpoint import checkpoint

import dgcopt
from tests.compatibility.replicas import OUT, STEPS, WIDTH, Replicas, assert_close, check, perceptron
from tests.compatibility.table import refusal, trial

MODELS = "Models"


def sgd(model: nn.Module) -> Optimizer:
    return torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=0.05, momentum=0.9)


class Tied(nn.Module):
    """The first layer's weights are the last one's, and the middle layer is used twice."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.first, self.middle, self.last = nn.Linear(WIDTH, OUT), nn.Linear(OUT, OUT), nn.Linear(WIDTH, OUT)
        self.last.weight = self.first.weight
        self.double()

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.middle(torch.tanh(self.middle(torch.tanh(self.first(x)))))
        return self.last(torch.tanh(hidden @ self.first.weight))


trial(MODELS, "tied weights, a layer that is used twice")(functools.partial(check, sgd, Tied))


@trial(MODELS, "frozen parameters, unfrozen later")
def frozen() -> None:
    def model() -> nn.Module:
        made = perceptron()
        made[0].requires_grad_(False)
        return made

    check(sgd, model)
    ranks = Replicas(lambda model: torch.optim.SGD(model.parameters(), lr=0.1), model).train()
    for replica in ranks.models:
        replica[0].requires_grad_(True)
    before = ranks.models[0][0].weight.detach().clone()
    ranks.train(range(9, 12))
    assert not torch.equal(before, ranks.models[0][0].weight)


def parametrized(register: Any) -> None:
    def model() -> nn.Module:
        made = perceptron()
        register(made[0])
        return made

    check(sgd, model, tolerance=1e-7)


trial(MODELS, "parametrizations: weight_norm")(functools.partial(parametrized, nn.utils.parametrizations.weight_norm))
trial(MODELS, "parametrizations: orthogonal")(functools.partial(parametrized, nn.utils.parametrizations.orthogonal))


@trial(MODELS, "parametrizations: spectral_norm", note="its buffers are each rank's own")
def spectral() -> None:
    def model() -> nn.Module:
        made = perceptron()
        torch.manual_seed(3)
        nn.utils.parametrizations.spectral_norm(made[0])
        return made

    check(sgd, model, tolerance=1e-7)


@trial(MODELS, "channels_last")
def channels_last() -> None:
    def model() -> nn.Module:
        torch.manual_seed(1)
        layers = [nn.Unflatten(1, (3, 2, 2)), nn.Conv2d(3, 7, 2), nn.Tanh(), nn.Flatten(), nn.Linear(7, OUT)]
        made = nn.Sequential(*layers).double().to(memory_format=torch.channels_last)
        assert not made[1].weight.is_contiguous()
        return made

    check(sgd, model)


@trial(MODELS, "BatchNorm", note="statistics are each rank's own, as without DDP, or alike by `sync_buffers`")
def batch_norm() -> None:
    def model() -> nn.Module:
        torch.manual_seed(1)
        return nn.Sequential(nn.Linear(WIDTH, 20), nn.BatchNorm1d(20), nn.Linear(20, OUT)).double()

    check(sgd, model, dense=False)


class Checkpointed(nn.Module):
    def __init__(self, reentrant: bool) -> None:
        super().__init__()
        self.reentrant = reentrant
        self.inner = perceptron()

    def forward(self, x: Tensor) -> Tensor:
        first = checkpoint(self.inner[0], x.requires_grad_(), use_reentrant=self.reentrant)
        return checkpoint(self.inner[2], torch.tanh(first), use_reentrant=self.reentrant)


class CheckpointedTwice(nn.Module):
    """One layer, computed anew for each of its two uses."""

    def __init__(self, reentrant: bool) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.reentrant = reentrant
        self.layer, self.last = nn.Linear(WIDTH, WIDTH).double(), nn.Linear(WIDTH, OUT).double()

    def forward(self, x: Tensor) -> Tensor:
        x = x.requires_grad_()
        for _ in range(2):
            x = torch.tanh(checkpoint(self.layer, x, use_reentrant=self.reentrant))
        return self.last(x)


def two_passes(model: Any) -> None:
    """`backward_passes_per_step=2` of the halves of a batch is one pass over it."""
    whole = Replicas(sgd, model).train()
    ranks = Replicas(sgd, model, backward_passes_per_step=2)
    for step in range(STEPS):
        for optimizer in ranks.optimizers:
            optimizer.zero_grad()
        for _ in range(2):
            for loss in ranks.losses(step):
                (loss / 2).backward()
        for optimizer in ranks.optimizers:
            optimizer.step()
        ranks.assert_equal()
    assert_close(ranks.weights, whole.weights, "two passes")


for reentrant in (False, True):
    kind = f"activation checkpointing, `use_reentrant={reentrant}`"
    trial(MODELS, kind)(functools.partial(check, sgd, functools.partial(Checkpointed, reentrant)))
    trial(MODELS, f"{kind}, of a layer that is used twice")(
        functools.partial(check, sgd, functools.partial(CheckpointedTwice, reentrant))
    )
    trial(MODELS, f"{kind}, the same with `backward_passes_per_step=2`")(
        functools.partial(two_passes, functools.partial(CheckpointedTwice, reentrant))
    )


@trial(MODELS, "sparse embeddings")
def sparse() -> None:
    class Bags(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            torch.manual_seed(1)
            self.bags = nn.EmbeddingBag(40, 6, mode="sum", sparse=True, dtype=torch.float64)
            self.last = nn.Linear(6, OUT, dtype=torch.float64)

        def forward(self, x: Tensor) -> Tensor:
            return self.last(self.bags((x * 1000).long().abs() % 40))

    def plain(model: nn.Module) -> Optimizer:
        return torch.optim.SGD(model.parameters(), lr=0.1)

    check(plain, Bags)


def half(dtype: torch.dtype) -> None:
    for compression in (None, dgcopt.TopK(0.1), dgcopt.DGC(0.1), dgcopt.EFSignSGD(), dgcopt.OneBit()):
        ranks = Replicas(sgd, lambda: perceptron().to(dtype), compression)
        for step in range(30):
            ranks.train([step])
        assert ranks.weights.abs().max() < 10, f"{compression} exploded"


trial(MODELS, "parameters in bfloat16")(functools.partial(half, torch.bfloat16))
trial(MODELS, "parameters in float16")(functools.partial(half, torch.float16))


@trial(MODELS, "complex parameters")
def complex_parameters() -> str:
    def of() -> None:
        model = nn.Linear(3, 3, dtype=torch.complex64)
        (comm, _) = dgcopt.simulated_world(2)
        dgcopt.DistributedOptimizer(torch.optim.SGD(model.parameters(), 0.1), model.named_parameters(), comm=comm)

    return refusal(dgcopt.ConfigError, "weight", "floating", of=of)


@trial(MODELS, "lazy layers, wrapped after their first forward")
def lazy() -> None:
    def model() -> nn.Module:
        torch.manual_seed(1)
        made = nn.Sequential(nn.LazyLinear(20), nn.Tanh(), nn.LazyLinear(OUT)).double()
        made(torch.zeros(1, WIDTH, dtype=torch.float64))
        return made

    check(sgd, model)


@trial(MODELS, "lazy layers, wrapped before")
def lazy_too_early() -> str:
    def of() -> None:
        model = nn.LazyLinear(3)
        (comm, _) = dgcopt.simulated_world(2)
        dgcopt.DistributedOptimizer(torch.optim.SGD(model.parameters(), 0.1), model.named_parameters(), comm=comm)

    return refusal(dgcopt.ConfigError, "'weight'", "has no shape yet", of=of)


@trial(MODELS, "`torch.func.functional_call`")
def functional() -> None:
    def loss(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
        return nn.functional.mse_loss(torch.func.functional_call(model, dict(model.named_parameters()), (x,)), y)

    check(sgd, loss=loss)


@trial(MODELS, "`torch.compile(model)`")
def compiled() -> None:
    def loss(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
        if "compiled" not in model.__dict__:
            model.__dict__["compiled"] = torch.compile(model, backend="aot_eager")
        return nn.functional.mse_loss(model.__dict__["compiled"](x), y)

    check(sgd, loss=loss)


@trial(MODELS, "PEFT: LoRA", needs=["peft"])
def lora() -> None:
    from peft import LoraConfig, get_peft_model

    def model() -> nn.Module:
        made = get_peft_model(perceptron(), LoraConfig(r=3, target_modules=["0", "2"], init_lora_weights=False))
        torch.manual_seed(2)
        for param in made.parameters():
            if param.requires_grad:
                nn.init.normal_(param, std=0.1)
        return made.double()

    check(sgd, model)
    check(lambda model: torch.optim.AdamW(model.parameters(), lr=0.01), model)
