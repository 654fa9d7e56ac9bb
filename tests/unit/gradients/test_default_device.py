"""`torch.set_default_device`, by which scripts build their models on a GPU: dgcopt's own tensors stay on the CPU."""

from collections.abc import Callable, Sequence
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


def trained(wrap: Wrap, device: str) -> tuple[list[Tensor], list[Any]]:
    """Weights and state after training on the CPU, whatever the default device."""
    comms, models = dgcopt.simulated_world(2), [small_model(torch.float32) for _ in range(2)]
    optimizers = [wrap(SGD(model.parameters(), lr=0.1), model, comm) for model, comm in zip(models, comms, strict=True)]
    for seed in range(8):
        inputs, targets = small_batch(dtype=torch.float32, seed=seed)
        losses = [nn.functional.cross_entropy(model(inputs[r::2]), targets[r::2]) for r, model in enumerate(models)]
        with torch.device(device):
            for optimizer, loss in zip(optimizers, losses, strict=True):
                optimizer.zero_grad()
                loss.backward()
            for optimizer in optimizers:
                optimizer.step()
    with torch.device(device):
        states = [optimizer.state_dict() for optimizer in optimizers]
        for optimizer, state in zip(optimizers, states, strict=True):
            optimizer.load_state_dict(state)
    return [param.detach() for model in models for param in model.parameters()], states


def assert_the_same(wrap: Wrap) -> None:
    assert same(trained(wrap, "cpu"), trained(wrap, "meta"))


ANY = [compressor for compressor, given in FIRST_OF_A_KIND if "optimizer" not in given]
OWNERS = [dgcopt.DGC(0.1, values="int2", vectors="sparse", overlap=True, reduce="owner")]


@pytest.mark.parametrize("compressor", [*ANY, *OWNERS], ids=lambda compressor: type(compressor).__name__)
def test_gradients(compressor: Compressor) -> None:
    """The C loops wrote to the addresses of tensors elsewhere, which ended the process."""
    assert_the_same(
        lambda optimizer, model, comm: dgcopt.DistributedOptimizer(
            optimizer, model.named_parameters(), compressor, comm=comm, bucket_mb=0.001
        )
    )


AVERAGED: Sequence[Callable[..., Optimizer]] = (
    lambda *args, **more: dgcopt.LocalSGD(*args, every=2, **more),
    lambda *args, **more: dgcopt.DiLoCo(*args, every=2, delay=1, **more),
)


@pytest.mark.parametrize("average", AVERAGED)
def test_averaging(average: Callable[..., Optimizer]) -> None:
    assert_the_same(lambda optimizer, model, comm: average(optimizer, model.named_parameters(), comm=comm))


def test_checkpoints(tmp_path: Path) -> None:
    weights = torch.arange(3.0)
    with torch.device("meta"):
        dgcopt.checkpoint.save(tmp_path, {"weights": weights}, step=1)
        step, state = dgcopt.checkpoint.load(tmp_path)
    assert step == 1 and same(state, {"weights": weights})
