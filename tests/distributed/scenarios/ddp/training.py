"""A model of several DDP buckets, its training with or without a hook, and comparisons over ranks."""

import copy
from collections.abc import Iterator

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel as DDP

import dgcopt
from dgcopt.gradients.hook.ddp import HookState

CPU = torch.device("cpu")
RATIO = 0.05


def small_model() -> nn.Module:
    torch.manual_seed(1)
    sizes = [(20, 90), (90, 70), (70, 80), (80, 5)]
    return nn.Sequential(*[layer for i, o in sizes for layer in (nn.Linear(i, o), nn.Tanh())][:-1])


def batch(step: int, rank: int | None = None, rows: int = 8) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(100 * step + (dist.get_rank() if rank is None else rank))
    return torch.randn(rows, 20, generator=generator), torch.randint(5, (rows,), generator=generator)


def sgd(params: Iterator[Tensor]) -> torch.optim.Optimizer:
    return torch.optim.SGD(params, lr=0.1, momentum=0.9, weight_decay=1e-2, nesterov=True)


def plain(params: Iterator[Tensor]) -> torch.optim.Optimizer:
    return torch.optim.SGD(params, lr=0.1)


class Training:
    """A replica in DDP with a hook of dgcopt, another one, or none."""

    def __init__(self, hook=None, make=sgd, attach=True, model=small_model, scaler=None, named=False, **settings):
        self.model = model()
        self.ddp = DDP(self.model, **{"bucket_cap_mb": 0.01, **settings})
        self.optimizer = make(self.model.parameters())
        self.state: HookState | None = None
        if isinstance(hook, tuple):
            self.ddp.register_comm_hook(*hook)
        elif hook is not None:
            optimizer = self.optimizer if attach else None
            names = self.model.named_parameters() if named else None
            self.state, function = dgcopt.ddp_hook(hook, optimizer, names, scaler=scaler)
            self.ddp.register_comm_hook(self.state, function)

    def backward(self, step: int) -> None:
        inputs, targets = batch(step)
        nn.functional.cross_entropy(self.ddp(inputs), targets).backward()

    def step(self, step: int) -> None:
        self.optimizer.zero_grad()
        self.backward(step)
        self.optimizer.step()

    def run(self, steps: int = 8, first: int = 0) -> "Training":
        for step in range(first, first + steps):
            self.step(step)
        assert_same_on_all_ranks(self.weights())
        return self

    def weights(self) -> Tensor:
        return flat(self.model.parameters())

    def gradients(self) -> Tensor:
        return flat(param.grad for param in self.model.parameters())

    def memory(self, kind: str = "residual") -> Tensor:
        """What is kept, in the order of the model's parameters; zero where nothing is."""
        assert self.state is not None
        names, held = self.state._memory.names, self.state.state_dict()["memory"].get(kind, {})
        return flat(held.get(names[param], torch.zeros_like(param)) for param in self.model.parameters())


def flat(tensors) -> Tensor:
    return torch.cat([tensor.detach().reshape(-1) for tensor in tensors])


def everyones(tensor: Tensor) -> list[Tensor]:
    rows = [torch.empty_like(tensor) for _ in range(dist.get_world_size())]
    dist.all_gather(rows, tensor.contiguous())
    return rows


def mean(tensor: Tensor) -> Tensor:
    return torch.stack(everyones(tensor)).mean(0)


def assert_same_on_all_ranks(tensor: Tensor) -> None:
    rows = everyones(tensor)
    assert all(torch.equal(row, rows[0]) for row in rows), "replicas drifted apart"


def assert_close(ours: Tensor, theirs: Tensor, tolerance: float = 1e-6) -> None:
    torch.testing.assert_close(ours, theirs, rtol=tolerance, atol=tolerance)


def local_gradient(model: nn.Module, step: int) -> Tensor:
    """This rank's own, by autograd alone."""
    twin = copy.deepcopy(model)
    twin.zero_grad()
    inputs, targets = batch(step)
    nn.functional.cross_entropy(twin(inputs), targets).backward()
    return flat(torch.zeros_like(p) if p.grad is None else p.grad for p in twin.parameters())


def in_optimizer(compressor, steps: int = 8, make=sgd, model=small_model, forward=None) -> Tensor:
    """The weights that DistributedOptimizer comes to."""
    replica = model()
    optimizer = dgcopt.DistributedOptimizer(make(replica.parameters()), replica.named_parameters(), compressor)
    for step in range(steps):
        inputs, targets = batch(step)
        optimizer.zero_grad()
        nn.functional.cross_entropy(replica(inputs), targets).backward()
        optimizer.step()
    return flat(replica.parameters())


class Branches(nn.Module):
    """Of two branches, the second is used by rank 1 in every third step, and by no rank in the others."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.trunk = nn.Linear(20, 100)
        self.always, self.rarely = nn.Linear(100, 5), nn.Linear(100, 5)
        self.calls = 0

    def forward(self, inputs: Tensor) -> Tensor:
        hidden = self.trunk(inputs).tanh()
        rare = dist.get_rank() == 1 and self.calls % 3 == 0
        self.calls += 1
        return self.always(hidden) + self.rarely(hidden) if rare else self.always(hidden)


class OddMemory(nn.Module):
    """Parameters whose elements lie in other orders, and one without any."""

    def __init__(self, odd: bool = True) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.conv = nn.Conv2d(2, 6, (2, 3))
        self.turned = nn.Parameter(torch.randn(5, 78).t().clone(memory_format=torch.contiguous_format))
        self.empty = nn.Parameter(torch.zeros(0, 3))
        self.double()  # so that rounding in another order does not change what is selected
        if odd:
            self.conv.to(memory_format=torch.channels_last)
            self.turned.data = self.turned.data.t().contiguous().t()

    def forward(self, inputs: Tensor) -> Tensor:
        inputs = inputs.double()
        hidden = self.conv(torch.cat([inputs, inputs**2, inputs + 1, inputs.sin()], 1).view(-1, 2, 2, 20)).flatten(1)
        return hidden[:, :78] @ self.turned + self.empty.sum()
