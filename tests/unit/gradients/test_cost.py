"""The cost of a step in Python calls per tensor, and in files that a reader of a normal step has to open."""

import gc
import sys
from collections.abc import Callable
from pathlib import Path
from types import FrameType
from typing import Any

import pytest
import torch
from torch import nn

import dgcopt
from tests.support.worlds import Ranks, small_model


@pytest.fixture(scope="module", autouse=True)
def _alone() -> None:
    """No other test's DDP hook is left, which looks at any optimizer's step."""
    gc.collect()


class Chain(nn.Module):
    """A product of many small tensors."""

    def __init__(self, tensors: int) -> None:
        super().__init__()
        self.factors = nn.ParameterList([nn.Parameter(torch.ones(1, 64)) for _ in range(tensors)])

    def forward(self) -> torch.Tensor:
        x = torch.ones(1, 64)
        for factor in self.factors:
            x = x * factor
        return x.sum()


def calls_in(run: Callable[[], object]) -> int:
    """Calls of functions in Python and in C."""
    count = 0

    def note(frame: FrameType, event: str, argument: Any) -> None:
        nonlocal count
        count += event in ("call", "c_call")

    sys.setprofile(note)
    try:
        run()
    finally:
        sys.setprofile(None)
    return count


def calls_of_step(compression: Any, tensors: int) -> int:
    """Calls of one rank of two in backward, `step` and `zero_grad`, once buckets are laid out."""
    ranks = Ranks(
        2, lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9), lambda: Chain(tensors), compression=compression
    )

    def step() -> int:
        losses = [model() for model in ranks.models]

        def rest() -> None:
            for loss in losses:
                loss.backward()
            for optimizer in ranks.optimizers:
                optimizer.step()
                optimizer.zero_grad()

        return calls_in(rest) // 2

    return [step() for _ in range(4)][-1]


@pytest.mark.parametrize(
    "compression, most",
    [(None, 36), (dgcopt.DGC(0.05), 28), (dgcopt.DGC(0.05, overlap=True), 30)],
    ids=["dense", "DGC", "DGC in backward"],
)
def test_calls_per_tensor_are_few_and_do_not_grow(monkeypatch: pytest.MonkeyPatch, compression: Any, most: int) -> None:
    monkeypatch.undo()  # as large tensors these would be looked at one by one
    few, some, many = (calls_of_step(compression, tensors) for tensors in (100, 200, 400))
    assert (some - few) / 100 == pytest.approx((many - some) / 200, rel=0.02)
    assert (many - some) / 200 < most


RARE = (
    "changes",
    "divergence",
    "flush",
    "link",
    "losses",
    "participation",
    "parameters",
    "agreement",
    "trace",
    "turns",
    "uneven",
)
"""Files of `exchange` about events that most steps do not have."""


def files_in(run: Callable[[], object]) -> set[str]:
    """Files of dgcopt, without kernels, in which functions are called."""
    root, found = Path(dgcopt.__file__).parent, set()

    def note(frame: FrameType, event: str, argument: Any) -> None:
        if event == "call":
            found.add(frame.f_code.co_filename)

    sys.setprofile(note)
    try:
        run()
    finally:
        sys.setprofile(None)
    inside = [Path(name).relative_to(root) for name in found if Path(name).is_relative_to(root)]
    return {path.as_posix() for path in inside if path.parts[0] != "kernels"}


@pytest.mark.parametrize(
    ("make", "most"),
    [
        (lambda: dgcopt.NoCompression(), 26),
        (lambda: dgcopt.DGC(0.05), 31),
        (lambda: dgcopt.DGC.compact(0.05, warmup=None), 32),
        (lambda: dgcopt.LocalSGD(every=100), 10),
        (lambda: dgcopt.LocalSGD(every=1), 21),
        (lambda: dgcopt.DiLoCo(every=100), 10),
        (lambda: dgcopt.DiLoCo(every=1), 32),
    ],
    ids=["dense", "DGC", "compact", "a local step", "a round", "a local step of DiLoCo", "an outer step"],
)
def test_files_of_a_normal_step_are_few(make: Callable[[], Any], most: int) -> None:
    comms, method = dgcopt.simulated_world(2), make()
    models = [small_model(torch.float32) for _ in comms]
    optimizers: list[Any] = []
    for model, comm in zip(models, comms, strict=True):
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
        if isinstance(method, dgcopt.Averaging):
            optimizers.append(method.attach(optimizer, model.named_parameters(), comm))
        else:
            optimizers.append(dgcopt.DistributedOptimizer(optimizer, model.named_parameters(), method, comm=comm))

    def step() -> None:
        for model in models:
            model(torch.ones(4, 12)).sum().backward()
        for optimizer in optimizers:
            optimizer.step()
        for optimizer in optimizers:
            optimizer.zero_grad()

    for _ in range(3):
        step()
    found = files_in(step)
    assert found.isdisjoint(f"exchange/{name}.py" for name in RARE)
    assert len(found) <= most, "\n".join(sorted(found))
