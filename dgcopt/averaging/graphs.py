"""Gossip: who sends which part of its weights to whom, and one round of it.

A round multiplies the vector of all ranks' weights by a matrix whose columns add up to 1: x_j <- sum_i p_ji x_i. If its
rows do so too, the round is called balanced here, and the mean over ranks stays what it was.
"""

from __future__ import annotations

import math
from collections.abc import Hashable
from dataclasses import dataclass
from functools import lru_cache

import torch
from torch import Tensor

from ..checks import check_flag, check_whole
from ..collectives import Exchange, SendRecv
from ..errors import ConfigError
from .weights import Weights

__all__ = [
    "BipartiteExponential",
    "Edges",
    "Exponential",
    "Graph",
    "Ring",
    "ShiftOne",
    "edges_of",
    "is_balanced",
    "mix",
]


class Graph:
    """Which share of its weights each rank sends to which others; the rest it keeps. Your own takes a few lines:

        @dataclass(frozen=True)
        class Star(Graph):
            def shares(self, rank, size, round):
                return {0: 0.5} if rank else dict.fromkeys(range(1, size), 0.5 / (size - 1))

    All ranks must derive the same shares, from nothing but the arguments and the settings. As a frozen dataclass, a
    graph is compared over ranks by its settings, and what is derived from it is derived once for all that are equal.
    """

    def shares(self, rank: int, size: int, round: int) -> dict[int, float]:
        """What fraction of its weights `rank` of `size`, two at least, sends to each peer; `round` is 0 .. period - 1.

        They must add up to less than 1, and over a period everyone must hear of everyone, if only by way of others.
        """
        raise NotImplementedError(f"{type(self).__name__} must define shares()")

    def period(self, size: int) -> int:
        """After so many rounds it starts again."""
        return 1

    def check(self, size: int) -> None:
        """Raises ConfigError if the graph does not exist for so many ranks, with what to use instead."""


@dataclass(frozen=True)
class Exponential(Graph):
    """Directed exponential graph: messages go 1, 2, 4, ... ranks ahead, one distance per round. Balanced.

    With p `peers`, round i sends to those 1, 2, ..., p times (p + 1)^i ahead, as far as these are below N. Everyone
    keeps as much as it sends to each. If N is a power of p + 1, all ranks hold the mean after log(N) / log(p + 1)
    rounds without steps in between. Source: Assran et al., ICML 2019, section 5 and appendix A.

    Args:
        peers: messages per rank and round. More cost as much more, and ranks stay closer together.
    """

    peers: int = 1

    def __post_init__(self) -> None:
        check_whole(self.peers, "peers", 1)

    def shares(self, rank: int, size: int, round: int) -> dict[int, float]:
        unit = (self.peers + 1) ** round
        hops = range(unit, size, unit)[: self.peers]
        return dict.fromkeys(((rank + hop) % size for hop in hops), 1 / (len(hops) + 1))

    def period(self, size: int) -> int:
        rounds = 1
        while (self.peers + 1) ** rounds < size:
            rounds += 1
        return rounds


@dataclass(frozen=True)
class Ring(Graph):
    """Both neighbours, a third each; of two ranks each sends half. Balanced; ranks far apart hear of each other late.

    Args:
        directed: half to the right neighbour only: half the bytes, slower to agree.
    """

    directed: bool = False

    def __post_init__(self) -> None:
        check_flag(self.directed, "directed")

    def shares(self, rank: int, size: int, round: int) -> dict[int, float]:
        right, left = (rank + 1) % size, (rank - 1) % size
        peers = {right} if self.directed else {right, left}
        return dict.fromkeys(peers, 1 / (len(peers) + 1))


