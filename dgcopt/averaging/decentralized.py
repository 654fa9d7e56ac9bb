"""Bagua's decentralized SGD, in full precision and in 8 bits."""

from __future__ import annotations

from collections.abc import Generator
from typing import Literal

from torch import Tensor

from ..coding.minmax import MinMaxUInt8
from ..collectives import Collective, Exchange, SendRecv
from ..compressors.quantised.bytegrad import chunk_length, into_chunks, out_of_chunks
from ..errors import ConfigError
from ..errors.checks import check_flag, check_whole
from .base import Averaging
from .graphs import ShiftOne, mix
from .weights import Weights, between_machines, mean

__all__ = ["Decentralized", "LowPrecisionDecentralized"]


class Decentralized(Averaging):
    """Mixes weights during forward and backward; the gradient is then applied to the mixed weights.

        x_i <- mix(x)_i - step(g(x_i))        every H steps, else  x_i <- x_i - step(g(x_i))

    The exchange runs during forward and backward. After the last step ranks differ at least by that step; call
    `optimizer.averaging.average()` to end training with the mean. Other graphs: `SGP(graph, overlap=True)`.

    Args:
        peers: "all" for the mean over ranks; "shift_one" for the mean of a pair, a different one each round
            (`ShiftOne`), which waits for one peer only and sends half the bytes, but lets ranks drift further apart.
        every: H, steps between exchanges, 1 by default. Larger sends less and lets ranks drift further apart.
        hierarchical: average inside each machine; its first rank takes part in the exchange and broadcasts the result.
            Each machine has the same weight. For several ranks per machine and slow links between machines.
        warmup_steps: number of first steps in which gradients are averaged instead.

    Costs an allreduce of the weights every H steps, or with "shift_one" the weights once; with `hierarchical`, the same
    between machines plus an allreduce and a broadcast inside each. Raises ConfigError for other `peers` and an `every`
    below 1. Sources: `DecentralizedAlgorithm` of BaguaSys/bagua; Lian et al., "Can Decentralized Algorithms
    Outperform Centralized Algorithms?", NeurIPS 2017. Unlike Bagua's, it is not hierarchical by default, skips
    the exchange before the first step, when all weights are equal, and supports odd numbers of ranks or machines with
    "shift_one". Inside `dgcopt.join` nothing overlaps; ranks without data contribute their current weights, except to a
    flat mean over all ranks.
    """

    overlap = True

    def __init__(
        self,
        peers: Literal["all", "shift_one"] = "all",
        every: int = 1,
        hierarchical: bool = False,
        warmup_steps: int = 0,
    ) -> None:
        if peers not in ("all", "shift_one"):
            raise ConfigError(f'peers must be "all" or "shift_one", not {peers!r}')
        self.peers = peers
        self.every = check_whole(every, "every", 1)
        self.hierarchical = check_flag(hierarchical, "hierarchical")
        self.warmup_steps = check_whole(warmup_steps, "warmup_steps", 0)

    @property
    def meets(self) -> bool:  # type: ignore[override]
        return self.peers == "all"

    @property
    def in_turn(self) -> bool:  # type: ignore[override]
        return self.hierarchical

    def arrives_alike(self, step: int) -> bool:
        return self.meets and not self.hierarchical

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
    """Exchanges quantised weight differences around a ring, one byte per coordinate.

    Each rank keeps w, its neighbours' replica of its weights, and L and R, its replicas of its neighbours' weights:

        d = x + L/3 + R/3 - 5/3 w             x: the weights after the optimizer's step
        q = quantise(d), to both neighbours   MinMaxUInt8, one range for the bucket
        x <- w + back(q);  w <- x;  L <- L + back(q of the left);  R <- R + back(q of the right)

    Without steps and rounding every rank becomes the mean of itself and its neighbours. A rank's w equals its left
    neighbour's R and its right neighbour's L bit for bit. The rounding error, up to 1/510 of the range of d, is lost,
    but replicas never drift apart. With two ranks, each gives the other a weight of 2/3 and itself 1/3. A single rank's
    steps are rounded too.

    Args:
        every: steps between exchanges, 1 by default; the first exchange follows the first step. Larger sends less and
            lets ranks drift further apart.
        hierarchical: average inside each machine; its first rank takes part in the exchange and broadcasts the result.
            Each machine has the same weight. For several ranks per machine and slow links between machines.
        warmup_steps: number of first steps in which gradients are averaged instead.

    Costs 1 byte per coordinate and 8 per bucket to each neighbour; memory of three times the weights (float32 at
    least). Checkpoints hold w; L and R are fetched in the first exchange and in the first after a restart, at 4 bytes
    per coordinate to each neighbour. Raises ConfigError for an `every` below 1; PayloadError for a damaged message.
    Source: `LowPrecisionDecentralizedAlgorithm` of BaguaSys/bagua, after Tang et al., "Communication Compression for
    Decentralized Training", NeurIPS 2018. Unlike Bagua's, it excludes gaps between parameters from the range, and
    is not hierarchical by default. Ranks without data (`dgcopt.join`) contribute their current weights.
    """

    meets = False

    def __init__(
        self,
        every: int = 1,
        hierarchical: bool = False,
        warmup_steps: int = 0,
    ) -> None:
        self.every = check_whole(every, "every", 1)
        self.hierarchical = check_flag(hierarchical, "hierarchical")
        self.warmup_steps = check_whole(warmup_steps, "warmup_steps", 0)

    @property
    def in_turn(self) -> bool:  # type: ignore[override]
        return self.hierarchical

    def due(self, step: int) -> bool:
        return (step - 1) % self.every == 0

    def start(self, x: Tensor, ctx: Weights) -> None:
        if "own" not in ctx.memory:
            ctx.memory.hold("own").copy_(x)

    def exchange(self, x: Tensor, ctx: Weights) -> Exchange:
        w = ctx.memory.hold("own")
        x = x.to(w.dtype)
        new = yield from between_machines(x, ctx, self._ring) if self.hierarchical else self._ring(x, ctx)
        # on all ranks of a machine, since any may be its first after a restart
        ctx.memory.on_commit(lambda: w.copy_(new))
        return new

    def _ring(self, x: Tensor, ctx: Weights) -> Exchange:
        w, one = ctx.memory.hold("own"), ctx.placed(size=1)  # in one chunk
        held = ctx.scratch.get("replicas")
        if held is None:
            fetched = yield from with_neighbours(w, ctx)
            held = [tensor.clone() for tensor in fetched]
            ctx.memory.on_commit(lambda: ctx.scratch.update(replicas=held))
        left, right = held
        code = MinMaxUInt8(chunk_length(one))
        q = code.encode(into_chunks((x - w) + (left + right - 2 * w) / 3, one))[0]
        of_left, of_right = yield from with_neighbours(q, ctx)

        def back(message: Tensor, rank: int) -> Tensor:
            return out_of_chunks(code.decode(message.unsqueeze(0), [rank % ctx.size]), one)

        left_moved, right_moved = back(of_left, ctx.rank - 1), back(of_right, ctx.rank + 1)
        ctx.memory.on_commit(lambda: left.add_(left_moved))
        ctx.memory.on_commit(lambda: right.add_(right_moved))
        new = w + back(q, ctx.rank)
        if "replicas" not in ctx.scratch:
            new[:1] += 0 * (left.sum() + right.sum())  # NaN or Inf that was fetched, of which q shows nothing
        return new


def with_neighbours(tensor: Tensor, ctx: Weights) -> Generator[Collective, Tensor, tuple[Tensor, Tensor]]:
    """Exchange `tensor` with both neighbours in the ring; return the left and the right neighbour's."""
    left, right = (ctx.rank - 1) % ctx.size, (ctx.rank + 1) % ctx.size
    if ctx.size == 1:
        return tensor, tensor
    of_left = yield SendRecv(tensor.clone(), to=right, source=left)
    if left == right:
        return of_left, of_left
    return of_left, (yield SendRecv(tensor.clone(), to=left, source=right))
