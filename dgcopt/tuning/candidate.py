"""A candidate of `Auto`: a compressor with its buckets, overlap and hierarchy."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Protocol

from torch import Tensor
from torch.optim import Optimizer

from ..compressors import Compressor, Hierarchical

__all__ = ["DDP_SIZES", "DENSE", "SIZES", "Candidate", "Candidates"]

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

    def built_on(self, base: Compressor) -> Compressor:
        """Return the exchange by a compressor, with this hierarchy and overlap."""
        made = Hierarchical(base) if self.hierarchical else base
        if self.overlap is not None:
            for part in made.parts():
                part.overlap = self.overlap
        return made


class Candidates(Protocol):
    """The candidates of an `Auto`, and the one in use; see there.

    Attributes:
        compressor: the only compressor, or None.
        trials: the file of trials, or None.
        choice: the candidate in use.
        inner: its compressor.
    """

    compressor: Compressor | None
    trials: str | None
    choice: Candidate
    inner: Compressor

    @property
    def fallback(self) -> Candidate: ...
    def candidates(self, hierarchical: bool, fixed_sizes: bool) -> list[Candidate]: ...
    def make(self, candidate: Candidate) -> Compressor: ...
    def make_optimizer(self, params: Iterable[Tensor]) -> Optimizer: ...
    def use(self, candidate: Candidate) -> None: ...
    def explain(self, reason: str) -> None: ...
