"""PowerSGD (Vogels, Karimireddy & Jaggi, NeurIPS 2019)."""

from __future__ import annotations

import logging
import math
from collections.abc import Generator, Sequence
from dataclasses import dataclass
from typing import Literal, TypeAlias

import torch
from torch import Tensor

from ...collectives import AllReduce, Collective
from ...errors import ConfigError
from ...flat.buckets import Segment
from ...flat.memory import at_least_float32
from ...kernels import put_product
from ..base import Compressor, GradientExchange, Source
from ..context import Context
from ..dense import checked_sum

__all__ = ["PowerSGD"]

log = logging.getLogger("dgcopt")

Side: TypeAlias = Literal["P", "Q"]


@dataclass(eq=False)
class PowerSGD(Compressor):
    """Approximates matrices by products of two thin factors, by power iteration over ranks; bytes are flat in N.

    With M = g + e of shape n x m (first dimension x all others), and Q of shape m x r from the last step:

        P = mean(M orth(Q));  Q = mean(M^T orth(P));  apply orth(P) Q^T;  e = M - orth(P) Q^T

    Vectors, and matrices that do not pay, are sent dense in one message with P. All P of a bucket are one message, and
    all Q. Q follows its parameter through new buckets and checkpoints.

    With the same seed the results equal torch's `powerSGD_hook` to float tolerance, with these differences: a zero
    gradient neither makes NaN nor stops learning; dependent columns do not spoil ranks above 1; gradients of half
    precision are computed in float32; without warm start the draws depend on the step, so that a resumed run repeats
    them. Names in torch and in epfml/powersgd are in brackets.

    Args:
        rank: r, usually 1 to 4; double it until accuracy suffices [matrix_approximation_rank].
        start_step: number of first steps that send dense gradients. Raise it if accuracy suffers: a tenth of all steps
            is safe. 0 works, since memory follows parameters into new buckets; torch requires 2 and defaults to 1000,
            epfml to 100, which short runs never reach [start_powerSGD_iter, start_compressing_after_num_steps].
        min_compression_rate: compress a matrix if r (n + m) times this is less than n m; higher sends more small
            matrices dense.
        error_feedback: False drops e [use_error_feedback].
        warm_start: False draws a new Q at each step, which needs no memory and approximates worse.
        epsilon: added to the length of each column before division, with Gram-Schmidt at any rank. At 0, ranks above 1
            use Householder's QR, which is stable [orthogonalization_epsilon].
        seed: seed of the first Q [random_seed].
        batch_same_shapes: one batched product for all matrices of a shape, for GPUs and many small layers; costs a copy
            of them [batch_tensors_with_same_shape].
        iterations: power iterations, in halves. 0.5 computes P and Q in alternate steps, for half the bytes; more than
            1 costs bytes and approximates better [epfml's num_iters_per_step counts halves].
        stats_every: steps between log lines of saved bytes, at rank 0 [compression_stats_logging_frequency].
        granularity: "tensor", or "bucket" to treat a bucket as one square matrix padded with zeros: fewer and larger
            products at lower accuracy [batched_powerSGD_hook, whose residual includes the padding].
        source: send gradients or updates: see `Compressor.source`. A low-rank mean is close to the mean, so Adam and
            its kin work with gradients.

    Costs two allreduces per bucket: r (n + m) numbers of 4 bytes per matrix, plus dense vectors; `BF16(PowerSGD())`
    sends 2 bytes. 4 r n m multiplications and as many additions. Needs ranks with equal hardware, since different CPUs
    may round products differently. Raises ConfigError for settings out of range. For many ranks, where an allgather is
    too slow. Source: arXiv:1905.13727, algorithms 1 and 2.
    """

    rank: int = 1
    start_step: int = 10
    min_compression_rate: float = 2
    error_feedback: bool = True
    warm_start: bool = True
    epsilon: float = 0.0
    seed: int = 0
    batch_same_shapes: bool = False
    iterations: float = 1
    stats_every: int = 10_000
    granularity: Literal["tensor", "bucket"] = "tensor"
    source: Source = "gradient"

    def __post_init__(self) -> None:
        super().__post_init__()
        for name, least in (("rank", 1), ("start_step", 0), ("seed", 0), ("stats_every", 1)):
            value = getattr(self, name)
            if not least <= value < 2**32:
                raise ConfigError(f"{name} must be a whole number from {least} up, not {value!r}")
        if not self.min_compression_rate > 0 or not self.epsilon >= 0:
            raise ConfigError(
                f"min_compression_rate must be above 0 and epsilon not below it, not {self.min_compression_rate!r} "
                f"and {self.epsilon!r}"
            )
        if self.iterations <= 0 or 2 * self.iterations % 1:
            raise ConfigError(f"iterations must be 0.5, 1, 1.5 or more halves, not {self.iterations!r}")

    @property
    def conserves(self) -> bool:
        return self.error_feedback

    def exchange(self, grad: Tensor, ctx: Context) -> GradientExchange:
        if ctx.step < self.start_step:
            return checked_sum((yield AllReduce(grad, op=ctx.op)), ctx)
        v = ctx.add_residual(grad) if self.error_feedback else grad.to(at_least_float32(grad.dtype))
        stacks, whole = self._plan(ctx)
        matrices, vectors = [stack.read(v) for stack in stacks], [v[span] for span in whole]
        self._report(ctx)

        sides, means = self._sides(ctx), []
        factors = self._start(sides[0], ctx)
        for side in sides:
            # P is the mean over ranks here, the sum in torch
            bases = [orthogonal(f, self.epsilon / ctx.size if side == "Q" else self.epsilon) for f in factors]
            with torch.autocast(v.device.type, enabled=False):  # scripts may have it on around `step()`
                pairs = zip(matrices, bases, strict=True)
                factors = [torch.bmm(m if side == "P" else m.mT, basis) for m, basis in pairs]
            arrived = yield from mean_of([*vectors, *factors], ctx)
            means += arrived[: len(vectors)]
            factors, vectors = arrived[len(vectors) :], []

        result, left = grad.to(v.dtype), v if self.error_feedback else None
        for stack, basis, factor in zip(stacks, bases, factors, strict=True):
            stack.write(*(basis, factor) if side == "Q" else (factor, basis), result, left)
            if self.warm_start:
                for segment, value in zip(stack.segments, factor, strict=True):
                    ctx.memory.share(f"PowerSGD {side}", segment, value)
        for span, mean in zip(whole, means, strict=True):
            result[span] = mean
        if self.error_feedback:
            for span in whole:
                v[span] = 0
            ctx.keep_residual(v)
        return result if ctx.op == "average" else result.mul_(ctx.size)

    def _sides(self, ctx: Context) -> list[Side]:
        """Return the factors that this step computes, in order."""
        if not self._plan(ctx)[0]:
            return ["P"]  # only dense vectors, which are sent once
        count = round(2 * self.iterations)
        return ["Q" if (count * (ctx.step - self.start_step) + i) % 2 else "P" for i in range(count)]

    def _start(self, side: Side, ctx: Context) -> list[Tensor]:
        """Return the factor from which `side` is computed: the last one, or a random one."""
        other: Side = "Q" if side == "P" else "P"
        held = ctx.memory.shared.get(f"PowerSGD {other}", {}) if self.warm_start else {}
        generator: torch.Generator | None = None
        dtype, factors = at_least_float32(ctx.dtype), []
        for stack in self._plan(ctx)[0]:
            shape = torch.Size((stack.rows if other == "P" else stack.columns, stack.rank))
            known = [held.get(segment.name) for segment in stack.segments]
            if any(factor is None or factor.shape != shape for factor in known):
                generator = generator or self._generator(ctx)
                drawn = torch.randn(len(known), *shape, generator=generator, dtype=dtype)
                known = [k if k is not None and k.shape == shape else d for k, d in zip(known, drawn, strict=True)]
            factors.append(torch.stack([factor.to(ctx.device, dtype) for factor in known if factor is not None]))
        return factors

    def _generator(self, ctx: Context) -> torch.Generator:
        """Return the generator of missing factors: like torch's hook, or a new one for each step."""
        if self.warm_start:
            return torch.Generator().manual_seed(first_seed(self.seed, ctx.index))
        return ctx.generator(self.seed)

    def _plan(self, ctx: Context) -> tuple[list[_Stack], list[slice]]:
        """Return the matrices of a bucket to approximate, and the parameters to send dense."""
        if "PowerSGD" not in ctx.scratch:
            ctx.scratch["PowerSGD"] = self._lay_out(ctx.segments)
        return ctx.scratch["PowerSGD"]

    def _lay_out(self, segments: Sequence[Segment]) -> tuple[list[_Stack], list[slice]]:
        whole = [slice(segment.start, segment.stop) for segment in segments]
        if self.granularity == "bucket":
            side = math.ceil(math.sqrt(sum(segment.numel for segment in segments)))
            rank = min(self.rank, side)
            return (
                ([_Square(segments[:1], side, side, rank, whole)], []) if self._pays(side, side, rank) else ([], whole)
            )
        by_shape: dict[tuple[int, int], list[Segment]] = {}
        for segment in segments:
            if segment.param.dim() > 1:
                rows = segment.param.shape[0]
                columns = segment.numel // rows
                if self._pays(rows, columns, min(self.rank, rows, columns)):
                    by_shape.setdefault((rows, columns), []).append(segment)
                    whole.remove(slice(segment.start, segment.stop))
        stacks = []
        for (rows, columns), alike in by_shape.items():
            for together in [alike] if self.batch_same_shapes else [[segment] for segment in alike]:
                stacks.append(_Stack(together, rows, columns, min(self.rank, rows, columns)))
        return stacks, whole

    def _pays(self, rows: int, columns: int, rank: int) -> bool:
        return rank * (rows + columns) * self.min_compression_rate < rows * columns

    def _report(self, ctx: Context) -> None:
        if ctx.rank == 0 and (ctx.step - self.start_step) % self.stats_every == 0:
            before = sum(segment.numel for segment in ctx.segments)
            after = self.payload_bytes(ctx) // at_least_float32(ctx.dtype).itemsize
            log.info(
                "dgcopt: step %d: PowerSGD sends %d numbers for the %d of bucket %d, %.4g times fewer",
                *(ctx.step, after, before, ctx.index, before / after),
            )

    def payload_bytes(self, ctx: Context) -> int:
        if ctx.step < self.start_step:
            return ctx.numel * ctx.dtype.itemsize
        stacks, whole = self._plan(ctx)
        count = sum(span.stop - span.start for span in whole)
        for side in self._sides(ctx):
            count += sum(len(s.segments) * s.rank * (s.rows if side == "P" else s.columns) for s in stacks)
        return count * at_least_float32(ctx.dtype).itemsize


