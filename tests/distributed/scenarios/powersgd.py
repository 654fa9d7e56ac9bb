"""PowerSGD against torch's own hooks: the same training, by two real ranks under DistributedDataParallel."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.distributed.algorithms.ddp_comm_hooks.powerSGD_hook as theirs
from torch import Tensor, nn
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import fp16_compress_wrapper
from torch.nn.parallel import DistributedDataParallel

import dgcopt
from dgcopt import Comm
from dgcopt.compressors import Memory, Place, PowerSGD
from dgcopt.flat.buckets import Segment

from .training import assert_same_on_all_ranks

START, STEPS = 2, 10
Setup = Callable[[DistributedDataParallel], Any]
Make = Callable[[], nn.Module]


def convolutional(width: int = 24) -> nn.Module:
    layers = [nn.Conv2d(4, 16, 2), nn.Tanh(), nn.Flatten(), nn.Linear(144, width), nn.Tanh()]
    layers += [nn.Linear(width, width), nn.Tanh(), nn.Linear(width, width), nn.Tanh(), nn.Linear(width, 5)]
    return nn.Sequential(*layers)


def of_961_parameters() -> nn.Module:
    return nn.Sequential(nn.Flatten(), nn.Linear(64, 8), nn.Tanh(), nn.Linear(8, 49))


def batch(rank: int, step: int, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(100 * step + rank)
    inputs = torch.randn(16, 4, 4, 4, generator=generator, dtype=torch.float64).to(dtype)
    return inputs, torch.randint(5, (16,), generator=generator)


def train(model: nn.Module, optimizer: torch.optim.Optimizer, rank: int) -> Tensor:
    dtype = next(model.parameters()).dtype
    for step in range(STEPS):
        inputs, targets = batch(rank, step, dtype)
        optimizer.zero_grad()
        nn.functional.cross_entropy(model(inputs), targets).backward()
        optimizer.step()
    return torch.cat([param.detach().flatten() for param in model.parameters()])


def sgd(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=0.2, momentum=0.5)


def made(make: Make, dtype: torch.dtype = torch.float64) -> nn.Module:
    torch.manual_seed(5)
    return make().to(dtype)


def in_ddp(
    rank: int, setup: Setup, dtype: torch.dtype = torch.float64, make: Make = convolutional, **settings: Any
) -> Tensor:
    model = DistributedDataParallel(made(make, dtype), **settings)
    setup(model)
    return train(model, sgd(model), rank)


def their_hook(hook: Any = theirs.powerSGD_hook, **settings: Any) -> Setup:
    def setup(model: DistributedDataParallel) -> None:
        state = theirs.PowerSGDState(None, start_powerSGD_iter=START, **settings)
        if not settings.get("warm_start", True):
            state.rng = Draws(settings.get("random_seed", 0))
        model.register_comm_hook(state, hook)

    return setup


def our_hook(compressor: dgcopt.Compressor) -> Setup:
    return lambda model: model.register_comm_hook(*dgcopt.ddp_hook(compressor))


class Draws:
    """The seeds of ours where each step has its own, for torch's hook to draw the same numbers."""

    def __init__(self, seed: int) -> None:
        self.seed, self.step = seed, START

    def randint(self, _: int) -> int:
        segment = Segment("", torch.zeros(1), 0)
        self.step += 1
        place = Place(0, 2, "average", self.step - 1, None, [segment])
        return dgcopt.Context(place, Memory([segment])).generator(self.seed).initial_seed()


@contextlib.contextmanager
def batched_hook_mended() -> Iterator[None]:
    """torch 2.13's batched hook hands a matrix to what takes stacks of them, and ends in an assertion."""
    before = theirs._orthogonalize
    theirs._orthogonalize = lambda matrix, epsilon=0: before(matrix.unsqueeze(0), epsilon)
    try:
        yield
    finally:
        theirs._orthogonalize = before


def compare(
    reference: Setup,
    ours: Setup,
    comm: Comm,
    *,
    dtype: torch.dtype = torch.float64,
    make: Make = convolutional,
    tolerance: float = 1e-12,
) -> None:
    a, b, dense = (in_ddp(comm.rank, setup, dtype, make) for setup in (reference, ours, lambda _: None))
    assert (a - dense).abs().max() > 1e-3, "compression made no difference, so nothing was compared"
    apart = float((a - b).abs().max())
    assert apart < tolerance, f"training ends {apart} from where it does with torch's hook"


def batched(comm: Comm) -> None:
    with batched_hook_mended():
        ours = our_hook(PowerSGD(start_step=START, granularity="bucket"))
        compare(their_hook(theirs.batched_powerSGD_hook), ours, comm, make=of_961_parameters)


def several_buckets(comm: Comm) -> None:
    """They overlap on Gloo, and replicas keep the same bits."""
    models = []

    def setup(model: DistributedDataParallel) -> None:
        our_hook(PowerSGD(start_step=0, rank=2))(model)
        models.append(model)

    weights = in_ddp(comm.rank, setup, bucket_cap_mb=0.005)
    assert len(models[0]._get_ddp_logging_data()["rebuilt_bucket_sizes"].split(",")) > 1
    assert_same_on_all_ranks(comm, [weights], "several buckets")


def distributed_optimizer(comm: Comm) -> None:
    """It does the same as the hook."""
    model, compressor = made(convolutional), PowerSGD(start_step=START, rank=2)
    optimizer = dgcopt.DistributedOptimizer(sgd(model), model.named_parameters(), compressor, first_bucket_mb=25)
    weights = train(model, optimizer, comm.rank)
    assert (weights - in_ddp(comm.rank, our_hook(compressor))).abs().max() < 1e-12
    assert_same_on_all_ranks(comm, [weights], "DistributedOptimizer")


NAMES = {
    "rank": "matrix_approximation_rank",
    "error_feedback": "use_error_feedback",
    "batch_same_shapes": "batch_tensors_with_same_shape",
    "epsilon": "orthogonalization_epsilon",
    "seed": "random_seed",
}
"""What torch calls our settings."""

SETTINGS: list[dict[str, Any]] = [
    {"rank": 1},
    {"rank": 2},
    {"rank": 4},
    {"rank": 1, "error_feedback": False},
    {"rank": 1, "batch_same_shapes": True},
    {"rank": 2, "warm_start": False},
    {"rank": 2, "epsilon": 0.01},
    {"rank": 2, "seed": 7, "min_compression_rate": 5.5},
]
SCENARIOS: dict[str, Callable[[Comm], None]] = {
    f"powersgd: {settings}": functools.partial(
        compare,
        their_hook(**{NAMES.get(key, key): value for key, value in settings.items()}),
        our_hook(PowerSGD(start_step=START, **settings)),
    )
    for settings in SETTINGS
}
SCENARIOS |= {
    "powersgd: float32": functools.partial(
        compare,
        their_hook(matrix_approximation_rank=2),
        our_hook(PowerSGD(start_step=START, rank=2)),
        dtype=torch.float32,
        tolerance=1e-6,
    ),
    # numbers drawn in float16 are those in float32 rounded, where there are 16 of them or a multiple
    "powersgd: fp16": functools.partial(
        compare,
        their_hook(fp16_compress_wrapper(theirs.powerSGD_hook), matrix_approximation_rank=2),
        our_hook(dgcopt.FP16(PowerSGD(start_step=START, rank=2))),
        dtype=torch.float32,
        make=functools.partial(convolutional, 32),
        tolerance=5e-4,
    ),
    "powersgd: batched": batched,
    "powersgd: several buckets": several_buckets,
    "powersgd: DistributedOptimizer": distributed_optimizer,
}
