"""Every class of torch.optim, and what other packages offer."""

from __future__ import annotations

import functools
import inspect
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

import dgcopt
from dgcopt import Comm
from tests.compatibility.replicas import ALONE, STEPS, Replicas, assert_close, batch, check, perceptron
from tests.compatibility.table import Absent, trial, version

TORCH, OTHERS = "Optimizers of torch", "Optimizers of other packages"


def matrices(**more: Any) -> nn.Module:
    return perceptron(bias=False)


def one_of_torch(name: str, **settings: Any) -> None:
    kind = getattr(torch.optim, name, None)
    if kind is None:
        raise Absent("not in this version of torch")
    if "lr" in inspect.signature(kind).parameters:
        settings = {"lr": 0.02, **settings}
    check(lambda model: kind(model.parameters(), **settings), matrices if name == "Muon" else perceptron)


for name in (
    *("ASGD", "Adadelta", "Adafactor", "Adagrad", "Adam", "AdamW", "Adamax", "Muon", "NAdam", "RAdam", "RMSprop"),
    *("Rprop", "SGD"),
):
    trial(TORCH, name)(functools.partial(one_of_torch, name))


@trial(TORCH, "SparseAdam", note="exact, sparse gradients are sent as rows")
def sparse_adam() -> None:
    def bag() -> nn.Module:
        torch.manual_seed(1)
        return nn.EmbeddingBag(40, 5, mode="sum", sparse=True).double()

    def loss(model: nn.Module, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return nn.functional.mse_loss(model((x * 1000).long().abs() % 40), y)

    ranks = Replicas(lambda model: torch.optim.SparseAdam(model.parameters(), lr=0.02), bag, loss=loss).train()
    whole = Replicas(lambda model: torch.optim.SparseAdam(model.parameters(), lr=0.02), bag, comms=ALONE, loss=loss)
    assert_close(ranks.weights, whole.train().weights, "SparseAdam")


@trial(TORCH, "LBFGS", real=True, note="closures are averaged; `line_search_fn` too")
def lbfgs(comm: Comm) -> None:
    for search in (None, "strong_wolfe"):

        def make(model: nn.Module, search: str | None = search) -> Optimizer:
            return torch.optim.LBFGS(model.parameters(), lr=0.5, max_iter=4, line_search_fn=search)

        ends = []
        for place in (comm, None):
            ranks = Replicas(make, comms=[place])
            for step in range(STEPS):

                def closure(ranks: Replicas = ranks, step: int = step) -> torch.Tensor:
                    ranks.optimizers[0].zero_grad()
                    (loss,) = ranks.losses(step)
                    loss.backward()
                    return loss

                ranks.optimizers[0].step(closure)
            ranks.assert_equal()
            ends.append(ranks.weights)
        assert_close(*ends, f"LBFGS {search}", 1e-6)


def with_settings(names: tuple[str, ...], **settings: Any) -> None:
    for name in names:
        one_of_torch(name, **settings)


trial(TORCH, "`foreach=True`")(functools.partial(with_settings, ("SGD", "Adam", "Adagrad", "RMSprop"), foreach=True))
trial(TORCH, "`fused=True`")(functools.partial(with_settings, ("SGD", "Adam", "AdamW", "Adagrad"), fused=True))
trial(TORCH, "`maximize=True`")(functools.partial(with_settings, ("SGD", "AdamW", "NAdam"), maximize=True))
trial(TORCH, "`amsgrad=True`")(functools.partial(with_settings, ("Adam", "AdamW"), amsgrad=True))
trial(TORCH, "a tensor as `lr`")(functools.partial(with_settings, ("SGD", "Adam"), lr=torch.tensor(0.02)))


@trial(TORCH, "`capturable=True`")
def capturable() -> None:
    if not torch.cuda.is_available():
        raise Absent("needs a GPU")
    torch.set_default_device("cuda")
    try:
        with_settings(("Adam", "AdamW", "NAdam"), capturable=True)
    finally:
        torch.set_default_device("cpu")


# -- of other packages -----------------------------------------------------------------------------------------------


def schedule_free(name: str) -> None:
    import schedulefree

    def make(model: nn.Module) -> Optimizer:
        more = {"silent_sgd_phase": False} if name.startswith("RAdam") else {}  # or it trains nothing in 4 steps
        optimizer = getattr(schedulefree, name)(model.parameters(), lr=0.02, **more)
        optimizer.train()
        return optimizer

    def settled(optimizer: Any) -> None:
        optimizer.eval()

    check(make, settled=settled)
    for compression in (dgcopt.TopK(0.1), dgcopt.DGC(0.1)):  # as its examples do: eval() before, train() after testing
        ranks = Replicas(make, compression=compression)
        for step in range(STEPS):
            ranks.train([step])
            for mode in ("eval", "train"):
                for optimizer in ranks.optimizers:
                    getattr(optimizer, mode)()
                ranks.assert_equal()


for name in ("SGDScheduleFree", "AdamWScheduleFree", "RAdamScheduleFree"):
    trial(OTHERS, f"schedulefree: {name}", needs=["schedulefree"])(functools.partial(schedule_free, name))


@trial(OTHERS, "lion-pytorch: Lion", needs=["lion_pytorch"])
def lion() -> None:
    from lion_pytorch import Lion

    check(lambda model: Lion(model.parameters(), lr=0.01, weight_decay=0.01))


@trial(OTHERS, "prodigyopt: Prodigy", needs=["prodigyopt"])
def prodigy() -> None:
    from prodigyopt import Prodigy

    check(lambda model: Prodigy(model.parameters(), lr=1.0))


@trial(OTHERS, "KellerJordan's Muon: SingleDeviceMuon", needs=["muon"])
def single_device_muon() -> None:
    import muon

    # its Newton-Schulz iteration runs in bfloat16
    check(lambda model: muon.SingleDeviceMuon(model.parameters(), lr=0.02), matrices, tolerance=1e-2)


@trial(OTHERS, "KellerJordan's Muon: SingleDeviceMuonWithAuxAdam", needs=["muon"])
def muon_with_adam() -> None:
    import muon

    def make(model: nn.Module) -> Optimizer:
        parts = {which: [p for p in model.parameters() if (p.ndim == 2) == which] for which in (True, False)}
        groups = [
            {"params": parts[True], "use_muon": True, "lr": 0.02},
            {"params": parts[False], "use_muon": False, "lr": 0.01},
        ]
        return muon.SingleDeviceMuonWithAuxAdam(groups)

    check(make, tolerance=1e-2)


@trial(OTHERS, "KellerJordan's Muon: Muon, whose step gathers", needs=["muon"], real=True)
def muon_that_gathers(comm: Comm) -> str | None:
    """Every rank steps a part of the matrices and hands it round: right where gradients are averaged before."""
    import muon

    if version() == "2.4":
        raise Absent("its step fails on Gloo with torch 2.4, with or without dgcopt")

    class Square(nn.Module):
        """Gloo gathers tensors of one shape only, with or without dgcopt."""

        def __init__(self) -> None:
            super().__init__()
            torch.manual_seed(1)
            self.layers = nn.Sequential(*[nn.Linear(12, 12, bias=False).double() for _ in range(2)])

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.layers(x)[:, :5]

    def make(model: nn.Module) -> Optimizer:
        return muon.Muon(list(model.parameters()), lr=0.02)

    try:
        ranks = Replicas(make, Square, dgcopt.TopK(0.1), comms=[comm])
    except dgcopt.ConfigError as error:
        return str(error)
    ranks.train()
    dense = Replicas(make, Square, comms=[comm]).train()
    alone = Replicas(lambda model: muon.SingleDeviceMuon(model.parameters(), lr=0.02), Square, comms=ALONE).train()
    assert_close(dense.weights, alone.weights, "Muon", 1e-2)
    return None


def of_pytorch_optimizer(name: str, **settings: Any) -> None:
    import pytorch_optimizer

    kind = getattr(pytorch_optimizer, name)
    # SOAP's eigenvectors make much of a rounding
    dense = name != "SOAP"
    check(lambda model: kind(model.parameters(), **{"lr": 0.01, **settings}), tolerance=1e-6, dense=dense)


for name in ("AdaBelief", "AdEMAMix", "CAME", "Lamb", "LARS", "Ranger21", "SOAP", "Shampoo"):
    more = {"num_iterations": 20} if name == "Ranger21" else {}
    trial(OTHERS, f"pytorch_optimizer: {name}", needs=["pytorch_optimizer"])(
        functools.partial(of_pytorch_optimizer, name, **more)
    )


@trial(
    OTHERS,
    "pytorch_optimizer: Lookahead around Adam",
    needs=["pytorch_optimizer"],
    not_yet="it leaves out torch's own `Optimizer.__init__`",
)
def lookahead() -> None:
    from pytorch_optimizer import Lookahead

    check(lambda model: Lookahead(torch.optim.Adam(model.parameters(), lr=0.01), k=2), resume=False)


@trial(
    OTHERS,
    "pytorch_optimizer: SAM",
    needs=["pytorch_optimizer"],
    real=True,
    note="with `optimizer.synchronize()` before `first_step()` and `second_step()`",
)
def sam(comm: Comm) -> None:
    """Two backward passes a step: the climb and the step use averaged gradients if `synchronize()` is called before."""
    from pytorch_optimizer import SAM

    ends = []
    for place in (comm, None):
        (model,), (x_y) = [perceptron()], batch
        optimizer: Any = SAM(model.parameters(), base_optimizer=torch.optim.SGD, lr=0.05)
        if place is not None:
            dgcopt.DistributedOptimizer(optimizer, model.named_parameters(), comm=place)
        for step in range(STEPS):
            x, y = x_y(step, None if place is None else place.rank)
            nn.functional.mse_loss(model(x), y).backward()
            if place is not None:
                optimizer.synchronize()
            optimizer.first_step(zero_grad=True)
            nn.functional.mse_loss(model(x), y).backward()
            if place is not None:
                optimizer.synchronize()
            optimizer.second_step(zero_grad=True)
        ends.append(torch.cat([param.detach().reshape(-1) for param in model.parameters()]))
    assert_close(*ends, "SAM", 1e-6)


@trial(
    OTHERS,
    "SAM in two steps, as scripts write it",
    real=True,
    note="`sam.base_optimizer` is wrapped; without `sam.base_optimizer.synchronize()` before `first_step()` each rank "
    "climbs its own gradient. SAM itself, wrapped, never steps: a warning says so",
)
def sam_of_scripts(comm: Comm) -> None:
    class SAM(Optimizer):
        def __init__(self, params: Any) -> None:
            super().__init__(params, {})
            self.base_optimizer = torch.optim.SGD(self.param_groups, lr=0.05, momentum=0.9)
            self.param_groups = self.base_optimizer.param_groups

        @torch.no_grad()
        def first_step(self) -> None:
            self.old = {param: param.clone() for group in self.param_groups for param in group["params"]}
            norm = torch.stack([param.grad.norm() for param in self.old]).norm()
            for param in self.old:
                param.add_(param.grad, alpha=0.05 / float(norm))
            self.zero_grad()

        @torch.no_grad()
        def second_step(self) -> None:
            for param, old in self.old.items():
                param.data = old
            self.base_optimizer.step()
            self.zero_grad()

    for climbs, compression in (
        ("together", None),
        ("apart", None),
        ("apart", dgcopt.TopK(0.1)),
        ("apart", dgcopt.DGC(0.1)),
    ):
        ends = []
        for place in (comm, None):
            model = perceptron()
            sam, synchronize = SAM(model.parameters()), place is not None and climbs == "together"
            base: Any = sam.base_optimizer
            if place is not None:
                dgcopt.DistributedOptimizer(base, model.named_parameters(), compression, comm=place)
            for step in range(STEPS):
                x, y = batch(step, None if place is None else place.rank)
                nn.functional.mse_loss(model(x), y).backward()
                if synchronize:
                    base.synchronize()
                sam.first_step()
                nn.functional.mse_loss(model(x), y).backward()
                sam.second_step()
            if place is not None:
                dgcopt.check_replicas(model.named_parameters(), comm=place)
            ends.append(torch.cat([param.detach().reshape(-1) for param in model.parameters()]))
        if climbs == "together":
            assert_close(*ends, "SAM", 1e-6)


@trial(OTHERS, "transformers: Adafactor", needs=["transformers"])
def adafactor_of_transformers() -> None:
    from transformers.optimization import Adafactor

    check(lambda model: Adafactor(model.parameters(), lr=0.01, relative_step=False, scale_parameter=False))
