"""The largest magnitudes of every chunk of a flat tensor, exactly."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

from ..blocks import BLOCK, bits_of

__all__ = ["Chunks", "add_and_select_chunks", "select_chunks"]


@dataclass(frozen=True, eq=False)
class Chunks:
    """Which chunks of a flat tensor there are, and how many elements of each are selected.

    Args:
        spans: start and stop of each chunk, in order; each starts on a block boundary.
        counts: how many elements of each are selected, at least one and at most all.
        device: the device of the flat tensor.
    """

    spans: Sequence[tuple[int, int]]
    counts: Sequence[int]
    device: torch.device

    @cached_property
    def count(self) -> int:
        """How many elements are selected."""
        return sum(self.counts)

    @cached_property
    def table(self) -> tuple[Tensor, Tensor, Tensor]:
        """Starts, stops and counts: int64, on the CPU."""
        starts, stops = torch.tensor(self.spans, dtype=torch.int64).view(-1, 2).T.contiguous()
        return starts, stops, torch.tensor(self.counts, dtype=torch.int64)

    def placed(self, numel: int) -> tuple[Tensor, int]:
        """Start and stop of each chunk, and the gap behind it, of `numel` elements in all; its count, and the
        counts before it: int64 `[5, chunks]`, on the device. And how long the longest is, with its gap."""
        if numel not in self._placed:
            starts, stops = zip(*self.spans, strict=True) if self.spans else ((), ())
            ends = [*starts[1:], numel][: len(starts)]
            before = [0, *itertools.accumulate(self.counts)][: len(starts)]
            table = torch.tensor([starts, stops, ends, self.counts, before], device=self.device)
            widest = max((end - start for start, end in zip(starts, ends, strict=True)), default=0)
            self._placed[numel] = table, widest
        return self._placed[numel]

    @cached_property
    def _placed(self) -> dict[int, tuple[Tensor, int]]:
        return {}

    @cached_property
    def by_width(self) -> list[tuple[Tensor, Tensor, int]]:
        """Chunks of about one width: the blocks of each, filled up with -1, its count, and the largest count."""
        by_width: dict[int, list[tuple[int, int, int]]] = {}
        for (start, stop), count in zip(self.spans, self.counts, strict=True):
            blocks = -(-(stop - start) // BLOCK)
            by_width.setdefault(1 << (blocks - 1).bit_length(), []).append((start // BLOCK, blocks, count))
        groups = []
        for width, members in by_width.items():
            first, blocks, count = torch.tensor(members, device=self.device).T.unsqueeze(2)
            place = torch.arange(width, device=self.device)
            groups.append((torch.where(place < blocks, first + place, -1), count, int(count.max())))
        return groups


def select_chunks(flat: Tensor, chunks: Chunks) -> tuple[Tensor, Tensor]:
    """Return positions (int64, ascending) and values of each chunk's largest magnitudes in `flat`, with zero gaps.

    Of equal magnitudes those that come first are taken. NaN counts as largest.
    """
    sizes = bits_of(flat) & torch.iinfo(bits_of(flat).dtype).max
    padded = torch.nn.functional.pad(sizes, (0, BLOCK), value=-1).view(-1, BLOCK)  # by a block that is never chosen
    chosen = []
    for blocks, count, most in chunks.by_width:
        rows = padded[blocks].flatten(1)
        if flat.element_size() == 8:
            columns = rows.sort(descending=True, stable=True).indices[:, :most]
        else:  # several times faster, once no two are equal
            later = torch.arange(rows.shape[1], device=flat.device)
            columns = (rows.long() * rows.shape[1] - later).topk(most).indices
        positions = blocks.gather(1, columns // BLOCK) * BLOCK + columns % BLOCK
        chosen.append(positions[torch.arange(most, device=flat.device) < count])
    positions = torch.cat(chosen).sort().values
    return positions, flat.index_select(0, positions)


def add_and_select_chunks(g: Tensor, e: Tensor, decay: float, out: Tensor, chunks: Chunks) -> tuple[Tensor, Tensor]:
    """Write g + decay * e to `out`, of the dtype of e, all of which lies in chunks or gaps; and select from that."""
    return select_chunks(torch.add(g, e, alpha=decay, out=out), chunks)
