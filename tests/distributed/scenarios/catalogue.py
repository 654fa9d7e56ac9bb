"""What real ranks run: functions of a `Comm` that assert inside and return what all wires must agree on."""

from collections.abc import Callable
from types import ModuleType
from typing import Any

from dgcopt import Comm
from tests.support.wires import is_for

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
    rejoining,
    subsets,
)

Scenarios = dict[str, Callable[[Comm], dict[str, Any] | None]]


def of(*modules: ModuleType) -> Scenarios:
    return {name: scenario for module in modules for name, scenario in module.SCENARIOS.items()}


SIZE_MATTERS: Scenarios = of(collectives, disagreement, subsets) | algorithms.AS_SIMULATED
"""Run with two ranks and with four on every wire."""

SIZE_MATTERS_ONCE: Scenarios = collectives.DIAGNOSED | averaging.IN_TRAINING | overlap.IN_BYTES
"""Run with two ranks on every wire, and with four on one: others have every exchange of theirs among four."""

FOUR_RANKS: Scenarios = of(machines)
"""Run with four ranks on every wire: every compressor and averaging rule."""

LAST: Scenarios = of(rejoining)
"""Run with two ranks, among which the script has joined before dgcopt, and with four, among which dgcopt joins."""

# AsyncAverage's come last: ranks leave while others still exchange
ON_ALL_WIRES: Scenarios = (
    of(optimizers, algorithms, loops, contract, overlap, persistence, checksums, averaging)
    | SIZE_MATTERS
    | SIZE_MATTERS_ONCE
    | LAST
    | of(asynchronous)
)
"""Run with two ranks on every wire. What is about training more than about the wire is run with more of them by
simulated ranks only."""

IN_DDP = of(powersgd, ddp)
"""Run in torch's DistributedDataParallel; the last one breaks the wire."""

ON_CUDA = of(cuda)
"""Run by two ranks that share a CUDA device."""

SCENARIOS: Scenarios = FOUR_RANKS | ON_ALL_WIRES | IN_DDP | ON_CUDA


def names_of(wire: str, size: int) -> list[str]:
    """What is run over a wire among so many ranks."""
    among_four = FOUR_RANKS | SIZE_MATTERS | (SIZE_MATTERS_ONCE if wire == "torch" else {}) | LAST
    chosen = ON_ALL_WIRES if size == 2 else among_four
    return [name for name, scenario in chosen.items() if is_for(scenario, wire, size)]
