"""Communication graphs for gossip, and one round over them.

A round multiplies the vector of all ranks' weights by a matrix whose columns add up to 1: x_j <- sum_i p_ji x_i. If its
rows add up to 1 too, the round is balanced and preserves the mean over ranks.
"""

from __future__ import annotations

import math
from collections.abc import Hashable
from dataclasses import dataclass
from functools import lru_cache
from numbers import Integral

import torch
from torch import Tensor

from ..collectives import Exchange, SendRecv
from ..errors import ConfigError
from ..errors.checks import check_flag, check_settings, check_whole, is_number
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
    """The share of its weights that each rank sends to each peer; it keeps the rest. A user-defined graph:

        @dataclass(frozen=True)
        class Star(Graph):
            def shares(self, rank, size, round):
                return {0: 0.5} if rank else dict.fromkeys(range(1, size), 0.5 / (size - 1))

    All ranks must compute the same shares from the arguments and the settings alone. A frozen dataclass is compared
    over ranks by its settings, and its edges are computed once and cached.
    """

    def shares(self, rank: int, size: int, round: int) -> dict[int, float]:
        """Return the fraction of its weights that `rank` of `size` >= 2 sends to each peer; `round` is 0 .. period - 1.

        The fractions must add up to less than 1, and over one period every rank must reach every other, also
        indirectly.
        """
        raise NotImplementedError(f"{type(self).__name__} must define shares()")

    def period(self, size: int) -> int:
        """Return the number of rounds after which the graph repeats."""
        return 1

    def check(self, size: int) -> None:
        """Raise ConfigError if the graph does not exist for `size` ranks; the error names an alternative."""


@dataclass(frozen=True)
class Exponential(Graph):
    """Directed exponential graph: messages go 1, 2, 4, ... ranks ahead, one distance per round. Balanced.

    With p `peers`, round i sends to the ranks 1, 2, ..., p times (p + 1)^i ahead, as far as these are below N. A rank
    keeps as much as it sends to each peer. If N is a power of p + 1, all ranks hold the mean after log(N) / log(p + 1)
    rounds without steps in between. Source: Assran et al., ICML 2019, section 5 and appendix A.

    Args:
        peers: messages per rank and round. Bytes grow in proportion, and ranks stay closer together.
    """

    peers: int = 1

    def __post_init__(self) -> None:
        check_whole(self.peers, "peers", 1)
        check_settings(self)

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
    """A third of the weights to both neighbours; half between two ranks. Balanced; distant ranks mix slowly.

    Args:
        directed: send half to the right neighbour only: half the bytes, slower mixing.
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
    """Pairs of an even and an odd rank, 1, 3, 5, 9, ..., 1 + 2^i apart, first behind and then ahead, average. Balanced.

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
                f"BipartiteExponential pairs even ranks with odd ranks, and {size} is an odd number of ranks. Use "
                f"Exponential or ShiftOne."
            )

    @staticmethod
    def _hops(size: int) -> list[int]:
        """Return the distances from an even rank to its odd peers, each once."""
        distances = [1] + [1 + 2**i for i in range(1, (size - 1).bit_length())]
        return list(dict.fromkeys(hop % size for distance in distances for hop in (-distance, distance)))


