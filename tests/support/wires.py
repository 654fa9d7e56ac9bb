"""Where a scenario has something to show: it is not run, nor counted, elsewhere."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable
from typing import Any, TypeVar

from dgcopt import Comm

WIRES = ("torch", "horovod-gloo", "horovod-mpi", "mpi")
HOROVOD = ("horovod-gloo", "horovod-mpi")

Scenario = TypeVar("Scenario", bound=Callable[..., Any])
Case = TypeVar("Case")


def only(wires: Collection[str] = (*WIRES, "simulated"), sizes: Collection[int] = range(1, 2**10)) -> Any:
    """Marks a scenario as one for these wires, and these numbers of ranks."""

    def mark(scenario: Scenario) -> Scenario:
        scenario.where = (wires, sizes)  # type: ignore[attr-defined]
        return scenario

    return mark


def is_for(scenario: Callable[..., Any], wire: str, size: int) -> bool:
    """Whether it is to be run there: everywhere, if it is not marked."""
    wires, sizes = getattr(scenario, "where", ((wire,), (size,)))
    return wire in wires and size in sizes


def share(comm: Comm, cases: Iterable[Case]) -> list[Case]:
    """All cases over torch's wire and on simulated ranks, and others of them, a third each, over the other wires.

    For scenarios about training, whose many cases ask the same of a wire.
    """
    first = {"horovod": 0, "mpi": 1}
    return [*cases][first[comm.wire] :: 3] if comm.wire in first else [*cases]
