"""Small trainings on simulated or real ranks, beside the same training in one process on whole batches."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

import dgcopt
from dgcopt import Comm

ROWS, WIDTH, OUT = 16, 12, 5
STEPS = 4
Make = Callable[[nn.Module], Optimizer]
Loss = Callable[[nn.Module, Tensor, Tensor], Tensor]


def perceptron(bias: bool = True) -> nn.Module:
    torch.manual_seed(1)
    return nn.Sequential(nn.Linear(WIDTH, 20, bias), nn.Tanh(), nn.Linear(20, OUT, bias)).double()


def batch(step: int, rank: int | None = None, size: int = 2, dtype: torch.dtype = torch.float64) -> tuple[Tensor, ...]:
    """One rank's rows of the step's batch, or all."""
    generator = torch.Generator().manual_seed(step)
    x = torch.randn(ROWS, WIDTH, generator=generator, dtype=torch.float64).to(dtype)
    y = torch.randn(ROWS, OUT, generator=generator, dtype=torch.float64).to(dtype)
    return (x, y) if rank is None else (x[rank::size], y[rank::size])


def squared(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    return nn.functional.mse_loss(model(x).to(at_least_float32(x.dtype)), y.to(at_least_float32(y.dtype)))


def at_least_float32(dtype: torch.dtype) -> torch.dtype:
    return torch.promote_types(dtype, torch.float32)


def dtype_of(model: nn.Module) -> torch.dtype:
    return next(param.dtype for param in model.parameters() if param.is_floating_point())


def flat(model: nn.Module) -> Tensor:
    return torch.cat([param.detach().reshape(-1).double() for param in model.parameters()])


class Replicas:
    """One replica per rank that this process drives: simulated ones in turn, a real one, or one without others."""

    def __init__(
        self,
        make: Make,
        model: Callable[[], nn.Module] = perceptron,
        compression: Any = None,
        *,
        comms: Sequence[Comm | None] | None = None,
        loss: Loss = squared,
        **settings: Any,
    ) -> None:
        self.comms = dgcopt.simulated_world(2) if comms is None else comms
        self.loss = loss
        self.models = [model() for _ in self.comms]
        self.optimizers: list[Any] = [make(replica) for replica in self.models]
        for comm, replica, optimizer in zip(self.comms, self.models, self.optimizers, strict=True):
            if comm is not None:
                named = list(replica.named_parameters())
                dgcopt.DistributedOptimizer(optimizer, named, compression, comm=comm, **settings)

    def losses(self, step: int) -> list[Tensor]:
        found = []
        for comm, model in zip(self.comms, self.models, strict=True):
            x, y = batch(step, None if comm is None else comm.rank, 1 if comm is None else comm.size, dtype_of(model))
            found.append(self.loss(model, x, y))
        return found

    def backward(self, step: int) -> None:
        for optimizer in self.optimizers:
            optimizer.zero_grad()
        for loss in self.losses(step):
            loss.backward()

    def step(self, step: int) -> None:
        self.backward(step)
        for optimizer in self.optimizers:
            optimizer.step()

    def train(self, steps: Iterable[int] = range(STEPS)) -> Replicas:
        for step in steps:
            self.step(step)
        self.assert_equal()
        return self

    @property
    def weights(self) -> Tensor:
        return flat(self.models[0])

    def assert_equal(self) -> None:
        """All ranks have the same bits."""
        for model in self.models[1:]:
            assert torch.equal(flat(model), self.weights), "simulated ranks drifted apart"
        if len(self.models) == 1 and self.comms[0] is not None:
            dgcopt.check_replicas(self.models[0].named_parameters(), comm=self.comms[0])

    def states(self) -> list[dict[str, Any]]:
        pairs = zip(self.models, self.optimizers, strict=True)
        return [copy.deepcopy({"model": m.state_dict(), "optimizer": o.state_dict()}) for m, o in pairs]

    def load(self, states: list[dict[str, Any]]) -> None:
        for model, optimizer, state in zip(self.models, self.optimizers, states, strict=True):
            model.load_state_dict(state["model"])
            optimizer.load_state_dict(state["optimizer"])


ALONE: tuple[None] = (None,)


def assert_close(ours: Tensor, theirs: Tensor, what: str, tolerance: float = 1e-9) -> None:
    torch.testing.assert_close(ours, theirs, rtol=tolerance, atol=tolerance, msg=lambda text: f"{what}: {text}")


def check(
    make: Make,
    model: Callable[[], nn.Module] = perceptron,
    *,
    comms: Sequence[Comm | None] | None = None,
    loss: Loss = squared,
    tolerance: float = 1e-9,
    settled: Callable[[Any], None] = lambda optimizer: None,
    resume: bool = True,
    dense: bool = True,
) -> None:
    """What dgcopt promises of any optimizer and model.

    Uncompressed, and with DGC at ratio 1, ranks on parts of a batch train as one process on the whole; with TopK and
    DGC all ranks keep the same bits; what NaN on one rank has spoiled is nobody's step; and a restored checkpoint goes
    on with the same bits. `settled` puts the optimizer's weights where they are evaluated.
    """

    def started(compression: Any = None, where: Sequence[Comm | None] | None = comms) -> Replicas:
        return Replicas(make, model, compression, comms=where, loss=loss)

    if dense:
        whole = started(where=ALONE)
        start = whole.weights
        whole.train()
        assert not torch.equal(whole.weights, start), "nothing was trained"
        for compression in (None, dgcopt.DGC(1.0)):
            assert_close(started(compression).train().weights, whole.weights, f"{compression}", tolerance)
    for compression in (dgcopt.TopK(0.1), dgcopt.DGC(0.1)):
        ranks = started(compression)
        for step in range(STEPS):
            ranks.train([step])
        spoiled(ranks)
        kept = ranks.states()
        ranks.train(range(STEPS, STEPS + 2))
        if resume:
            resumed = started(compression)
            resumed.load(kept)
            resumed.train(range(STEPS, STEPS + 2))
            # NAdam alone does not resume to the bit: torch gives its mu_product the parameters' dtype when it is loaded
            exact = not isinstance(ranks.optimizers[0], torch.optim.NAdam)
            assert_close(resumed.weights, ranks.weights, f"{compression}, resumed", 0 if exact else 1e-6)
        for optimizer in ranks.optimizers:
            settled(optimizer)
        ranks.assert_equal()


def spoiled(ranks: Replicas) -> None:
    """A step in which one rank's gradient is NaN moves no weight anywhere."""
    before = ranks.weights
    ranks.backward(99)
    if ranks.comms[-1] is not None and ranks.comms[-1].rank == ranks.comms[-1].size - 1:
        for param in ranks.models[-1].parameters():
            if param.grad is not None:
                values = param.grad._values() if param.grad.is_sparse else param.grad
                values[(0,) * values.ndim] = torch.nan
                break
    for optimizer in ranks.optimizers:
        optimizer.step()
    assert torch.equal(ranks.weights, before), "a step that nobody takes moved the weights"
    ranks.assert_equal()
