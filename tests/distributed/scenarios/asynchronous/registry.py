"""The scenarios of averaging in a thread, by name."""

from __future__ import annotations

from collections.abc import Callable

from dgcopt import Comm

Scenario = Callable[[Comm], None]


def registered_in(scenarios: dict[str, Scenario]) -> Callable[[Scenario], Scenario]:
    """Return a decorator that adds a function to `scenarios` under its own name."""

    def add(run: Scenario) -> Scenario:
        scenarios["asynchronous: " + run.__name__.replace("_", " ")] = run
        return run

    return add
