"""Python calls of a step per tensor: few, and as many for each of 400 tensors as for each of 100."""

import sys
from collections.abc import Callable
from types import FrameType
from typing import Any

import pytest
import torch
from torch import nn

import dgcopt
from tests.support.worlds import Ranks


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
