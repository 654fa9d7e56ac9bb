"""One of two ranks: trains under DDP with torch's PowerSGD hooks, and with ours, and prints how far they end apart."""

import contextlib
import json
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
import torch.distributed.algorithms.ddp_comm_hooks.powerSGD_hook as theirs
from torch import Tensor, nn
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import fp16_compress_wrapper
from torch.nn.parallel import DistributedDataParallel

import dgcopt
from dgcopt.compressors import PowerSGD
from dgcopt.flat.segments import Segment

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
        return dgcopt.Context(0, 2, "average", self.step - 1, None, [segment]).generator(self.seed).initial_seed()


@contextlib.contextmanager
def batched_hook_mended() -> Iterator[None]:
    """torch 2.13's batched hook hands a matrix to what takes stacks of them, and ends in an assertion."""
    before = theirs._orthogonalize
    theirs._orthogonalize = lambda matrix, epsilon=0: before(matrix.unsqueeze(0), epsilon)
    try:
        yield
    finally:
        theirs._orthogonalize = before


def main() -> None:
    comm = dgcopt.init(deadline=60)
    rank, results = comm.rank, {}

    def compare(name: str, reference: Setup, ours: Setup, *settings: Any) -> None:
        a, b, dense = (in_ddp(rank, setup, *settings) for setup in (reference, ours, lambda _: None))
        results[name] = {"apart": float((a - b).abs().max()), "from dense": float((a - dense).abs().max())}

    for settings in (
        {"rank": 1},
        {"rank": 2},
        {"rank": 4},
        {"rank": 1, "error_feedback": False},
        {"rank": 1, "batch_same_shapes": True},
        {"rank": 2, "warm_start": False},
        {"rank": 2, "epsilon": 0.01},
        {"rank": 2, "seed": 7, "min_compression_rate": 5.5},
    ):
        names = {
            "rank": "matrix_approximation_rank",
            "error_feedback": "use_error_feedback",
            "batch_same_shapes": "batch_tensors_with_same_shape",
            "epsilon": "orthogonalization_epsilon",
            "seed": "random_seed",
        }
        reference = their_hook(**{names.get(key, key): value for key, value in settings.items()})
        compare(str(settings), reference, our_hook(PowerSGD(start_step=START, **settings)))
    ours = our_hook(PowerSGD(start_step=START, rank=2))
    compare("float32", their_hook(matrix_approximation_rank=2), ours, torch.float32)
    halved = their_hook(fp16_compress_wrapper(theirs.powerSGD_hook), matrix_approximation_rank=2)
    ours = our_hook(dgcopt.FP16(PowerSGD(start_step=START, rank=2)))
    # numbers drawn in float16 are those in float32 rounded, where there are 16 of them or a multiple
    compare("fp16", halved, ours, torch.float32, lambda: convolutional(32))
    with batched_hook_mended():
        reference = their_hook(theirs.batched_powerSGD_hook)
        compare(
            "batched",
            reference,
            our_hook(PowerSGD(start_step=START, granularity="bucket")),
            torch.float64,
            of_961_parameters,
        )

    models = []

    def several_buckets(model: DistributedDataParallel) -> None:
        our_hook(PowerSGD(start_step=0, rank=2))(model)
        models.append(model)

    weights = in_ddp(rank, several_buckets, bucket_cap_mb=0.005)
    sizes = models[0]._get_ddp_logging_data()["rebuilt_bucket_sizes"]
    results["several buckets"] = {"buckets": len(sizes.split(",")), "weights": weights.tolist()}

    model, compressor = made(convolutional), PowerSGD(start_step=START, rank=2)
    optimizer = dgcopt.DistributedOptimizer(sgd(model), model.named_parameters(), compressor, first_bucket_mb=25)
    weights = train(model, optimizer, rank)
    apart = float((weights - in_ddp(rank, our_hook(compressor))).abs().max())
    results["DistributedOptimizer"] = {"apart": apart, "weights": weights.tolist()}

    with (Path(os.environ["DGCOPT_TEST_RECORDS"]) / f"rank-{rank}.jsonl").open("w") as file:
        for name, result in results.items():
            file.write(json.dumps({"scenario": name, "rank": rank, **result}) + "\n")


if __name__ == "__main__":
    torch.set_num_threads(1)
    main()
