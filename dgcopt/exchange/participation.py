"""Who still has data, where ranks may run out of it one before another: see `dgcopt.join`."""

from __future__ import annotations

from collections.abc import Sequence

from ..errors import OutOfData

__all__ = ["Participation"]


class Participation:
    """What one rank of `size` knows of who has data.

    Attributes: `here`, whether this rank has; `ranks`, how many have; `divides`, whether averages divide by these, else
    by all; `throws`, whether it is an error that some have none while others have; `ended`, whether no rank had any in
    the last vote.
    """

    def __init__(self, size: int) -> None:
        self.size = size
        self.begin()

    def begin(self, divides: bool = True, throws: bool = False) -> None:
        """All ranks have data, and may run out of it from now on."""
        self.divides, self.throws = divides, throws
        self.all_here()

    def all_here(self) -> None:
        """All ranks have data, at first or again."""
        self.here, self.ranks, self.ended = True, self.size, False

    def check(self, absent: Sequence[int]) -> None:
        """Take over which ranks are `absent`; raises OutOfData on all ranks if some are and that is an error."""
        self.ended = len(absent) == self.size
        if self.throws and 0 < len(absent) < self.size:
            self.all_here()
            raise OutOfData(
                f"rank(s) {', '.join(map(str, absent))} of {self.size} have run out of data before the others, and "
                f"throw_on_early_termination was asked for: give all ranks as many batches, or leave it away"
            )

    @property
    def share(self) -> float:
        """What a rank's part counts for in a mean over all ranks, so that it is one over those with data."""
        return self.size / self.ranks if self.divides and self.ranks else 1.0