@dataclass(frozen=True)
class BipartiteExponential(Graph):
    """Even ranks meet odd ones, 1, 3, 5, 9, ..., 1 + 2^i away, first behind and then ahead; pairs average. Balanced.

    For an even number of ranks. Source: `DynamicBipartiteExponentialGraph` of Assran et al.'s code.
    """

    def shares(self, rank: int, size: int, round: int) -> dict[int, float]:
        hop = self._hops(size)[round]
        return {(rank + hop if rank % 2 == 0 else rank - hop) % size: 0.5}

    def period(self, size: int) -> int:
        return len(self._hops(size))

    def check(self, size: int) -> None:
        if size % 2:
            raise ConfigError(
                f"BipartiteExponential pairs even ranks with odd ones, and of {size} ranks one would be left over: use "
                f"Exponential or ShiftOne"
            )

    @staticmethod
    def _hops(size: int) -> list[int]:
        """From an even rank to the odd ones that it meets, each of them once."""
        distances = [1] + [1 + 2**i for i in range(1, (size - 1).bit_length())]
        return list(dict.fromkeys(hop % size for distance in distances for hop in (-distance, distance)))


@dataclass(frozen=True)
class ShiftOne(Graph):
    """Bagua's pairs, which average; in every round other ones. Balanced.

    Of an even number of ranks, h = N / 2, in round s rank i < h meets h + (i + s) mod h, so that pairs cross the two
    halves. Of an odd number, which Bagua refuses, i meets j where i + j = s mod N, and the one with 2 i = s mod N
    sits out; so everyone meets everyone. Source: `DecentralizedAlgorithm` of BaguaSys/bagua.
    """

    def shares(self, rank: int, size: int, round: int) -> dict[int, float]:
        half = size // 2
        if size % 2:
            peer = (round - rank) % size
        else:
            peer = half + (rank + round) % half if rank < half else (rank - half - round) % half
        return {} if peer == rank else {peer: 0.5}

    def period(self, size: int) -> int:
        return size if size % 2 else size // 2


# -- a round ---------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, eq=False)
class Edges:
    """Who sends what to whom in one round, each edge in its turn: int64 and float64 of shape `[edges]`.

    An edge takes `share` of `source`'s weights to `target` in the SendRecv number `turn` of `turns`; `kept`, `[size]`,
    is what each rank keeps.
    """

    source: Tensor
    target: Tensor
    share: Tensor
    turn: Tensor
    turns: int
    kept: Tensor

    def push(self, w: Tensor) -> Tensor:
        """What a number on each rank, `[size]` in float64, becomes."""
        return (w * self.kept).index_add_(0, self.target, w[self.source] * self.share)


@lru_cache(maxsize=512)
def edges_of(graph: Graph, size: int, round: int) -> Edges:
    """The edges of round 0 .. period - 1.

    Raises ConfigError if any rank's shares cannot be. An edge's turn comes after those that its source sends and those
    that its target receives before: pairs, and all that go equally far ahead, take a single one.
    """
    shares = [graph.shares(rank, size, round) for rank in range(size)]
    for rank, of_rank in enumerate(shares):
        _check_shares(graph, rank, size, round, of_rank)
    edges = sorted(
        ((peer - rank) % size, rank, peer, share)
        for rank, of_rank in enumerate(shares)
        for peer, share in of_rank.items()
        if share
    )
    sent, received, turns = [0] * size, [0] * size, []
    for _, source, target, _ in edges:
        turns.append(max(sent[source], received[target]))
        sent[source] = received[target] = turns[-1] + 1
    _, sources, targets, parts = zip(*edges, strict=True) if edges else ((), (), (), ())
    return Edges(
        torch.tensor(sources, dtype=torch.int64),
        torch.tensor(targets, dtype=torch.int64),
        torch.tensor(parts, dtype=torch.float64),
        torch.tensor(turns, dtype=torch.int64),
        max(turns, default=-1) + 1,
        torch.tensor([1 - math.fsum(of_rank.values()) for of_rank in shares], dtype=torch.float64),
    )