@dataclass(frozen=True)
class _Stack:
    """Matrices of the same shape `rows` x `columns`, one per parameter, multiplied in a batch."""

    segments: Sequence[Segment]
    rows: int
    columns: int
    rank: int

    def read(self, flat: Tensor) -> Tensor:
        """Return `[parameters, rows, columns]`; a view if there is only one, in any memory order."""
        views = self._views(flat)
        return views[0].unsqueeze(0) if len(views) == 1 else torch.stack(views)

    def write(self, left: Tensor, right: Tensor, flat: Tensor, less: Tensor | None) -> None:
        """Write the products `left` `right`^T, and subtract them from `less`."""
        for place, segment in enumerate(self.segments):
            span = slice(segment.start, segment.stop)
            factors = left[place].contiguous(), right[place].contiguous()  # QR returns columns
            put_product(*factors, flat[span], None if less is None else less[span])

    def _views(self, flat: Tensor) -> list[Tensor]:
        return [flat[s.start : s.stop].view(self.rows, self.columns) for s in self.segments]


@dataclass(frozen=True)
class _Square(_Stack):
    """All parameters of a bucket as one matrix; `segments` holds the first."""

    spans: Sequence[slice]

    def read(self, flat: Tensor) -> Tensor:
        values = torch.cat([flat[span] for span in self.spans])
        return torch.nn.functional.pad(values, (0, self.rows**2 - len(values))).view(1, self.rows, self.rows)

    def write(self, left: Tensor, right: Tensor, flat: Tensor, less: Tensor | None) -> None:
        values, start = flat.new_empty(self.rows**2), 0
        put_product(left[0].contiguous(), right[0].contiguous(), values, None)
        for span in self.spans:
            part = values[start : start + span.stop - span.start]
            flat[span] = part
            if less is not None:
                less[span] -= part
            start += len(part)


