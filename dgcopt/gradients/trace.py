"""Traces of a wrapped optimizer's collectives."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from torch.optim import Optimizer

from ..errors import ConfigError
from ..exchange.trace import Trace
from .optimizer import synchronised

__all__ = ["trace"]


@contextmanager
def trace(optimizer: Optimizer, path: str | Path) -> Iterator[None]:
    """Context in which this rank's collectives are written to a file in Chrome's trace format.

    Open it in chrome://tracing or ui.perfetto.dev, or let `dgcopt report` show where a step's time goes.

    Args:
        optimizer: wrapped by `DistributedOptimizer`; in a single process the file has no event.
        path: the file, another one on each rank.

    Raises ConfigError for an optimizer that is not wrapped, and for a file that cannot be written.
    """
    steps = synchronised(optimizer)
    if steps is None:
        raise ConfigError("trace() needs an optimizer that dgcopt.DistributedOptimizer has wrapped")
    written = Trace(Path(path), steps.comm.rank)
    scheduler = None if steps.engine is None else steps.engine.runner.scheduler
    if scheduler is not None:
        scheduler.write_trace(written)
    try:
        yield
    finally:
        if scheduler is not None:
            scheduler.write_trace(None)
        written.close()
