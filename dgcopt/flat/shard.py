"""Shards of a flat tensor: a rank owns one of every `size` neighbours, so that large values spread over ranks."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from ..kernels import BLOCK, owner_of, position_of

__all__ = ["Chunks", "Shard", "Sharding"]


@dataclass(frozen=True)
class Sharding:
    """The assignment of `numel` coordinates to `size` owners.

    Each row of `size` neighbours has one coordinate for every rank, rotated by a hash of the row; otherwise a matrix
    column would have one owner if `size` divides its width. A coordinate's place in its owner's shard is its row, so
    places ascend as positions do.
    """

    numel: int
    size: int

    @property
    def length(self) -> int:
        """Places in each rank's shard, a multiple of 64; some of the last ones are beyond `numel`."""
        return -(-self.numel // (self.size * BLOCK)) * BLOCK

    def owners(self, positions: Tensor) -> Tensor:
        """Return the owner of each position."""
        return owner_of(positions, self.size)

    def places(self, positions: Tensor) -> Tensor:
        """Return the place of each position in its owner's shard."""
        return positions // self.size

    def positions(self, places: Tensor, owner: int | Tensor) -> Tensor:
        """Return the positions of places in the shards of one owner, or of an owner for each place."""
        return position_of(places, owner, self.size)

    def within(self, span: slice, owner: int) -> Tensor:
        """Return the positions in a span that a rank owns."""
        places = torch.arange(span.start // self.size, -(-span.stop // self.size), device="cpu")
        positions = self.positions(places, owner)
        return positions[(positions >= span.start) & (positions < span.stop)]


@dataclass(frozen=True)
class Chunks(Sharding):
    """The same with one contiguous chunk per rank, for vectors that travel whole."""

    def part(self, owner: int) -> slice:
        """Return the span that a rank owns; empty if there are more ranks than blocks."""
        return slice(min(owner * self.length, self.numel), min((owner + 1) * self.length, self.numel))

    def owners(self, positions: Tensor) -> Tensor:
        return positions // self.length

    def places(self, positions: Tensor) -> Tensor:
        return positions % self.length

    def positions(self, places: Tensor, owner: int | Tensor) -> Tensor:
        return places + self.length * owner

    def within(self, span: slice, owner: int) -> Tensor:
        part = self.part(owner)
        start, stop = max(span.start, part.start), min(span.stop, part.stop)
        return torch.arange(start, max(start, stop), device="cpu")


class Shard:
    """One rank's coordinates of a flat tensor; all others are zero. Read and written by slices of the flat tensor.

    Attributes:
        sharding: division of the flat tensor.
        owner: rank.
        held: coordinates of the owner, `[sharding.length]`.
    """

    def __init__(self, sharding: Sharding, owner: int, held: Tensor) -> None:
        self.sharding = sharding
        self.owner = owner
        self.held = held

    @staticmethod
    def taken_from(flat: Tensor, sharding: Sharding, owner: int) -> Shard:
        """Move a rank's coordinates out of a flat tensor, in which they become zero."""
        shard = Shard(sharding, owner, flat.new_zeros(sharding.length))
        span = slice(0, sharding.numel)
        shard[span] = flat[shard._positions(span)]
        flat[shard._positions(span)] = 0
        return shard

    def whole(self) -> Tensor:
        """Return the flat tensor."""
        flat = self.held.new_zeros(self.sharding.numel)
        span = slice(0, self.sharding.numel)
        flat[self._positions(span)] = self[span]
        return flat

    def __getitem__(self, span: slice) -> Tensor:
        return self.held[self.sharding.places(self._positions(span))]

    def __setitem__(self, span: slice, values: Tensor) -> None:
        self.held[self.sharding.places(self._positions(span))] = values

    def _positions(self, span: slice) -> Tensor:
        """Return the owned positions in a span."""
        return self.sharding.within(span, self.owner).to(self.held.device)
