"""The wire of a single process: every collective is its own result."""

from __future__ import annotations

from collections.abc import Iterable

from ..collectives import Collective
from .base import DEADLINE, Comm, Handle, RankSet

__all__ = ["LocalComm"]


class LocalComm(Comm):
    """One process, no neighbours."""

    wire = "local"

    def __init__(self, deadline: float = DEADLINE) -> None:
        super().__init__(0, 1, deadline)

    def _start(self, collective: Collective, ranks: tuple[int, ...]) -> Handle:
        raise AssertionError("a single rank starts nothing")  # Comm.start answers groups of one by itself

    def _among(self, members: tuple[int, ...], given: Iterable[int] | RankSet) -> Comm:
        raise AssertionError("a single rank has no two members")
