"""Copies of residuals on other ranks: which copies a rank keeps, and which it adds to its own residual."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

import dgcopt
from dgcopt.collectives import SendRecv
from dgcopt.errors import ConfigError
from dgcopt.exchange.lost_ranks import Buddy

PARAMS = {"a": torch.zeros(2, 2), "b": torch.zeros(3)}


class Wire:
    """Rank 1 of some members; the rank before it sends `theirs`."""

    rank = 1

    def __init__(self, *members: str) -> None:
        self.members, self.size = members, len(members)
        self.sent: list[SendRecv] = []
        self.theirs = torch.arange(7.0)

    def start(self, collective: SendRecv, label: str) -> SendRecv:
        self.sent.append(collective)
        return collective

    def wait(self, handle: SendRecv) -> torch.Tensor:
        return self.theirs.to(handle.tensor)

    def complete(self, act: Callable[[], Any]) -> Any:
        return act()


def copy(buddy: Buddy, wire: Any, memory: Any = None) -> None:
    buddy.copy(memory or {}, PARAMS, wire, wire.start)


def test_a_lost_ranks_copy_is_added_once() -> None:
    buddy, wire = Buddy(), Wire("x", "me", "z")
    copy(buddy, wire)
    memory = {"residual": {"b": torch.ones(3)}, "momentum": {"b": torch.ones(3)}}
    assert buddy.take_over(memory, ("x", "me", "z"), PARAMS) == []
    assert buddy.take_over(memory, ("me", "z"), PARAMS) == ["x"]
    assert memory["residual"]["a"].tolist() == [[0.0, 1.0], [2.0, 3.0]]
    assert memory["residual"]["b"].tolist() == [5.0, 6.0, 7.0]
    assert memory["momentum"]["b"].tolist() == [1.0, 1.0, 1.0]
    assert buddy.take_over(memory, ("me", "z"), PARAMS) == []


def test_all_that_is_unsent_goes_to_the_next_rank() -> None:
    wire = Wire("x", "me", "z")
    memory = {kind: {"b": torch.tensor([1.0, 2.0, 3.0])} for kind in ("residual", "residual of sums", "momentum")}
    copy(Buddy(), wire, memory)
    (one,) = wire.sent
    assert (one.to, one.source, one.tensor.dtype) == (2, 0, torch.bfloat16)
    assert one.tensor.tolist() == [0.0, 0.0, 0.0, 0.0, 2.0, 4.0, 6.0]


def test_copies_are_on_the_cpu_whatever_the_default_device() -> None:
    wire = Wire("x", "me", "z")
    with torch.device("meta"):
        copy(Buddy(), wire, {"residual": {"b": torch.ones(3, device="cpu")}})
    assert wire.sent[0].tensor.tolist() == [0.0, 0.0, 0.0, 0.0, 1.0, 1.0, 1.0]


def test_a_copy_is_void_once_another_rank_has_a_newer_one() -> None:
    """Else two ranks would add the residual of the one that is lost."""
    buddy = Buddy()
    copy(buddy, Wire("x", "me", "z"))
    copy(buddy, Wire("z", "me", "x"))  # now the copy of x is on z
    memory: Any = {}
    assert buddy.take_over(memory, ("z", "me"), PARAMS) == []
    assert not memory


def test_the_copy_of_a_rank_lost_during_the_next_copy_stays() -> None:
    buddy = Buddy()
    copy(buddy, Wire("x", "me", "z"))
    copy(buddy, Wire("z", "me"))  # x is lost meanwhile: the copies are made without it
    assert buddy.take_over({}, ("z", "me"), PARAMS) == ["x"]


def test_a_single_rank_sends_nothing() -> None:
    wire = Wire("me")
    copy(Buddy(), wire)
    assert not wire.sent


@pytest.mark.parametrize(
    "settings, problem",
    [
        ({"residuals": "both", "survive": True}, "residuals must be"),
        ({"residuals": "buddy"}, "set survive=True too"),
        ({"residuals": "buddy", "survive": True, "copy_every": 0}, "copy_every"),
    ],
)
def test_refused(settings: dict[str, Any], problem: str) -> None:
    with pytest.raises(ConfigError, match=problem):
        dgcopt.init(**settings)
