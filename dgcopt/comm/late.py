"""Ranks of torch's process groups that are late or gone, found out after a failure."""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Mapping, Sequence

import torch
import torch.distributed as dist

__all__ = ["NOTICE", "gone", "waiting"]

NOTICE = 0.5
"""Seconds within which Gloo notices that all connections to a lost process are closed."""

LATE = "dgcopt waits, rank "
"""Prefix of the store key, before a rank's number, that holds the collective for which its deadline has passed."""

PROBE = 1_000_003
"""Tag of messages that test if a rank can be reached; nothing else uses it."""


def waiting(group: dist.ProcessGroup, rank: int, others: Sequence[int], words: str) -> dict[int, str] | None:
    """Tell `others` that the deadline of `rank` for `words` has passed; return the collectives that they wait for.

    Asks through the rendezvous store, in a thread, because the store's machine may be the lost one: None then.
    """
    found: dict[int, str] = {}
    asked = threading.Event()

    def ask() -> None:
        end = time.monotonic() + NOTICE
        with contextlib.suppress(RuntimeError):
            store = group.get_group_store()
            store.set(f"{LATE}{rank}", words)
            while len(found) < len(others):
                for other in others:
                    if other not in found and store.check([f"{LATE}{other}"]):
                        found[other] = store.get(f"{LATE}{other}").decode(errors="replace")
                if time.monotonic() > end:
                    break
                time.sleep(0.02)
            asked.set()

    threading.Thread(target=ask, name="dgcopt asks who is late", daemon=True).start()
    return dict(found) if asked.wait(2 * NOTICE) else None


def gone(groups: Sequence[dist.ProcessGroup | None], others: Mapping[int, int]) -> list[int]:
    """Return the ranks that Gloo refuses to send to, given those of all `groups` and their numbers in the default one.

    Gloo names a lost rank by its address only, but refuses at once to send to it, so each rank is tried. A failed
    collective may close its group's connections to live ranks too, but not those of other groups.
    """
    end = time.monotonic() + NOTICE
    while groups:  # none if it failed while they were made
        found = [rank for rank, number in others.items() if not any(_reaches(number, group) for group in groups)]
        if found or time.monotonic() > end:
            return found
        time.sleep(0.01)
    return []


def _reaches(rank: int, group: dist.ProcessGroup | None) -> bool:
    """Return True if Gloo accepts a message to a rank, without waiting for its arrival."""
    try:
        dist.isend(torch.zeros(1, device="cpu"), rank, group, tag=PROBE)
    except RuntimeError:
        return False
    return True