@dataclass(frozen=True)
class ShiftOne(Graph):
    """Bagua's averaging pairs, different ones in every round. Balanced.

    For even N and h = N / 2, in round s rank i < h meets h + (i + s) mod h, so pairs cross the two halves. For odd N,
    which Bagua refuses, i meets j if i + j = s mod N, and the rank with 2 i = s mod N pauses, so all ranks meet.
    Source: `DecentralizedAlgorithm` of BaguaSys/bagua.
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
    """The edges of one round: int64 and float64 tensors of shape `[edges]`.

    An edge carries `share` of the weights of `source` to `target` in the SendRecv number `turn` of `turns`. `kept`,
    `[size]`, is the share that each rank keeps.
    """

    source: Tensor
    target: Tensor
    share: Tensor
    turn: Tensor
    turns: int
    kept: Tensor

    def push(self, w: Tensor) -> Tensor:
        """Apply the round to one number per rank: float64 `[size]`."""
        return (w * self.kept).index_add_(0, self.target, w[self.source] * self.share)


@lru_cache(maxsize=512)
def edges_of(graph: Graph, size: int, round: int) -> Edges:
    """Return the edges of round 0 .. period - 1.

    An edge's turn follows all earlier sends of its source and receives of its target. Pairs, and edges of equal
    distance, share a single turn. Raises ConfigError for invalid shares.
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
    """Make one round, number `round` from 0: x_j <- sum_i p_ji x_i. Does not change `x`.

    Costs each rank one message of the weights per peer, one after another.
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
        if edge is None:  # no send, but all ranks take part with a tensor of the same shape
            arrived = yield SendRecv(torch.empty_like(x), source=source)
        else:
            arrived = yield SendRecv(x * float(edges.share[edge]), to=int(edges.target[edge]), source=source)
        if source is not None:
            mixed += arrived
    return mixed


# -- checks ----------------------------------------------------------------------------------------------------------


def is_balanced(graph: Graph, size: int) -> bool:
    """Return True if every round preserves the mean over ranks.

    Raises ConfigError if the graph does not fit `size` ranks: invalid shares, or ranks that never reach each other in
    one period.
    """
    if not isinstance(graph, Hashable):
        raise ConfigError(f"{graph!r} is mutable, so ranks could disagree. Make it a frozen dataclass.")
    return _is_balanced(graph, size)


@lru_cache(maxsize=64)
def _is_balanced(graph: Graph, size: int) -> bool:
    if size == 1:
        return True
    graph.check(size)
    period = check_whole(graph.period(size), f"the period of {graph!r}", 1)
    rounds = [edges_of(graph, size, round) for round in range(period)]
    source, target = torch.cat([edges.source for edges in rounds]), torch.cat([edges.target for edges in rounds])
    for start, end, fault in (
        (source, target, "never hear of rank 0"),
        (target, source, "are never heard of by rank 0"),
    ):
        if missed := (~_reached(start, end, size)).nonzero().flatten().tolist():
            raise ConfigError(
                f"{graph!r}: rank(s) {', '.join(map(str, missed[:16]))} {fault}, not even indirectly, in all "
                f"{period} round(s) of its period, so ranks would never agree. Connect them."
            )
    ones = torch.ones(size, dtype=torch.float64)
    return all(bool((edges.push(ones) - 1).abs().max() < 1e-9) for edges in rounds)


def _check_shares(graph: Graph, rank: int, size: int, round: int, shares: dict[int, float]) -> None:
    where = f"{graph!r}: in round {round} rank {rank} of {size}"
    for peer, share in shares.items():
        if not is_number(peer, Integral) or not 0 <= peer < size:
            raise ConfigError(f"{where} sends to {peer!r}, which is not a rank from 0 to {size - 1}")
        if peer == rank:
            raise ConfigError(f"{where} sends to itself. Remove that share: a rank keeps the rest by itself.")
        if not is_number(share) or share < 0:
            raise ConfigError(f"{where} sends a share of {share!r} to rank {peer}: shares must be numbers from 0 to 1")
    if math.fsum(shares.values()) > 1 - 1e-9:
        raise ConfigError(
            f"{where} sends shares that add up to {math.fsum(shares.values()):g}. Make the sum less than 1, so that "
            f"the rank keeps a part of its weights."
        )


def _reached(start: Tensor, end: Tensor, size: int) -> Tensor:
    """Return True for each rank that rank 0 reaches along edges from `start` to `end`: bool `[size]`."""
    reached, count = torch.arange(size) == 0, 0
    while count < int(reached.sum()):
        count = int(reached.sum())
        reached[end[reached[start]]] = True
    return reached
