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