def mean_of(tensors: list[Tensor], ctx: Context) -> Generator[Collective, Tensor, list[Tensor]]:
    """Return the mean over ranks of several tensors, in one message."""
    flat = yield AllReduce(torch.cat([tensor.reshape(-1) for tensor in tensors]), op="average")
    ctx.checks.check_finite(flat)
    parts = flat.split([tensor.numel() for tensor in tensors])
    return [part.view(tensor.shape) for part, tensor in zip(parts, tensors, strict=True)]


def orthogonal(matrices: Tensor, epsilon: float) -> Tensor:
    """Return orthonormal columns whose first k span the first k columns of `[matrices, n, r]`, for k = 1 ... r."""
    # a column of zeros would stay zero in all later steps
    matrices = torch.where(matrices.any(-2, keepdim=True), matrices, 1.0)
    rank = matrices.shape[-1]
    if rank > 1 and not epsilon:
        return torch.linalg.qr(matrices).Q
    for place in range(rank):
        column, others = matrices[..., place : place + 1], matrices[..., place + 1 :]
        length = torch.linalg.vector_norm(column, dim=-2, keepdim=True, dtype=torch.float64)  # squares may underflow
        column /= (length + max(epsilon, torch.finfo(length.dtype).tiny)).to(column.dtype)
        others -= (column * others).sum(-2, keepdim=True) * column
    return matrices


def first_seed(seed: int, place: int) -> int:
    """Return draw number `place` of torch's hook: `numpy.random.RandomState(seed).randint(10**9)`."""
    numbers = torch.empty(64 + 2 * place, dtype=torch.int32).random_(generator=torch.Generator().manual_seed(seed))
    numbers &= 2**30 - 1
    return int(numbers[numbers < 10**9][place])
