"""Exact selection of the k largest magnitudes of each tensor in a flat bucket."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

from torch import Tensor

from ...flat.buckets import Segment
from ...kernels import Groups, select, select_ahead

__all__ = ["Selection", "count_of"]


def count_of(ratio: float, numel: int) -> int:
    """Return k = ceil(ratio * n), the number of coordinates that a tensor of `numel` elements sends."""
    return min(numel, math.ceil(ratio * numel))


class Selection:
    """Selects the largest magnitudes of each segment of a bucket, or of the whole bucket, exactly.

    Args:
        segments: the tensors of the bucket.
        ratio: fraction of elements to select.
        together: apply the ratio to the whole bucket instead of each tensor.
    """

    def __init__(self, segments: Sequence[Segment], ratio: float, together: bool = False) -> None:
        spans = [(segment.start, segment.stop) for segment in segments]
        pieces = [spans] if together else [[span] for span in spans]
        counts = [count_of(ratio, sum(stop - start for start, stop in group)) for group in pieces]
        self.count = sum(counts)
        """Number of selected coordinates."""
        self._groups = Groups(pieces, counts, segments[0].param.device)

    def largest(self, flat: Tensor, maxima: Tensor) -> Tensor:
        """Return positions of the largest magnitudes of `flat`, given its block maxima: int64, ascending.

        Ties go to the first positions. NaN counts as largest.
        """
        return select(flat, maxima, self._groups)

    def largest_of(self, rows_of: Callable[[Tensor], Tensor], maxima: Tensor) -> tuple[Tensor, Tensor]:
        """Select from blocks that `rows_of` computes on demand; return positions and values."""
        return select_ahead(rows_of, maxima, self._groups)
