"""Which coordinates are sent: the exact k largest magnitudes of every tensor of a flat bucket."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

from torch import Tensor

from ..flat.segments import Segment
from ..kernels import Groups, select, select_ahead

__all__ = ["Selection", "count_of"]


def count_of(ratio: float, numel: int) -> int:
    """k = ceil(ratio * n), the number of coordinates that a tensor of `numel` elements sends."""
    return min(numel, math.ceil(ratio * numel))


class Selection:
    """Selects from one bucket: of every segment, or of all together, the largest magnitudes, exactly.

    Args:
        segments: the tensors of the bucket.
        ratio: fraction of the elements that is selected.
        together: whether k counts for the bucket as a whole, instead of for each tensor.
    """

    def __init__(self, segments: Sequence[Segment], ratio: float, together: bool = False) -> None:
        spans = [(segment.start, segment.stop) for segment in segments]
        pieces = [spans] if together else [[span] for span in spans]
        counts = [count_of(ratio, sum(stop - start for start, stop in group)) for group in pieces]
        self.count = sum(counts)
        """How many coordinates are selected."""
        self._groups = Groups(pieces, counts, segments[0].param.device)

    def largest(self, flat: Tensor, maxima: Tensor) -> Tensor:
        """Positions of the largest magnitudes of `flat`, whose `block_maxima` are `maxima`.

        Among equal magnitudes those that come first are taken. NaN counts as largest. Returns int64, ascending.
        """
        return select(flat, maxima, self._groups)

    def largest_of(self, rows_of: Callable[[Tensor], Tensor], maxima: Tensor) -> tuple[Tensor, Tensor]:
        """The same of what is not there yet, and the values; `rows_of` makes the blocks of those numbers of it."""
        return select_ahead(rows_of, maxima, self._groups)
