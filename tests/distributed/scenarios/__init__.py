"""What is run on every wire: functions of a `Comm` that assert inside and return what all wires must agree on."""

from collections.abc import Callable
from typing import Any

from dgcopt import Comm

from . import (
    algorithms,
    averaging,
    checksums,
    collectives,
    contract,
    disagreement,
    loops,
    optimizers,
    overlap,
    persistence,
    subsets,
)
from .where import is_for

SCENARIOS: dict[str, Callable[[Comm], dict[str, Any] | None]] = {}
for module in (
    collectives,
    optimizers,
    algorithms,
    overlap,
    persistence,
    disagreement,
    subsets,
    checksums,
    loops,
    contract,
    averaging,
):
    SCENARIOS.update(module.SCENARIOS)


def names_of(wire: str, size: int) -> list[str]:
    """What is run over a wire among so many ranks."""
    return [name for name, scenario in SCENARIOS.items() if is_for(scenario, wire, size)]
