"""PowerSGD (Vogels, Karimireddy & Jaggi, NeurIPS 2019)."""

from __future__ import annotations

import logging
import math
from collections.abc import Generator, Sequence
from dataclasses import dataclass
from typing import Literal, TypeAlias

import torch
from torch import Tensor

from ..collectives import AllReduce, Collective
from ..errors import ConfigError
from ..flat.segments import Segment
from ..kernels import put_product
from .base import Compressor, GradientExchange, Source
from .context import Context, at_least_float32

__all__ = ["PowerSGD"]

log = logging.getLogger("dgcopt")

Side: TypeAlias = Literal["P", "Q"]


@dataclass(eq=False)
class PowerSGD(Compressor):
    """Matrices as products of two thin ones, found by power iteration across ranks; bytes do not grow with N.

    With M = g + e, of n x m (first dimension x all others), and Q of m x r as the last step left it:

        P = mean(M orth(Q));  Q = mean(M^T orth(P));  apply orth(P) Q^T;  e = M - orth(P) Q^T

    Vectors, and matrices that are not worth it, travel whole, in one message with P. All of a bucket's P are one
    message, and all of its Q. Q follows its parameter through new buckets and checkpoints.

    With the same seed the results are those of torch's `powerSGD_hook` to float tolerance, but for these: a gradient
    of zeros does not make NaN, nor end learning; dependent columns cannot spoil ranks above 1; gradients of half
    precision are taken up in float32; without warm start each step's draws are its own, so that a resumed run repeats
    them. In brackets are the names of torch, and of epfml/powersgd.

    Args:
        rank: r; doubled until accuracy suffices, 1 to 4 as a rule [matrix_approximation_rank].
        start_step: steps before it send whole gradients. More if accuracy suffers: a tenth of all steps is a safe
            choice. 0 works too, as nothing is lost when buckets change; torch wants 2 or more, and defaults to 1000,
            epfml to 100, which short runs never reach [start_powerSGD_iter, start_compressing_after_num_steps].
        min_compression_rate: a matrix is worth it if r (n + m) times this is less than n m; higher leaves more of the
            small ones whole.
        error_feedback: False throws e away [use_error_feedback].
        warm_start: False draws Q anew at each step, which needs no memory and approximates worse.
        epsilon: added to the length of each column before it is divided by that, with Gram-Schmidt at any rank. At 0
            ranks above 1 are orthogonalised by Householder's QR, which is sound [orthogonalization_epsilon].
        seed: of the first Q [random_seed].
        batch_same_shapes: one batched product for all matrices of a shape, for GPUs and many small layers; costs their
            copy [batch_tensors_with_same_shape].
        iterations: of the power method, in halves. 0.5 computes P and Q in turn, one a step, for half the bytes; more
            than 1 costs bytes and approximates better [epfml's num_iters_per_step counts the halves].
        stats_every: steps between log lines of what is saved, at rank 0 [compression_stats_logging_frequency].
        granularity: "tensor", or "bucket" to take a bucket's parameters as one square matrix, filled up with zeros:
            fewer and larger products, at lower accuracy [batched_powerSGD_hook, whose residual has the zeros too].
        source: what travels, see `Compressor.source`. The mean of low rank is close to the mean, so Adam and its kin
            work on it.

    Costs two allreduces a bucket: r (n + m) numbers of 4 bytes per matrix, and vectors whole; `BF16(PowerSGD())` takes
    2 bytes. 4 r n m multiplications and as many additions. Needs ranks of one kind, as different CPUs may not multiply
    to the same bits. Raises ConfigError for settings out of range. For links where allgathers of many ranks are too
    slow. Source: arXiv:1905.13727, algorithms 1 and 2.
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
            return (yield AllReduce(grad, op=ctx.op))
        v = ctx.add_residual(grad) if self.error_feedback else grad.to(at_least_float32(grad.dtype))
        stacks, whole = self._plan(ctx)
        matrices, vectors = [stack.read(v) for stack in stacks], [v[span] for span in whole]
        self._report(ctx)

        sides, means = self._sides(ctx), []
        factors = self._start(sides[0], ctx)
        for side in sides:
            # P is the ranks' mean here, and their sum in torch
            bases = [orthogonal(f, self.epsilon / ctx.size if side == "Q" else self.epsilon) for f in factors]
            factors = [torch.bmm(m if side == "P" else m.mT, basis) for m, basis in zip(matrices, bases, strict=True)]
            arrived = yield from mean_of([*vectors, *factors])
            means += arrived[: len(vectors)]
            factors, vectors = arrived[len(vectors) :], []

        result, left = grad.to(v.dtype), v if self.error_feedback else None
        for stack, basis, factor in zip(stacks, bases, factors, strict=True):
            stack.write(*(basis, factor) if side == "Q" else (factor, basis), result, left)
            if self.warm_start:
                for segment, value in zip(stack.segments, factor, strict=True):
                    ctx.share(f"PowerSGD {side}", segment, value)
        for span, mean in zip(whole, means, strict=True):
            result[span] = mean
        if self.error_feedback:
            for span in whole:
                v[span] = 0
            ctx.keep_residual(v)
        return result if ctx.op == "average" else result.mul_(ctx.size)

    def _sides(self, ctx: Context) -> list[Side]:
        """Which factors this step computes, one after the other."""
        if not self._plan(ctx)[0]:
            return ["P"]  # nothing but vectors, which travel once
        count = round(2 * self.iterations)
        return ["Q" if (count * (ctx.step - self.start_step) + i) % 2 else "P" for i in range(count)]

    def _start(self, side: Side, ctx: Context) -> list[Tensor]:
        """What `side` is computed from: the other factor as it was left, or random."""
        other: Side = "Q" if side == "P" else "P"
        held = ctx.shared.get(f"PowerSGD {other}", {}) if self.warm_start else {}
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
        """What draws factors that are not there: as torch's hook does, or for each step anew."""
        if self.warm_start:
            return torch.Generator().manual_seed(first_seed(self.seed, ctx.index))
        return ctx.generator(self.seed)

    def _plan(self, ctx: Context) -> tuple[list[_Stack], list[slice]]:
        """What of a bucket is approximated, and what travels whole."""
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
    """Matrices of one shape, `rows` x `columns`, that are multiplied together, a parameter each."""

    segments: Sequence[Segment]
    rows: int
    columns: int
    rank: int

    def read(self, flat: Tensor) -> Tensor:
        """As `[parameters, rows, columns]`: where it lies if it is one, whatever the order of its other dimensions."""
        views = self._views(flat)
        return views[0].unsqueeze(0) if len(views) == 1 else torch.stack(views)

    def write(self, left: Tensor, right: Tensor, flat: Tensor, less: Tensor | None) -> None:
        """Their new values are the products `left` `right`^T; what is left of them in `less` loses as much."""
        for place, segment in enumerate(self.segments):
            span = slice(segment.start, segment.stop)
            put_product(left[place], right[place], flat[span], None if less is None else less[span])

    def _views(self, flat: Tensor) -> list[Tensor]:
        return [flat[s.start : s.stop].view(self.rows, self.columns) for s in self.segments]


