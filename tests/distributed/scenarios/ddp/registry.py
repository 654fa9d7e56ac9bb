"""The scenarios of DDP by name, among the ranks of torch's default process group."""

from __future__ import annotations

from collections.abc import Callable

from dgcopt import Comm

Scenario = Callable[[Comm], None]


def registered_in(scenarios: dict[str, Scenario]) -> Callable[[Callable[[], None]], Callable[[], None]]:
    """Return a decorator that adds a function to `scenarios` under its own name."""

    def add(run: Callable[[], None]) -> Callable[[], None]:
        scenarios["ddp: " + run.__name__.replace("_", " ")] = lambda comm: run()
        return run

    return add
