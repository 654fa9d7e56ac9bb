"""Errors of a wire: each names the collective, the ranks that are missing, and where to look."""

from __future__ import annotations

from collections.abc import Sequence
from typing import ClassVar

from ..collectives import Collective, Group
from ..errors import CommError, DGCError, TimeoutExceeded
from .nodes import Nodes

__all__ = ["Failures"]


class Failures(Nodes):
    """The part of a `Comm` that converts failures of its library to exceptions."""

    wire: ClassVar[str]

    def _late(self, collective: Collective, limit: float) -> CommError:
        me = self._rank_in(collective.group)
        others = [r for r in self._ranks[collective.group] if r != me]
        words = collective.describe()
        # ranks of a replica have other numbers than the ranks of this comm, and only the latter can be asked
        waiting = None if collective.group == "replica" else self._waiting(words)
        here = [rank for rank in others if waiting is not None and waiting.get(rank) == words]
        missing = [rank for rank in others if rank not in here]
        if waiting is None:
            more = f" {self.wire} does not tell which of them is missing." if len(others) > 1 else ""
        else:
            more = f" Rank(s) {_listed(here)} wait for it too." if here else ""
            elsewhere = [rank for rank in missing if rank in waiting]
            more += "".join(f" Rank {rank} waits for {waiting[rank]}." for rank in elsewhere[:4])
        needed = f"rank(s) {_listed(missing)}" if missing else "a network that brings it: no rank is missing"
        return self._error(
            TimeoutExceeded,
            f"rank {me} waited {limit:g} s for {words} over {self.wire}, which also needs {needed}.{more} Look "
            f"for a rank that died, raised an error of its own, is slower, or took another path, as by "
            f"`if rank == 0:`; dgcopt.init(deadline=...) gives it longer.",
        )

    def _rank_in(self, group: Group) -> int:
        """Return this rank's number within a group."""
        return self.rank

    def _waiting(self, words: str) -> dict[int, str] | None:
        """Tell the other ranks that this deadline for `words` has passed; return the collectives that they wait for.

        By rank; None if the wire cannot exchange it.
        """
        return None

    def _refused(self, collective: Collective, error: Exception) -> DGCError:
        return self._error(
            CommError,
            f"rank {self.rank}: {self.wire} could not start {collective.describe()}: {error}{self._who_is_gone()}",
        )

    def _failed(self, collective: Collective, error: Exception) -> CommError:
        reason = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
        return self._error(
            CommError,
            f"rank {self.rank}: {collective.describe()} failed over {self.wire}: {reason}{self._who_is_gone()}",
        )

    def _who_is_gone(self) -> str:
        """Return the ranks that can no longer be reached, for errors of libraries that do not name them."""
        ranks = ", ".join(map(str, self._gone()))
        return f" Rank(s) {ranks} closed the connection: look there first." if ranks else ""

    def _gone(self) -> list[int]:
        """Return the ranks that can no longer be reached, as far as the wire knows after a failure."""
        return []

    def _error(self, kind: type[CommError], message: str) -> CommError:
        """Convert a failure of the library to an exception."""
        return kind(message)


def _listed(ranks: Sequence[int]) -> str:
    return f"{', '.join(map(str, ranks[:16]))}{' ...' if len(ranks) > 16 else ''}"
