"""Bagua's decentralized SGD, in full precision and in 8 bits."""

from __future__ import annotations

from collections.abc import Generator
from dataclasses import replace
from typing import Literal

from torch import Tensor

from ..checks import check_flag, check_period, check_whole
from ..coding.minmax import MinMaxUInt8
from ..collectives import Collective, Exchange, SendRecv
from ..compressors.bytegrad import chunk_length, into_chunks, out_of_chunks
from ..errors import ConfigError
from .base import Averaging
from .graphs import ShiftOne, mix
from .weights import Weights, between_machines, mean

__all__ = ["Decentralized", "LowPrecisionDecentralized"]


class Decentralized(Averaging):
    """Weights are mixed while the gradient is computed, which is then applied to what came of it.

        x_i <- mix(x)_i - step(g(x_i))        every H steps, else  x_i <- x_i - step(g(x_i))

    The exchange goes on during forward and backward pass. After the last step ranks differ by that step at least;
    `optimizer.averaging.average()` ends training with the mean. Other graphs: `SGP(graph, overlap=True)`.

    Args:
        peers: "all", the mean over ranks; or "shift_one", the mean of a pair, always another one (`ShiftOne`), which
            waits for one peer only and sends half as much, while ranks drift further apart.
        every: H, steps between exchanges, 1 by default. Larger sends less, and ranks drift further apart.
        hierarchical: ranks of one machine average, its first rank takes part for them all, and broadcasts the result.
            A machine counts once, whatever its number of ranks. For several ranks on a machine and slow links between.
        warmup_steps: for so many steps gradients are averaged instead.
        interval: an older name of `every`, as Bagua's communication_interval.

    Costs an allreduce of the weights every H steps, or with "shift_one" the weights once; `hierarchical`
    costs that between machines, an allreduce and a broadcast within each. Raises ConfigError for other `peers` and an
    `every` below 1. Sources: `DecentralizedAlgorithm` of BaguaSys/bagua; Lian et al., "Can Decentralized Algorithms
    Outperform Centralized Algorithms?", NeurIPS 2017. Unlike Bagua's, it is not hierarchical by default, does not
    exchange before the very first step, when all weights are equal, and with "shift_one" takes odd numbers of ranks or
    machines. Within `dgcopt.join` nothing overlaps; ranks that have run out of data count with the weights that they
    have, but in a flat mean over all ranks not at all.
    """

    overlap = True

    def __init__(
        self,
        peers: Literal["all", "shift_one"] = "all",
        every: int | None = None,
        hierarchical: bool = False,
        warmup_steps: int = 0,
        *,
        interval: int | None = None,
    ) -> None:
        if peers not in ("all", "shift_one"):
            raise ConfigError(f'peers must be "all" or "shift_one", not {peers!r}')
        self.peers = peers
        self.every = check_period(every, 1, interval=interval)
        self.hierarchical = check_flag(hierarchical, "hierarchical")
        self.warmup_steps = check_whole(warmup_steps, "warmup_steps", 0)

    @property
    def meets(self) -> bool:  # type: ignore[override]
        return self.peers == "all"

    @property
    def in_turn(self) -> bool:  # type: ignore[override]
        return self.hierarchical

    def due(self, step: int) -> bool:
        return step % self.every == 0

    def exchange(self, x: Tensor, ctx: Weights) -> Exchange:
        if self.hierarchical:
            return (yield from between_machines(x, ctx, self._mix))
        return (yield from self._mix(x, ctx))

    def _mix(self, x: Tensor, ctx: Weights) -> Exchange:
        if self.peers == "all":
            return (yield from mean(x, ctx))
        return (yield from mix(x, ShiftOne(), ctx, ctx.step // self.every))


class LowPrecisionDecentralized(Averaging):
    """A ring in which differences travel, a byte per coordinate.

    Each rank keeps what its neighbours know of its weights, w, and what it knows of theirs, L and R:

        d = x + L/3 + R/3 - 5/3 w             x: the weights after the optimizer's step
        q = quantise(d), to both neighbours   MinMaxUInt8, one range for the bucket
        x <- w + back(q);  w <- x;  L <- L + back(q of the left);  R <- R + back(q of the right)

    So without steps and rounding every rank becomes the mean of itself and its neighbours. A rank's w is its left
    neighbour's R and its right neighbour's L, to the bit. What rounding loses, up to 1/510 of the range of d, is
    dropped, but replicas never drift apart. Of two ranks, each weighs the other 2/3 and itself 1/3. A single rank's
    steps are rounded too.

    Args:
        every: steps between exchanges, 1 by default, the first of which follows the first step. Larger sends less, and
            ranks drift further apart.
        hierarchical: ranks of one machine average, its first rank takes part for them all, and broadcasts the result.
            A machine counts once, whatever its number of ranks. For several ranks on a machine and slow links between.
        warmup_steps: for so many steps gradients are averaged instead.
        interval: an older name of `every`, as Bagua's communication_interval.

    Costs 1 byte per coordinate to each neighbour, and 8 per bucket; three times the weights in memory (float32 at
    least). w is in checkpoints; L and R are fetched in the first exchange, and in that after a restart: 4 bytes per
    coordinate to each neighbour. Raises ConfigError for an `every` below 1; PayloadError for a damaged message.
    Source: `LowPrecisionDecentralizedAlgorithm` of BaguaSys/bagua, after Tang et al., "Communication Compression for
    Decentralized Training", NeurIPS 2018. Unlike Bagua's, it leaves gaps between parameters out of the range, and is
    not hierarchical by default. When ranks have run out of data (`dgcopt.join`), they count with the weights that they
    have.
    """

    meets = False

    def __init__(
        self,
        every: int | None = None,
        hierarchical: bool = False,
        warmup_steps: int = 0,
        *,
        interval: int | None = None,
    ) -> None:
        self.every = check_period(every, 1, interval=interval)
        self.hierarchical = check_flag(hierarchical, "hierarchical")
        self.warmup_steps = check_whole(warmup_steps, "warmup_steps", 0)

    @property
    def in_turn(self) -> bool:  # type: ignore[override]
        return self.hierarchical

    def due(self, step: int) -> bool:
        return (step - 1) % self.every == 0

    def start(self, x: Tensor, ctx: Weights) -> None:
        if "own" not in ctx.memory:
            ctx.hold("own").copy_(x)

    def exchange(self, x: Tensor, ctx: Weights) -> Exchange:
        w = ctx.hold("own")
        x = x.to(w.dtype)
        new = yield from between_machines(x, ctx, self._ring) if self.hierarchical else self._ring(x, ctx)
        ctx.once_settled(lambda: w.copy_(new))  # on all ranks of a machine: any may be its first after a restart
        return new

    def _ring(self, x: Tensor, ctx: Weights) -> Exchange:
        w, one = ctx.hold("own"), replace(ctx, size=1)  # in one chunk
        if "replicas" not in ctx.scratch:
            fetched = yield from with_neighbours(w, ctx)
            ctx.scratch["replicas"] = [tensor.clone() for tensor in fetched]
        left, right = ctx.scratch["replicas"]
        code = MinMaxUInt8(chunk_length(one))
        q = code.encode(into_chunks((x - w) + (left + right - 2 * w) / 3, one))[0]
        of_left, of_right = yield from with_neighbours(q, ctx)

        def back(message: Tensor, rank: int) -> Tensor:
            return out_of_chunks(code.decode(message.unsqueeze(0), [rank % ctx.size]), one)

        left_moved, right_moved = back(of_left, ctx.rank - 1), back(of_right, ctx.rank + 1)
        ctx.once_settled(lambda: left.add_(left_moved))
        ctx.once_settled(lambda: right.add_(right_moved))
        return w + back(q, ctx.rank)


def with_neighbours(tensor: Tensor, ctx: Weights) -> Generator[Collective, Tensor, tuple[Tensor, Tensor]]:
    """What the left and the right neighbour in the ring give for `tensor`, which stays as it is."""
    left, right = (ctx.rank - 1) % ctx.size, (ctx.rank + 1) % ctx.size
    if ctx.size == 1:
        return tensor, tensor
    of_left = yield SendRecv(tensor.clone(), to=right, source=left)
    if left == right:
        return of_left, of_left
    return of_left, (yield SendRecv(tensor.clone(), to=left, source=right))