def mix(x: Tensor, graph: Graph, ctx: Weights, round: int) -> Exchange:
    """One round, the `round`-th from 0 of all that were made: x_j <- sum_i p_ji x_i. Leaves `x` as it is.

    Costs each rank one message of the weights for every peer that it sends to, one after another.
    """
    if ctx.size == 1:
        return x
    edges = edges_of(graph, ctx.size, round % graph.period(ctx.size))
    outgoing, incoming = (edges.source == ctx.rank).nonzero().flatten(), (edges.target == ctx.rank).nonzero().flatten()
    sends = dict(zip(edges.turn[outgoing].tolist(), outgoing.tolist(), strict=True))
    receives = dict(zip(edges.turn[incoming].tolist(), incoming.tolist(), strict=True))
    mixed = x * float(edges.kept[ctx.rank])
    for turn in range(edges.turns):
        edge, source = sends.get(turn), int(edges.source[receives[turn]]) if turn in receives else None
        if edge is None:  # sends nothing, but all ranks take part with a tensor of one shape
            arrived = yield SendRecv(torch.empty_like(x), source=source)
        else:
            arrived = yield SendRecv(x * float(edges.share[edge]), to=int(edges.target[edge]), source=source)
        if source is not None:
            mixed += arrived
    return mixed


# -- checks ----------------------------------------------------------------------------------------------------------


def is_balanced(graph: Graph, size: int) -> bool:
    """Whether every round leaves the mean over ranks what it was.

    Raises ConfigError for a graph that cannot serve `size` ranks: over one period, shares are looked at, and whether
    everyone hears of everyone.
    """
    if not isinstance(graph, Hashable):
        raise ConfigError(f"{graph!r} can be changed, and ranks would no longer agree: make it a frozen dataclass")
    return _is_balanced(graph, size)


@lru_cache(maxsize=64)
def _is_balanced(graph: Graph, size: int) -> bool:
    if size == 1:
        return True
    graph.check(size)
    period = check_whole(graph.period(size), f"the period of {graph!r}", 1)
    ones, balanced = torch.ones(size, dtype=torch.float64), True
    neighbours: list[set[int]] = [set() for _ in range(size)]
    reverse: list[set[int]] = [set() for _ in range(size)]
    for round in range(period):
        edges = edges_of(graph, size, round)
        balanced = balanced and bool((edges.push(ones) - 1).abs().max() < 1e-9)
        for source, target in zip(edges.source.tolist(), edges.target.tolist(), strict=True):
            neighbours[source].add(target)
            reverse[target].add(source)
    for edges_from, what in ((neighbours, "never hear of rank 0"), (reverse, "are never heard of by rank 0")):
        if missed := sorted(set(range(size)) - _reached(edges_from)):
            raise ConfigError(
                f"{graph!r}: rank(s) {', '.join(map(str, missed[:16]))} {what}, not even by way of others, in all "
                f"{period} round(s) of its period, so ranks would never agree"
            )
    return balanced


def _check_shares(graph: Graph, rank: int, size: int, round: int, shares: dict[int, float]) -> None:
    where = f"{graph!r}: in round {round} rank {rank} of {size}"
    for peer, share in shares.items():
        if isinstance(peer, bool) or not isinstance(peer, int) or not 0 <= peer < size:
            raise ConfigError(f"{where} sends to {peer!r}, which is none of the ranks 0 to {size - 1}")
        if peer == rank:
            raise ConfigError(f"{where} sends to itself: leave that out, as it keeps what it does not send")
        if not isinstance(share, int | float) or not share >= 0:
            raise ConfigError(f"{where} sends a share of {share!r} to rank {peer}: shares are numbers from 0 to 1")
    if math.fsum(shares.values()) > 1 - 1e-9:
        raise ConfigError(
            f"{where} sends shares of {math.fsum(shares.values()):g} in all: make it less than 1, so that it keeps "
            f"a part of its weights"
        )


def _reached(neighbours: list[set[int]]) -> set[int]:
    """All that can be reached from rank 0."""
    reached, ahead = {0}, [0]
    while ahead:
        new = neighbours[ahead.pop()] - reached
        reached |= new
        ahead += new
    return reached
