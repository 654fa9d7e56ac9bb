"""Where a scenario has something to show: it is not run, nor counted, elsewhere."""

from __future__ import annotations

from collections.abc import Callable, Collection
from typing import Any, TypeVar

WIRES = ("torch", "horovod-gloo", "horovod-mpi", "mpi")
HOROVOD = ("horovod-gloo", "horovod-mpi")

Scenario = TypeVar("Scenario", bound=Callable[..., Any])


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
