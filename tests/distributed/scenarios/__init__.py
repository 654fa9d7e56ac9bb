"""What real ranks run: functions of a `Comm` that assert inside and return what all wires must agree on."""

from collections.abc import Callable
from types import ModuleType
from typing import Any

from where import is_for

from dgcopt import Comm

from . import (
    algorithms,
    asynchronous,
    averaging,
    checksums,
    collectives,
    contract,
    cuda,
    ddp,
    disagreement,
    loops,
    machines,
    optimizers,
    overlap,
    persistence,
    powersgd,
    subsets,
)

Scenarios = dict[str, Callable[[Comm], dict[str, Any] | None]]


def of(*modules: ModuleType) -> Scenarios:
    return {name: scenario for module in modules for name, scenario in module.SCENARIOS.items()}


SIZE_MATTERS: Scenarios = of(collectives, disagreement, subsets) | algorithms.AS_SIMULATED | of(averaging)
"""Run with two ranks and with four on every wire."""

FOUR_RANKS: Scenarios = of(machines)
"""Run with four ranks on every wire."""

# AsyncAverage's come last: ranks leave while others still exchange
ON_ALL_WIRES: Scenarios = (
    of(optimizers, algorithms, loops, contract, overlap, persistence, checksums) | SIZE_MATTERS | of(asynchronous)
)
"""Run with two ranks on every wire. What is about training more than about the wire is run with four on one of them
only, and by simulated ranks of many sizes."""

IN_DDP = of(powersgd, ddp)
"""Run in torch's DistributedDataParallel; the last one breaks the wire."""

ON_CUDA = of(cuda)
"""Run by two ranks that share a CUDA device."""

SCENARIOS: Scenarios = FOUR_RANKS | ON_ALL_WIRES | IN_DDP | ON_CUDA


def names_of(wire: str, size: int) -> list[str]:
    """What is run over a wire among so many ranks."""
    chosen = ON_ALL_WIRES if size == 2 or wire == "torch" else SIZE_MATTERS
    if size == 4:
        chosen = FOUR_RANKS | chosen
    return [name for name, scenario in chosen.items() if is_for(scenario, wire, size)]
