"""Steps in which a rank is lost: they are made again by the ranks that are left (`dgcopt.init(survive=True)`)."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import TypeVar

from ..comm import Comm
from ..errors import CommError, QuorumLost, VotedOut

__all__ = ["repeat_after_losses"]

Result = TypeVar("Result")


def repeat_after_losses(
    act: Callable[[], Result],
    comm: Comm,
    follow: Callable[[], None],
    count_lost: Callable[[float, bool], None],
    admit: Callable[[], None] = lambda: None,
) -> Result | None:
    """Call `act`, which ends in a commit, until the ranks that are left have committed it.

    Returns its result; None if the step was committed although `act` has failed.

    Args:
        act: exchanges, and commits by `Comm.confirm`; a failure leaves no trace.
        comm: the wire.
        follow: adopts the current ranks; called before each attempt.
        count_lost: counts the seconds of a failed attempt, and whether it was aborted (`Telemetry.count_lost`).
        admit: takes in processes that have come, after a failed attempt.
    """
    commits = comm.commits
    while True:
        follow()
        generation, start = comm.generation, time.perf_counter()
        try:
            return act()
        except (VotedOut, QuorumLost):
            raise
        except CommError as error:
            if comm.generation == generation:  # else a confirmation has recovered already
                comm.recover(error)
        count_lost(time.perf_counter() - start, comm.commits == commits)
        if comm.commits > commits:
            return None
        admit()
