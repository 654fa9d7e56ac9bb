"""Uneven data: ranks that run out of it go on serving those that have more."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Literal

from torch.optim import Optimizer

from .averaging import Rounds
from .compressors import Adasum
from .errors import ConfigError
from .exchange.runner import serve
from .gradients.engine import Engine
from .gradients.optimizer import Distributed

__all__ = ["join"]


@contextmanager
def join(*optimizers: Optimizer, divide_by: Literal["active", "all"] = "active") -> Iterator[None]:
    """Let ranks take different numbers of steps; every rank leaves once all have run out of data.

        with dgcopt.join(optimizer):
            for inputs, targets in loader:  # longer on some ranks than on others
                ...

    A rank whose loop has ended takes part in the others' steps without gradients of its own: what it held back is
    still sent, and its parameters follow. Works on every wire; what else the loop sends (a logged loss) it must not
    wait for, but `dgcopt.sync_buffers` goes on: all end with the statistics of a rank that came last.

    An optimizer whose weights are averaged (`dgcopt.averaging`) takes part in the others' exchanges without steps of
    its own, and all ranks leave after an exchange to which each has brought its last step.

    Args:
        optimizers: those that step in the loop, in the order in which they step.
        divide_by: averages divide by the ranks that still have data ("active"), so that each of their steps is as long
            as ever, or by all of them ("all"), which is what torch's Join and DDP do unless told otherwise.

    Raises ConfigError for optimizers that are not distributed or use Adasum; `step(closure)` is refused once a rank
    has run out of data. After an exception in the loop nobody is served: the others end at their deadline.
    """
    if divide_by not in ("active", "all"):
        raise ConfigError(f'divide_by must be "active" or "all", not {divide_by!r}')
    serving: list[Engine | Rounds] = []
    for optimizer in optimizers:
        averaging: Rounds | None = getattr(optimizer, "averaging", None)
        if averaging is not None:
            if isinstance(optimizer, Distributed):
                raise ConfigError("join does not work where both gradients and weights are averaged")
            averaging.join()
            serving.append(averaging)
        elif not isinstance(optimizer, Distributed):
            raise ConfigError("join takes optimizers that DistributedOptimizer, or an averaging algorithm, returned")
        elif any(isinstance(part, Adasum) for part in optimizer.compressor.parts()):
            raise ConfigError("join does not work with Adasum, for which a rank without data has no neutral update")
        elif optimizer.engine is not None:
            serving.append(optimizer.engine)
    for member in serving:
        member.attendance.divides = divide_by == "active"
    yield
    for member in serving:
        member.attendance.here = False
    serve([member.runner for member in serving])
