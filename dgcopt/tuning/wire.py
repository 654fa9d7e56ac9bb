"""Seconds of a collective: an alpha-beta model of each kind, from two numbers of a link or fitted to measurements."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal, Protocol, TypeAlias

from ..errors import ConfigError
from ..errors.checks import check_positive, check_whole

__all__ = [
    "HALF",
    "KINDS",
    "Cost",
    "Fit",
    "Fitted",
    "Network",
    "Wire",
    "fit",
    "hops",
    "wire_bytes",
]

HALF = "AllReduce bfloat16"
"""An allreduce of 16-bit numbers, whose sums cost a processor more per byte than those of 32-bit ones."""

KINDS = ("AllReduce", HALF, "AllGather", "ReduceScatter", "AllToAll", "Broadcast", "SendRecv")
"""The kinds of collectives that have a cost, by the names of their classes."""

Algorithm: TypeAlias = Literal["ring", "tree"]

DIRECT = 2**20
"""Bytes up to which a rank sends an allgather to all others at once; see `comm/torch.py`."""


@dataclass(frozen=True)
class Cost:
    """Seconds of one collective: `latency` runs beside other collectives, `transfer` occupies the link."""

    latency: float
    transfer: float

    @property
    def seconds(self) -> float:
        return self.latency + self.transfer


class Wire(Protocol):
    """Cost of collectives."""

    def cost(self, kind: str, nbytes: float, size: int, group: str = "world") -> Cost:
        """Return the cost of one collective of `nbytes` per rank among the `size` ranks of a group."""


def hops(kind: str, nbytes: float, size: int, algorithm: Algorithm = "ring") -> int:
    """Return the number of messages of a collective of which each waits for the one before.

    "ring": as Gloo, and NCCL for large messages: N - 1 for each direction of an allreduce. "tree": as NCCL for small
    ones, logarithmic in N. A small allgather goes to all ranks at once with either.
    """
    if size == 1:
        return 0
    depth = math.ceil(math.log2(size))
    if kind in ("AllReduce", HALF):
        return 2 * (size - 1) if algorithm == "ring" else 2 * depth
    if kind == "AllGather":
        if nbytes * (size - 1) <= DIRECT:
            return 1
        return size - 1 if algorithm == "ring" else depth
    if kind == "Broadcast":
        return depth
    return 1  # AllToAll and SendRecv send directly; ReduceScatter is an alltoall where the library lacks it


def wire_bytes(kind: str, nbytes: float, size: int) -> float:
    """Return the bytes that cross the busiest rank's link for a collective of `nbytes` per rank."""
    if kind in ("AllReduce", HALF):
        return 2 * nbytes * (size - 1) / size
    if kind == "AllGather":
        return nbytes * (size - 1)
    if kind in ("ReduceScatter", "AllToAll"):
        return nbytes * (size - 1) / size
    if kind == "Broadcast":
        return nbytes * math.ceil(math.log2(size)) if size > 1 else 0.0
    return nbytes if size > 1 else 0.0


@dataclass(frozen=True)
class Network:
    """A wire on paper: links of one latency and bandwidth between machines, and others within a machine.

    Args:
        latency: seconds of the smallest message from one machine to another.
        bandwidth: bytes per second of a machine's link, in each direction.
        local_size: ranks of a machine, which share its link.
        node_latency, node_bandwidth: the same between two ranks of a machine.
        algorithm: "ring", as Gloo; "tree" takes for each collective the faster of ring and tree, as NCCL.
    """

    latency: float
    bandwidth: float
    local_size: int = 1
    node_latency: float = 1e-5
    node_bandwidth: float = 50e9
    algorithm: Algorithm = "ring"

    def __post_init__(self) -> None:
        for name in ("bandwidth", "node_bandwidth"):
            check_positive(getattr(self, name), name)
        check_whole(self.local_size, "local_size", 1)
        if min(self.latency, self.node_latency) < 0:
            raise ConfigError(f"latency must be zero or more seconds, not {min(self.latency, self.node_latency)!r}")

    def cost(self, kind: str, nbytes: float, size: int, group: str = "world") -> Cost:
        inside = group == "node" or (size <= self.local_size and group != "across")
        latency, bandwidth = (self.node_latency, self.node_bandwidth) if inside else (self.latency, self.bandwidth)
        sharing = self._sharing(kind, nbytes, size) if group == "world" and not inside else 1
        transfer = sharing * wire_bytes(kind, nbytes, size) / bandwidth
        ring = Cost(latency * hops(kind, nbytes, size), transfer)
        if self.algorithm == "ring":
            return ring
        # every rank of a tree forwards the whole message, up and down
        doubled = 2 * nbytes / bandwidth * sharing if kind in ("AllReduce", HALF) and size > 1 else transfer
        tree = Cost(latency * hops(kind, nbytes, size, "tree"), doubled)
        return min(ring, tree, key=lambda cost: cost.seconds)

    def _sharing(self, kind: str, nbytes: float, size: int) -> float:
        """Return the bytes on a machine's link over those of its busiest rank."""
        if kind not in ("AllGather", "AllToAll", "ReduceScatter") or hops(kind, nbytes, size) > 1:
            return 1  # a ring or tree leaves a machine once
        return self.local_size * (size - self.local_size) / max(1, size - 1)