@dataclass(frozen=True)
class _Square(_Stack):
    """All parameters of a bucket one after another, as one matrix; `segments` names the first."""

    spans: Sequence[slice]

    def read(self, flat: Tensor) -> Tensor:
        values = torch.cat([flat[span] for span in self.spans])
        return torch.nn.functional.pad(values, (0, self.rows**2 - len(values))).view(1, self.rows, self.rows)

    def write(self, left: Tensor, right: Tensor, flat: Tensor, less: Tensor | None) -> None:
        values, start = flat.new_empty(self.rows**2), 0
        put_product(left[0], right[0], values, None)
        for span in self.spans:
            part = values[start : start + span.stop - span.start]
            flat[span] = part
            if less is not None:
                less[span] -= part
            start += len(part)


def mean_of(tensors: list[Tensor]) -> Generator[Collective, Tensor, list[Tensor]]:
    """The ranks' mean of several tensors, by one message."""
    flat = yield AllReduce(torch.cat([tensor.reshape(-1) for tensor in tensors]), op="average")
    parts = flat.split([tensor.numel() for tensor in tensors])
    return [part.view(tensor.shape) for part, tensor in zip(parts, tensors, strict=True)]


def orthogonal(matrices: Tensor, epsilon: float) -> Tensor:
    """Orthonormal columns that span what the first ones of `[matrices, n, r]` do, for each first one, two, ... r."""
    # a column of zeros would stay zero in all later steps, whatever the gradients
    matrices = torch.where(matrices.any(-2, keepdim=True), matrices, 1.0)
    rank = matrices.shape[-1]
    if rank > 1 and not epsilon:
        return torch.linalg.qr(matrices).Q
    for place in range(rank):
        column, others = matrices[..., place : place + 1], matrices[..., place + 1 :]
        length = torch.linalg.vector_norm(column, dim=-2, keepdim=True, dtype=torch.float64)  # squares may underflow
        column /= (length + epsilon).to(column.dtype)
        others -= (column * others).sum(-2, keepdim=True) * column
    return matrices


def first_seed(seed: int, place: int) -> int:
    """Number `place` of those that torch's hook draws, by `numpy.random.RandomState(seed).randint(10**9)`."""
    numbers = torch.empty(64 + 2 * place, dtype=torch.int32).random_(generator=torch.Generator().manual_seed(seed))
    numbers &= 2**30 - 1
    return int(numbers[numbers < 10**9][place])
