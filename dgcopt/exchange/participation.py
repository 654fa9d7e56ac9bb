"""Participation of ranks in steps, some of which may run out of data before others: see `dgcopt.join`."""

from __future__ import annotations

from collections.abc import Sequence

from ..errors import OutOfData

__all__ = ["Participation"]


class Participation:
    """The ranks with data, from the view of one of `size` ranks.

    Attributes:
        here: True if this rank has data.
        ranks: number of ranks with data.
        divides: True if averages divide by this number, else by all ranks.
        throws: True if it is an error that some ranks have run out of data before others.
        ended: True if no rank had data in the last vote.
        share: weight of a rank's gradient in a mean over all ranks, which makes it a mean over those with data.
    """

    def __init__(self, size: int) -> None:
        self.size = size
        self.begin()

    def begin(self, divides: bool = True, throws: bool = False) -> None:
        """Allow ranks to run out of data from now on; all have data at first."""
        self.divides, self.throws = divides, throws
        self.all_here()

    def all_here(self) -> None:
        """Note that all ranks have data, at first or again."""
        self.here, self.ranks, self.ended, self.share = True, self.size, False, 1.0

    def leave(self) -> None:
        """Note that this rank has run out of data."""
        self.here = False

    def count(self, ranks: int) -> None:
        """Set the number of ranks with data."""
        self.ranks = ranks
        self.share = self.size / ranks if self.divides and ranks else 1.0

    def check(self, absent: Sequence[int]) -> None:
        """Record the `absent` ranks; raise OutOfData, on all ranks, if `throws` is set."""
        self.ended = len(absent) == self.size
        if self.throws and not self.ended:
            self.all_here()
            raise OutOfData(
                f"rank(s) {', '.join(map(str, absent))} of {self.size} have run out of data before the others, and "
                f"throw_on_early_termination is set. Give all ranks the same number of batches, or remove it."
            )
