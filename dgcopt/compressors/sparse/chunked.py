"""Top-k of every chunk (Sarfi et al., "Communication Efficient LLM Pre-training with SparseLoCo", 2025)."""

from __future__ import annotations

from dataclasses import dataclass, field

from torch import Tensor

from ...errors import ConfigError
from ...errors.checks import MAY_BE_INFINITE
from ...kernels import BLOCK, Chunks, add_and_select_chunks, select_chunks
from ..base import Source
from ..context import Context
from ..reduction import Reduce
from .base import Indices, Sparse, Values
from .schedule import ScheduledRatio, Warmup, count_of

__all__ = ["ChunkedTopK"]


@dataclass(eq=False)
class ChunkedTopK(ScheduledRatio, Sparse):
    """Sends the largest coordinates of each chunk of a tensor in few bits, with decaying error feedback.

        v = decay * e + g;  send the k = ceil(ratio * c) largest |v| of each chunk of c = `chunk` coordinates;
        e = v - decoded(sent)

    The codec of SparseLoCo (arXiv:2508.15706), used there for outer gradients: 64 of 4096 in 2 bits, and a decay of
    0.95. Each step sends from every part of a tensor, and chunks are searched in parallel, which suits accelerators;
    TopK finds larger values if they cluster. Positions are Rice-coded gaps: 7.5 bits each at 64 of 4096, against 12
    for a position within its chunk.

    Args:
        ratio: fraction of each chunk to send, in (0, 1]; raise it if accuracy suffers. The last chunk of a tensor is
            shorter and sends at least one coordinate.
        chunk: coordinates per chunk, a multiple of 64; smaller spreads the selection more evenly.
        values, indices: their codes on the wire; "fp32" and "int32" for less work and 4 times the bytes. If clustered
            positions exceed the fixed length of Rice codes, the smallest values count as unsent.
        decay: factor of the residual per step; 1 loses nothing.
        error_feedback: False drops unsent coordinates.
        reduce, keep: "gather" sends every rank's selection to all ranks. "owner" keeps bytes flat in the world size,
            for many ranks and slow links: see `dgcopt.compressors.OwnerReduction`. "auto" chooses the faster of the two
            per bucket from the wire's measured latency and bandwidth. "partition" lets ranks take turns to select for
            all: see `dgcopt.compressors.PartitionReduction`.
        source: send gradients or updates: see `Compressor.source`.
        warmup: ratios of the first steps or epochs; None starts at `ratio`.

    Costs one allgather of 1.2 bytes per selected coordinate, at the default 0.15 bits per parameter. Raises ConfigError
    for invalid settings, PayloadError for a damaged message.
    """

    ratio: float = 1 / 64
    chunk: int = 4096
    values: Values = "int2"
    indices: Indices = "rice"
    decay: float = 0.95
    error_feedback: bool = True
    source: Source = "auto"
    warmup: Warmup | None = None
    reduce: Reduce = "gather"
    keep: float = field(default=1.0, metadata=MAY_BE_INFINITE)

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.chunk < 1 or self.chunk % BLOCK:
            raise ConfigError(f"chunk must be a multiple of {BLOCK}, not {self.chunk!r}")

    def selection(self, ctx: Context) -> Chunks:
        """Return the chunks of this bucket, and the number of coordinates to send of each."""

        def of_chunks(ratio: float) -> Chunks:
            spans = [
                (start, min(start + self.chunk, segment.stop))
                for segment in ctx.segments
                for start in range(segment.start, segment.stop, self.chunk)
            ]
            return Chunks(spans, [count_of(ratio, stop - start) for start, stop in spans], ctx.device)

        return self.chooser(ctx, of_chunks)

    def choose(self, grad: Tensor, ctx: Context) -> tuple[Tensor, Tensor, Tensor]:
        if not self.error_feedback:
            return grad, *select_chunks(grad, self.selection(ctx))
        e, v = ctx.memory.residual()
        return v, *add_and_select_chunks(grad, e, self.decay, v, self.selection(ctx))

    def payload_bytes(self, ctx: Context) -> int | None:
        return self.reduction(self.selection(ctx).count, ctx).nbytes(ctx)
