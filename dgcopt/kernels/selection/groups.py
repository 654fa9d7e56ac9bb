"""Number of elements to select from each group of spans, or from each chunk, of a flat tensor."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

from ..blocks import BLOCK

__all__ = ["Chunks", "Groups", "Search", "Searches"]


_TILE = 2048  # elements per program on a GPU


@dataclass(frozen=True)
class Search:
    """A search for the largest elements of each group by kernels on a GPU, in tiles.

    Tensors are int64, on the device.

    Attributes:
        count: number of elements to select in all groups.
        wanted: number of elements to select in each group.
        firsts: first tile of each group, and number of elements selected in the groups before it, `[2, groups]`.
        tiles: group, start and stop of each tile, `[3, tiles]`.
        tile: largest number of elements in a tile.
    """

    count: int
    wanted: Tensor
    firsts: Tensor
    tiles: Tensor
    tile: int

    @staticmethod
    def of(spans: Sequence[tuple[int, int]], counts: Sequence[int], device: torch.device) -> Search:
        """Return the search for `counts` elements of each span."""
        cuts = [[*range(start, stop, _TILE), stop] for start, stop in spans]
        tiles = [(i, *ends) for i, ends_of in enumerate(cuts) for ends in itertools.pairwise(ends_of)]
        firsts = [sum(map(len, cuts[:i])) - i for i in range(len(cuts))]
        before = list(itertools.accumulate(counts, initial=0))[:-1]
        table = torch.tensor(tiles).view(-1, 3).T.contiguous()
        numbers = torch.tensor(counts, device=device), torch.tensor([firsts, before], device=device)
        return Search(sum(counts), *numbers, table.to(device), _TILE)


@dataclass(frozen=True)
class Searches:
    """A search for blocks with selected elements, and one for the elements in them.

    Attributes:
        lengths: number of elements in each block, uint8, on the device.
    """

    lengths: Tensor
    of_blocks: Search
    of_elements: Search


@dataclass(frozen=True, eq=False)
class Groups:
    """Number of elements to select from each group of spans of a flat tensor.

    Args:
        pieces: for each group its spans (start, stop), ascending; each begins on a block boundary, with only zeros
            between them.
        counts: number of elements to select in each group.
        device: the device of the flat tensor.
    """

    pieces: Sequence[Sequence[tuple[int, int]]]
    counts: Sequence[int]
    device: torch.device

    @cached_property
    def spans(self) -> list[tuple[int, int, int]]:
        """Start, stop and count of each group."""
        return [(spans[0][0], spans[-1][1], k) for spans, k in zip(self.pieces, self.counts, strict=True)]

    @cached_property
    def table(self) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """Starts and stops of all pieces, and each group's number of pieces and count: int64, on the CPU."""
        spans = torch.tensor([span for pieces in self.pieces for span in pieces], dtype=torch.int64).view(-1, 2)
        number, counts = [len(pieces) for pieces in self.pieces], list(self.counts)
        return spans[:, 0].contiguous(), spans[:, 1].contiguous(), torch.tensor(number), torch.tensor(counts)

    @property
    def stop(self) -> int:
        """End of the last group."""
        return max((stop for _, stop, _ in self.spans), default=0)

    @cached_property
    def search(self) -> Searches:
        """The searches of kernels on a GPU."""
        lengths = torch.zeros(-(-self.stop // BLOCK), dtype=torch.uint8)
        number = []
        for pieces in self.pieces:
            for start, stop in pieces:
                lengths[start // BLOCK : -(-stop // BLOCK)] = BLOCK
                if stop % BLOCK:
                    lengths[stop // BLOCK] = stop % BLOCK
            number.append(sum(-(-(stop - start) // BLOCK) for start, stop in pieces))
        held = [min(k, n) for k, n in zip(self.counts, number, strict=True)]
        ends = list(itertools.accumulate(held, initial=0))
        blocks = [(start // BLOCK, -(-stop // BLOCK)) for start, stop, _ in self.spans]
        elements = [(first * BLOCK, last * BLOCK) for first, last in itertools.pairwise(ends)]
        return Searches(
            lengths.to(self.device),
            Search.of(blocks, held, self.device),
            Search.of(elements, self.counts, self.device),
        )

    def among(self, blocks: Tensor, numbers: Tensor) -> Groups:
        """Return the groups of a tensor that holds only some blocks of each piece, in order: see `candidate_blocks`."""
        _, stops, _, _ = self.table
        ends, there = numbers.cumsum(0), numbers > 0
        last = blocks[(ends - 1)[there].to(blocks.device)].cpu()
        missing = torch.zeros_like(stops)
        missing[there] = ((last + 1) * BLOCK - stops[there]).clamp(min=0)  # if the last block is not full
        spans = list(zip(((ends - numbers) * BLOCK).tolist(), (ends * BLOCK - missing).tolist(), strict=True))
        cuts = [0, *itertools.accumulate(map(len, self.pieces))]
        return Groups([spans[a:b] for a, b in itertools.pairwise(cuts)], self.counts, self.device)

    @cached_property
    def _blocks(self) -> list[int]:
        return [-(-(stop - start) // BLOCK) for start, stop, _ in self.spans]

    @cached_property
    def wanted(self) -> Tensor:
        """The counts; 0 for groups with no more blocks than elements to select, for which block maxima are no help."""
        counts = [k if k < n else 0 for k, n in zip(self.counts, self._blocks, strict=True)]
        return torch.tensor(counts, device=self.device)

    @cached_property
    def whole(self) -> list[int]:
        """The groups for which block maxima are no help."""
        return [i for i, (k, n) in enumerate(zip(self.counts, self._blocks, strict=True)) if k >= n]

    @cached_property
    def place(self) -> Tensor:
        """The group of each block."""
        places = torch.arange(len(self.spans), dtype=torch.int32, device=self.device)
        return places.repeat_interleave(torch.tensor(self._blocks, device=self.device))


@dataclass(frozen=True, eq=False)
class Chunks:
    """The chunks of a flat tensor, and the number of elements selected from each.

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
        """Number of selected elements."""
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
