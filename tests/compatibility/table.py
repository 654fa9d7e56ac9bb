"""The table of trials: what is tried, on simulated ranks or on two real ones, and what came of it.

A trial returns None if all is as it should be ("works"), or the message with which dgcopt refuses; it raises if it is
neither. `not_yet` says what is known to go wrong, on one version of torch at least: such a trial may fail on versions
before the one that it `works_from`.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Callable, Collection
from dataclasses import dataclass
from typing import Any

import torch

GROUPS = (
    "Optimizers of torch",
    "Optimizers of other packages",
    "Around an optimizer",
    "Models",
    "Data-parallel and sharded",
    "Frameworks",
)


class Absent(Exception):
    """What is to be tried does not exist in this version of torch, or needs what this machine lacks."""


@dataclass(frozen=True)
class Trial:
    """One row of the page. `run` takes nothing, or the comm of one of two real ranks."""

    group: str
    what: str
    run: Callable[..., str | None]
    needs: Collection[str] = ()
    real: bool = False
    not_yet: str = ""
    works_from: tuple[int, ...] = (10**6,)
    note: str = ""

    def may_fail(self, version: str) -> bool:
        """Whether it is known to go wrong on this version of torch."""
        return bool(self.not_yet) and tuple(map(int, version.split("."))) < self.works_from

    @property
    def absent(self) -> str:
        """Which packages it needs that are not installed."""
        return ", ".join(name for name in self.needs if importlib.util.find_spec(name) is None)


TRIALS: dict[str, Trial] = {}


def trial(group: str, what: str, **more: Any) -> Callable[[Callable[..., str | None]], Callable[..., str | None]]:
    """Adds a function to the table."""
    assert group in GROUPS and what not in TRIALS, what

    def add(run: Callable[..., str | None]) -> Callable[..., str | None]:
        TRIALS[what] = Trial(group, what, run, **more)
        return run

    return add


def refusal(kind: type[Exception], *words: str, of: Callable[[], Any]) -> str:
    """The message with which `of` is refused, in one line. Raises AssertionError if it is not, or does not say why."""
    try:
        of()
    except kind as error:
        said = " ".join(str(error).split())
        absent = [word for word in words if word not in said]
        assert not absent, f"refused without saying {absent}: {said}"
        return said
    raise AssertionError(f"was not refused with a {kind.__name__}")


def verdict(trial: Trial, *args: Any) -> str:
    """Carries a trial out: "works", "refused: ..." or "absent: ..."; errors are the trial's own."""
    if trial.absent:
        return f"absent: {trial.absent} is not installed"
    try:
        said = trial.run(*args)
    except Absent as reason:
        return f"absent: {reason}"
    return f"refused: {said}" if said else "works"


def version() -> str:
    return ".".join(torch.__version__.split(".")[:2])