@dataclass(frozen=True)
class Fit:
    """Alpha-beta model of one collective in one group: `alpha + beta * nbytes` seconds.

    Attributes:
        sizes, seconds: the measurements.
        size: ranks of the group.
    """

    alpha: float
    beta: float
    size: int
    sizes: tuple[float, ...] = ()
    seconds: tuple[float, ...] = ()

    def cost(self, nbytes: float, most: float = math.inf) -> Cost:
        """Return the cost of a message: interpolated between measurements, beyond them along the line through the first
        and the last, as the fit weighs small messages like large ones, but by at most `most` seconds per byte.
        """
        total = self.alpha + self.beta * nbytes
        if self.sizes and nbytes <= self.sizes[0]:
            total = self.seconds[0]
        elif self.sizes and nbytes <= self.sizes[-1]:
            above = next(i for i, size in enumerate(self.sizes) if nbytes <= size)
            (x0, x1), (y0, y1) = self.sizes[above - 1 : above + 1], self.seconds[above - 1 : above + 1]
            total = y0 + (y1 - y0) * (nbytes - x0) / (x1 - x0)
        elif self.sizes:
            slope = self.beta
            if len(self.sizes) > 1:
                slope = max(0.0, self.seconds[-1] - self.seconds[0]) / (self.sizes[-1] - self.sizes[0])
            total = self.seconds[-1] + min(slope, most) * (nbytes - self.sizes[-1])
        latency = min(self.alpha, total)
        return Cost(latency, total - latency)


def fit(nbytes: Sequence[float], seconds: Sequence[float], size: int) -> Fit:
    """Fit `alpha + beta * nbytes` by least squares of relative errors, so that small messages count like large ones.

    Neither number is negative. Raises ConfigError for fewer than two sizes, and for seconds that are not positive.
    """
    if len(nbytes) != len(seconds) or len({*nbytes}) < 2:
        raise ConfigError(f"an alpha-beta fit needs measurements of two or more sizes, not {[*nbytes]}")
    if not all(0 < second < math.inf for second in seconds):
        raise ConfigError(f"measured seconds must be positive, not {[*seconds]}")
    weights = [1 / second**2 for second in seconds]
    total = sum(weights)
    mean_x = sum(w * x for w, x in zip(weights, nbytes, strict=True)) / total
    mean_y = sum(w * y for w, y in zip(weights, seconds, strict=True)) / total
    spread = sum(w * (x - mean_x) ** 2 for w, x in zip(weights, nbytes, strict=True))
    shared = sum(w * (x - mean_x) * (y - mean_y) for w, x, y in zip(weights, nbytes, seconds, strict=True))
    beta = max(shared / spread, 0.0)
    alpha = mean_y - beta * mean_x
    if alpha < 0:  # the best line through the origin
        squares = sum(w * x * x for w, x in zip(weights, nbytes, strict=True))
        products = sum(w * x * y for w, x, y in zip(weights, nbytes, seconds, strict=True))
        alpha, beta = 0.0, products / squares
    pairs = sorted(zip(nbytes, seconds, strict=True))
    return Fit(alpha, beta, size, tuple(x for x, _ in pairs), tuple(y for _, y in pairs))


PIPELINED = ("AllReduce", HALF, "Broadcast", "SendRecv")
"""Collectives that reach a link's full rate with large messages; Gloo's alltoall, and all made of it, do not."""


@dataclass(frozen=True)
class Fitted:
    """A wire as `dgcopt probe` has measured it, by kind and group; among other numbers of ranks it is extrapolated."""

    fits: Mapping[tuple[str, str], Fit] = field(default_factory=dict)

    def cost(self, kind: str, nbytes: float, size: int, group: str = "world") -> Cost:
        """As `Wire.cost`. Among other ranks than measured, latency grows with the hops, transfer with the bytes.

        Messages of a ring that are larger than measured add bytes at the fastest rate that any collective of the
        group has reached: the wait between two hops is shorter than their transfer then.

        Raises ConfigError for a collective that was not measured.
        """
        if size == 1:
            return Cost(0.0, 0.0)
        place = group if (kind, group) in self.fits else "world"
        known = self.fits.get((kind, place))
        if known is None:
            raise ConfigError(f"no measurement of {kind} in group {group!r}: `dgcopt probe` measures all collectives")
        most = math.inf
        if kind in PIPELINED and known.sizes:
            most = wire_bytes(kind, 1, known.size) / self.fastest(place)
        measured = known.cost(nbytes, most)
        if size == known.size:
            return measured
        longer = hops(kind, nbytes, size) / max(1, hops(kind, nbytes, known.size))
        more = wire_bytes(kind, nbytes, size) / wire_bytes(kind, nbytes, known.size) if nbytes else 1.0
        return Cost(measured.latency * longer, measured.transfer * more)

    def fastest(self, group: str) -> float:
        """Return the most bytes per second that a rank has sent in the largest message of any collective of a group."""
        return max(
            wire_bytes(kind, one.sizes[-1], one.size) / one.seconds[-1]
            for (kind, place), one in self.fits.items()
            if place == group and one.sizes
        )
