"""`torch.set_default_device` and `set_default_dtype`, by which scripts build their models: dgcopt's own tensors do not
follow them.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.optim import SGD, Optimizer

import dgcopt
from dgcopt.compressors import Compressor
from tests.support.library import FIRST_OF_A_KIND
from tests.support.worlds import same, small_batch, small_model

Wrap = Callable[[Optimizer, nn.Module, dgcopt.Comm], Optimizer]
Default = Callable[[], AbstractContextManager[Any]]


@contextmanager
def default_dtype(dtype: torch.dtype) -> Iterator[None]:
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        yield
    finally:
        torch.set_default_dtype(before)


DEFAULTS: dict[str, Default] = {
    "meta": lambda: torch.device("meta"),
    "bfloat16": partial(default_dtype, torch.bfloat16),
}


def trained(wrap: Wrap, default: Default) -> tuple[list[Tensor], list[Any]]:
    """Weights and state after training in float32 on the CPU, whatever the defaults."""
    comms, models = dgcopt.simulated_world(2), [small_model(torch.float32) for _ in range(2)]
    optimizers = [wrap(SGD(model.parameters(), lr=0.1), model, comm) for model, comm in zip(models, comms, strict=True)]
    for seed in range(8):
        inputs, targets = small_batch(dtype=torch.float32, seed=seed)
        losses = [nn.functional.cross_entropy(model(inputs[r::2]), targets[r::2]) for r, model in enumerate(models)]
        with default():
            for optimizer, loss in zip(optimizers, losses, strict=True):
                optimizer.zero_grad()
                loss.backward()
            for optimizer in optimizers:
                optimizer.step()
    with default():
        states = [optimizer.state_dict() for optimizer in optimizers]
        for optimizer, state in zip(optimizers, states, strict=True):
            optimizer.load_state_dict(state)
    return [param.detach() for model in models for param in model.parameters()], states


def assert_the_same(wrap: Wrap, default: str) -> None:
    assert same(trained(wrap, nullcontext), trained(wrap, DEFAULTS[default]))


ANY = [compressor for compressor, given in FIRST_OF_A_KIND if "optimizer" not in given]
OWNERS = [dgcopt.DGC(0.1, values="int2", vectors="sparse", overlap=True, reduce="owner")]


@pytest.mark.parametrize("default", DEFAULTS)
@pytest.mark.parametrize("compressor", [*ANY, *OWNERS], ids=lambda compressor: type(compressor).__name__)
def test_gradients(compressor: Compressor, default: str) -> None:
    """The C loops wrote to the addresses of tensors elsewhere, or of another dtype, which ended the process."""
    assert_the_same(
        lambda optimizer, model, comm: dgcopt.DistributedOptimizer(
            optimizer, model.named_parameters(), compressor, comm=comm, bucket_mb=0.001
        ),
        default,
    )


AVERAGED: Sequence[Callable[..., Optimizer]] = (
    lambda *args, **more: dgcopt.LocalSGD(*args, every=2, **more),
    lambda *args, **more: dgcopt.DiLoCo(*args, every=2, delay=1, **more),
)


@pytest.mark.parametrize("default", DEFAULTS)
@pytest.mark.parametrize("average", AVERAGED)
def test_averaging(average: Callable[..., Optimizer], default: str) -> None:
    assert_the_same(lambda optimizer, model, comm: average(optimizer, model.named_parameters(), comm=comm), default)


def test_checkpoints(tmp_path: Path) -> None:
    weights = torch.arange(3.0)
    with torch.device("meta"):
        dgcopt.checkpoint.save(tmp_path, {"weights": weights}, step=1)
        step, state = dgcopt.checkpoint.load(tmp_path)
    assert step == 1 and same(state, {"weights": weights})
