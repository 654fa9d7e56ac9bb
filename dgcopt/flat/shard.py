"""One rank's share of a flat tensor: one of every `size` neighbours, so that no region, row or column crowds a rank."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from ..kernels import BLOCK, owner_of, position_of

__all__ = ["Chunks", "Shard", "Sharding"]


@dataclass(frozen=True)
class Sharding:
    """Who of `size` ranks owns which of `numel` coordinates.

    Each row of `size` neighbours has one coordinate for every rank. Who has which is rotated from row to row by a hash
    of the row, as elements of one column of a matrix would else have one owner where `size` divides its width. A
    coordinate's place within its owner's share is its row: so places ascend as positions do.
    """

    numel: int
    size: int

    @property
    def length(self) -> int:
        """Places in each rank's share, a multiple of 64; of the last ones some lie beyond `numel`."""
        return -(-self.numel // (self.size * BLOCK)) * BLOCK

    def owners(self, positions: Tensor) -> Tensor:
        """The rank that owns each position."""
        return owner_of(positions, self.size)

    def places(self, positions: Tensor) -> Tensor:
        """Where each position lies in its owner's share."""
        return positions // self.size

    def positions(self, places: Tensor, owner: int | Tensor) -> Tensor:
        """The positions of places in the share of one rank, or of a rank each."""
        return position_of(places, owner, self.size)

    def within(self, span: slice, owner: int) -> Tensor:
        """The positions of a span that a rank owns."""
        positions = self.positions(torch.arange(span.start // self.size, -(-span.stop // self.size)), owner)
        return positions[(positions >= span.start) & (positions < span.stop)]


@dataclass(frozen=True)
class Chunks(Sharding):
    """The same, but a rank owns one stretch of neighbours: for what travels whole, and crowds nobody."""

    def owners(self, positions: Tensor) -> Tensor:
        return positions // self.length

    def places(self, positions: Tensor) -> Tensor:
        return positions % self.length

    def positions(self, places: Tensor, owner: int | Tensor) -> Tensor:
        return places + self.length * owner

    def within(self, span: slice, owner: int) -> Tensor:
        start, stop = max(span.start, owner * self.length), min(span.stop, (owner + 1) * self.length)
        return torch.arange(start, max(start, stop))


class Shard:
    """What one rank holds of a flat tensor: the coordinates that it owns; all others are zero.

    It is read and written by slices of the flat tensor, of which it has some coordinates.

    Attributes: `sharding`; `owner`, the rank; `held`, its coordinates by place, `[sharding.length]`.
    """

    def __init__(self, sharding: Sharding, owner: int, held: Tensor) -> None:
        self.sharding = sharding
        self.owner = owner
        self.held = held

    @staticmethod
    def taken_from(flat: Tensor, sharding: Sharding, owner: int) -> Shard:
        """A rank's coordinates of a flat tensor, in which they become zero."""
        shard = Shard(sharding, owner, flat.new_zeros(sharding.length))
        span = slice(0, sharding.numel)
        shard[span] = flat[shard._positions(span)]
        flat[shard._positions(span)] = 0
        return shard

    def whole(self) -> Tensor:
        """The flat tensor."""
        flat = self.held.new_zeros(self.sharding.numel)
        span = slice(0, self.sharding.numel)
        flat[self._positions(span)] = self[span]
        return flat

    def __getitem__(self, span: slice) -> Tensor:
        return self.held[self.sharding.places(self._positions(span))]

    def __setitem__(self, span: slice, values: Tensor) -> None:
        self.held[self.sharding.places(self._positions(span))] = values

    def _positions(self, span: slice) -> Tensor:
        """Which positions of a span are owned."""
        return self.sharding.within(span, self.owner).to(self.held.device)
