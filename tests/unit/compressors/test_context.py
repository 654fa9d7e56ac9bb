"""The second argument of a compressor."""

from __future__ import annotations

import torch

from dgcopt.collectives import Rank
from dgcopt.compressors.context import Context, Place
from dgcopt.flat.memory import Memory


def of(rank: int) -> Context:
    return Context(Place(rank, 2, "average", 5, None, [], index=3), Memory([]))


def test_random_numbers_do_not_depend_on_the_names_of_ranks() -> None:
    """Messages name ranks of a replicate group by their number among all ranks; they draw as ranks of any group do."""
    named = Rank.of_group(["2 (replica 0)", "3 (replica 1)"])
    assert [of(rank).key(7) for rank in named] == [of(0).key(7), of(1).key(7)]
    drawn = [torch.rand(3, generator=of(rank).generator(7, own=True)) for rank in (named[1], 1, 0)]
    assert drawn[0].equal(drawn[1]) and not drawn[0].equal(drawn[2])
