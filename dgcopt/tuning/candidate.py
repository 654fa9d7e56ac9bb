"""A candidate of `Auto`: a compressor with its buckets, overlap and hierarchy."""

from __future__ import annotations

from dataclasses import dataclass

__all__ = ["DDP_SIZES", "DENSE", "SIZES", "Candidate"]

DENSE = "NoCompression()"
DDP_SIZES = (25.0, 1.0)
"""Megabytes of DistributedDataParallel's buckets, and of the first one."""
SIZES = (None, (5.0, 1.0), (25.0, 1.0), (25.0, 25.0), (100.0, 100.0))
"""Megabytes per bucket and in the first one that are tried; None leaves them to the layout."""


@dataclass(frozen=True)
class Candidate:
    """One exchange with its settings.

    Attributes:
        base: the compressor, as a user would write it.
        hierarchical: averages inside machines first, and exchanges between machines.
        overlap: launch buckets during backward; None leaves it to the compressor.
        sizes: megabytes per bucket, and of the first one; None leaves them to the layout.
    """

    base: str
    hierarchical: bool = False
    overlap: bool | None = None
    sizes: tuple[float, float] | None = None

    @property
    def name(self) -> str:
        """The exchange in words."""
        words = f"Hierarchical({self.base})" if self.hierarchical else self.base
        if self.sizes is not None:
            words += ", buckets of {:g} MB, the first of {:g}".format(*self.sizes)
        if self.overlap is not None:
            words += ", during backward" if self.overlap else ", after backward"
        return words
