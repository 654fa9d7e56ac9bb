"""Conformance kit of compressors, on simulated ranks."""

from __future__ import annotations

import copy
import functools
import itertools
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Literal, TypeAlias

import torch
from torch import Tensor, nn
from torch.optim import SGD, Optimizer

from .. import Compressor, Context, DistributedOptimizer, SparseSum, simulate, simulated_world
from ..checkpoint import reshare
from ..collectives import Collective, watched
from ..compressors import GradientExchange, accept
from ..exchange.scheduler import context_of
from ..flat.buckets import build_buckets
from ..flat.gradient import GradientBucket
from ..flat.memory import is_unsent
from ..flat.optimizer_state import STATE_KEY
from ..flat.store import NamedTensors, Store
from .borrowed import spoil, spoil_message
from .report import Report, checked

__all__ = ["check_compressor"]

Make: TypeAlias = Callable[[Iterable[Tensor]], Optimizer]

Gradients: TypeAlias = list[list[Tensor]]
"""Gradients by rank, then by parameter."""

SHAPES: tuple[tuple[int, ...], ...] = ((33, 17), (1,), (65,), (8, 3, 3, 3), (64,), (7,), (5, 1), (4099,), (48, 64))
"""Shapes of the parameters: one element, less than a block of 64, one block, one more, and thousands."""

SIZES = (1, 2, 3, 4, 5, 8)
USUAL = torch.float32
"""Dtype of most gradients; that of the kernels in C, which float64 would leave out."""

DTYPES = (torch.float64, torch.float32, torch.float16, torch.bfloat16)
ALIKE = 4
"""Least number of steps with equal gradients, whose results together must resemble the mean gradient."""

UNSENT = 16
"""Number of steps with gradients of unsent coordinates only; some must be sent in the second half of the steps."""


def check_compressor(
    compressor: Compressor,
    optimizer: Make | None = None,
    sizes: Sequence[int] = SIZES,
    device: torch.device | str = "cpu",
) -> Report:
    """Drive a compressor over simulated ranks through all situations of training.

    Checks for each world size in `sizes`: ranks end with the same bits; results have the right shape and are finite for
    random, zero, constant, huge and tiny gradients of four dtypes; results, and messages of reductions and broadcasts,
    are not used after they were given away; torch's random numbers are left alone; a sum is `size` averages; equal
    gradients have results of one scale for any number of ranks; an aborted step, with NaN or without, leaves no trace;
    saved and loaded memory continues bit for bit, and moves to other buckets and numbers of ranks; nothing is lost if
    `conserves` is declared, else results point along the mean gradient and depend on every rank's; unsent coordinates
    are sent once only they have gradients; the bytes sent are those of `payload_bytes`; and the loss of a small network
    with odd sizes does not diverge under `DistributedOptimizer` with several buckets, up to two ranks also in half
    precision.

    Args:
        compressor: the compressor with its settings; copied for each rank.
        optimizer: factory of the optimizer, for compressors that need a certain one; None is SGD without momentum. It
            must train parameters of half precision: Adam's eps of 1e-8 is zero in float16.
        sizes: world sizes.
        device: device of parameters, gradients and memory.

    Returns the report. Raises ConformanceError with the report as its message if a check fails, and ConfigError for an
    object that is no compressor.
    """
    compressor = accept(compressor)
    make, on = optimizer or functools.partial(SGD, lr=0.1), torch.device(device)
    return checked(repr(compressor), _CHECKS, [(size, _Case(compressor, make, size, on)) for size in sizes])


@dataclass(frozen=True)
class _Case:
    compressor: Compressor
    make: Make
    size: int
    device: torch.device


class _Ranks:
    """Copies of a compressor on simulated ranks, which exchange given gradients."""

    def __init__(
        self,
        case: _Case,
        dtype: torch.dtype = USUAL,
        op: Literal["average", "sum"] = "average",
        bucket_bytes: int = 2**40,
    ) -> None:
        self.size, self.dtype, self.op, self.step = case.size, dtype, op, 0
        self.comms = simulated_world(case.size)
        self.compressors: list[Compressor] = []
        self.buckets: list[list[GradientBucket]] = []
        self.stores = [Store() for _ in range(case.size)]
        self.sent: list[int] = []
        for _ in range(case.size):
            params = [nn.Parameter(torch.zeros(shape, dtype=dtype, device=case.device)) for shape in SHAPES]
            mine = copy.deepcopy(case.compressor)
            named = [(f"p{place}", param) for place, param in enumerate(params)]
            mine.see_parameters({param: name for name, param in named})
            mine.attach(case.make(params))
            self.compressors.append(mine)
            self.buckets.append(build_buckets(named, mine.kind, bucket_bytes, bucket_bytes, None, GradientBucket))
        self.contexts = self._begin()

    def _begin(self) -> list[list[Context]]:
        """Start with the content of the stores only."""
        return [
            [context_of(bucket, comm, self.op, store) for bucket in buckets]
            for buckets, comm, store in zip(self.buckets, self.comms, self.stores, strict=True)
        ]

    def exchange(self, grads: Gradients, commit: bool = True) -> Gradients:
        """Return the results of one step, of every rank, on the CPU."""
        results: Gradients = [[torch.empty(0)] * len(SHAPES) for _ in range(self.size)]
        self.sent = [0] * self.size
        for rank, buckets in enumerate(self.buckets):
            for bucket in buckets:
                given = [grads[rank][int(segment.name[1:])].to(bucket.grad.device) for segment in bucket.segments]
                bucket.fill(range(len(given)), given)
            if self.compressors[rank].whole_model:
                self.compressors[rank].prepare([bucket.grad for bucket in buckets], self.contexts[rank])
        for place in range(len(self.buckets[0])):
            exchanges = []
            for rank in range(self.size):
                context, bucket = self.contexts[rank][place], self.buckets[rank][place]
                context.begin(self.step)
                exchanges.append(self._counted(self.compressors[rank].exchange(bucket.grad, context), rank))
            for rank, result in enumerate(simulate(exchanges, self.comms)):  # type: ignore[arg-type]
                bucket = self.buckets[rank][place]
                flat = result.add_to(bucket.empty()) if isinstance(result, SparseSum) else result
                if flat.shape != (bucket.numel,) or not flat.is_floating_point():
                    raise AssertionError(
                        f"returned {flat.dtype} of shape {tuple(flat.shape)} for a gradient of {(bucket.numel,)}"
                    )
                for segment in bucket.segments:
                    results[rank][int(segment.name[1:])] = segment.view(flat).to("cpu", self.dtype, copy=True)
                if commit:
                    self.contexts[rank][place].commit()
                else:
                    self.contexts[rank][place].rollback()
                for tensor in (bucket.grad, flat):
                    spoil(tensor)  # the caller's memory after the exchange
        self.step += commit
        for rank in range(1, self.size) if commit else ():
            for shape, ours, first in zip(SHAPES, results[rank], results[0], strict=True):
                # a NaN on all ranks is reported by the check for NaN
                if not (torch.equal(ours, first) or torch.allclose(ours, first, rtol=0, atol=0, equal_nan=True)):
                    raise AssertionError(f"rank {rank} got another result than rank 0 for a parameter of shape {shape}")
        return results

    def _counted(self, exchange: GradientExchange, rank: int) -> GradientExchange:
        def count(collective: Collective) -> None:
            self.sent[rank] += collective.nbytes
            spoil_message(collective)

        return watched(exchange, count)

    def kept(self) -> list[dict[str, NamedTensors]]:
        """Return every rank's memory in the form of a checkpoint."""
        return [store.state() for store in self.stores]

    def take_over(self, kept: list[dict[str, NamedTensors]], step: int) -> None:
        """Resume from other ranks' memory."""
        self.step = step
        for store, state in zip(self.stores, kept, strict=True):
            store.restore(state)
        self.contexts = self._begin()


def _gradients(size: int, seed: int, dtype: torch.dtype = USUAL, scale: float = 1.0) -> Gradients:
    generator = torch.Generator().manual_seed(seed)
    return [
        [(torch.randn(s, generator=generator, dtype=torch.float64) * scale).to(dtype) for s in SHAPES]
        for _ in range(size)
    ]


def _constant(size: int, value: float, dtype: torch.dtype) -> Gradients:
    return [[torch.full(shape, value, dtype=dtype) for shape in SHAPES] for _ in range(size)]


def _same(ours: object, theirs: object) -> bool:
    """Return True if nested lists, tuples and dicts of tensors hold the same bits."""
    if isinstance(ours, Tensor):
        return isinstance(theirs, Tensor) and torch.equal(ours, theirs)
    if isinstance(ours, dict) and isinstance(theirs, dict):
        return ours.keys() == theirs.keys() and all(_same(ours[key], theirs[key]) for key in ours)
    if isinstance(ours, list | tuple) and isinstance(theirs, list | tuple):
        return len(ours) == len(theirs) and all(map(_same, ours, theirs))
    return ours == theirs


# -- the checks: each raises AssertionError or returns an outcome ------------------------------------------------------


def _finite(case: _Case) -> None:
    drawn = torch.get_rng_state()
    for dtype in DTYPES:
        ranks = _Ranks(case, dtype)
        for seed in range(3):
            for result in ranks.exchange(_gradients(case.size, seed, dtype))[0]:
                if not result.isfinite().all():
                    raise AssertionError(f"the result for finite gradients of {dtype} is not finite")
    if not drawn.equal(torch.get_rng_state()):
        raise AssertionError("it has changed torch's random numbers, as of dropout: draw from ctx.generator(seed)")


def _special(case: _Case) -> None:
    special = {"zero": 0.0, "constant": 3.0, "tiny": 1e-30, "huge": 1e4}
    dtypes = DTYPES if case.size <= 3 else DTYPES[:1]
    for dtype, (name, value) in itertools.product(dtypes, special.items()):
        ranks = _Ranks(case, dtype)
        for grads in (_constant(case.size, value, dtype), _gradients(case.size, 1, dtype, value)):
            for result in ranks.exchange(grads)[0]:
                if result.isnan().any():  # values beyond a message's range may become Inf
                    raise AssertionError(f"the result for {name} gradients holds NaN, in {dtype}")


def _sum(case: _Case) -> None:
    mean = _Ranks(case).exchange(_gradients(case.size, 1))[0]
    total = _Ranks(case, op="sum").exchange(_gradients(case.size, 1))[0]
    gap = torch.cat([(t - case.size * m).flatten() for t, m in zip(total, mean, strict=True)]).norm()
    whole = torch.cat([t.flatten() for t in total]).norm()
    if gap > 0.05 * whole:  # rounding at another scale
        raise AssertionError(f"the sum differs from {case.size} averages by {gap / whole:.0%}")


def _scale(case: _Case) -> None:
    grads, steps = _gradients(1, 9), max(ALIKE, case.size)
    sizes = (replace(case, size=size) for size in (1, case.size))
    one, all_ranks = (torch.stack([*_results(of, grads * of.size, steps)]).sum(0) for of in sizes)
    ratio = float(all_ranks @ _flat(grads[0]) / (one @ _flat(grads[0])))
    if not 0.7 < ratio < 1.4:  # within 3% for all compressors that come with dgcopt
        raise AssertionError(f"equal gradients of {case.size} ranks have {ratio:.2g} times the result of one rank")


def _void(case: _Case) -> None:
    plain, interrupted = (_Ranks(case) for _ in range(2))
    for seed in range(3):
        bad = _gradients(case.size, 100 + seed)
        interrupted.exchange(bad, commit=False)
        # whole-model compressors run only after all ranks have voted that gradients are finite
        for value in () if case.compressor.whole_model else (torch.nan, torch.inf):
            bad[-1][0][0, 0] = value
            interrupted.exchange(bad, commit=False)
        grads = _gradients(case.size, seed)
        if not _same(plain.exchange(grads), interrupted.exchange(grads)):
            raise AssertionError("after an aborted step the next one has another result")
        if not _same(plain.kept(), interrupted.kept()):
            raise AssertionError("an aborted step has changed memory")


def _resume(case: _Case) -> None:
    straight = _Ranks(case)
    for seed in range(3):
        straight.exchange(_gradients(case.size, seed))
    resumed = _Ranks(case)
    resumed.take_over(straight.kept(), straight.step)
    for seed in range(3, 6):
        grads = _gradients(case.size, seed)
        if not _same(straight.exchange(grads), resumed.exchange(grads)):
            raise AssertionError("with saved and loaded memory it continues differently")
    first, *others = straight.kept()
    for rank, theirs in enumerate(others, 1):
        for kind, by_name in theirs["shared"].items():
            known = first["shared"].get(kind, {})
            if any(name in known and not _same(held, known[name]) for name, held in by_name.items()):
                raise AssertionError(f"ctx.memory.share({kind!r}, ...) got other bits on rank {rank} than on rank 0")


def _conservation(case: _Case) -> str | None:
    if not case.compressor.conserves:
        return "not declared"
    ranks = _Ranks(case)
    _check_sum(_applied(ranks, range(5)), ranks)
    return None


def _elsewhere(case: _Case) -> None:
    old = _Ranks(case)
    missing = _applied(old, range(3))
    states = [{STATE_KEY: {**kept, "rank": rank, "world_size": old.size}} for rank, kept in enumerate(old.kept())]
    for size in {1, 2, old.size + 1} - {old.size}:
        new = _Ranks(replace(case, size=size), bucket_bytes=2**14)
        new.take_over([reshare(states, rank, size)[STATE_KEY] for rank in range(size)], old.step)
        try:
            more = _applied(new, range(3, 5))
            if case.compressor.conserves:
                _check_sum([before + after for before, after in zip(missing, more, strict=True)], new)
        except Exception as error:
            raise AssertionError(f"loaded by {size} rank(s) with several buckets: {error}") from error


def _applied(ranks: _Ranks, seeds: Sequence[int]) -> list[Tensor]:
    """Make steps, and return the sum of all ranks' gradients without the applied sums, by parameter."""
    missing = [torch.zeros(shape, dtype=torch.float64) for shape in SHAPES]
    for seed in seeds:
        grads = _gradients(ranks.size, seed)
        for total, result, *given in zip(missing, ranks.exchange(grads)[0], *grads, strict=True):
            total += torch.stack(given).sum(0) - ranks.size * result
            if not total.isfinite().all():
                raise AssertionError("the result for finite gradients is not finite")
    return missing


def _check_sum(missing: Sequence[Tensor], ranks: _Ranks) -> None:
    """Raise AssertionError unless all ranks' residuals are the part of the gradients' sum that was not applied."""
    unsent = [torch.zeros(shape, dtype=torch.float64) for shape in SHAPES]
    for kept in ranks.kept():
        for kind, by_name in kept["memory"].items():
            for name, held in by_name.items() if is_unsent(kind) else ():
                unsent[int(name[1:])] += held.cpu()
    for shape, theirs, ours in zip(SHAPES, missing, unsent, strict=True):
        gap = float((theirs - ours).abs().max())
        if gap > 1e-4:
            raise AssertionError(f"applied values and residuals miss the gradients' sum by {gap:g} ({shape})")


def _direction(case: _Case) -> None:
    if case.compressor.conserves:
        return  # a stronger check
    (common,) = _gradients(1, 7)
    given = [[c + g / 2 for c, g in zip(common, mine, strict=True)] for mine in _gradients(case.size, 8)]
    mean = torch.stack([_flat(mine) for mine in given]).mean(0)
    steps = max(ALIKE, case.size)  # each rank may take its turn
    results = [*_results(case, given, steps)]
    cosine = float(torch.cosine_similarity(torch.stack(results).sum(0), mean, dim=0))
    if not cosine > 2 / len(mean) ** 0.5:  # twice the standard deviation of unrelated vectors
        raise AssertionError(f"the sum of results does not point along the mean gradient: their cosine is {cosine:.2g}")
    for rank in range(case.size):
        others = [[-grad for grad in mine] if place == rank else mine for place, mine in enumerate(given)]
        if all(map(torch.equal, results, _results(case, others, steps))):  # ends at the first step that differs
            raise AssertionError(f"results do not depend on the gradient of rank {rank}")


def _results(case: _Case, grads: Gradients, steps: int) -> Iterator[Tensor]:
    """Yield the flat result of each of several steps with equal gradients."""
    ranks = _Ranks(case)
    for _ in range(steps):
        yield _flat(ranks.exchange(grads)[0])


def _flat(tensors: Sequence[Tensor]) -> Tensor:
    return torch.cat([tensor.flatten() for tensor in tensors])


def _everywhere(case: _Case) -> None:
    ranks, unsent = _Ranks(case), [torch.ones(shape) for shape in SHAPES]
    left: list[int] = []
    for seed in range(UNSENT):
        grads = [[grad * mask for grad, mask in zip(g, unsent, strict=True)] for g in _gradients(case.size, seed)]
        for mask, result in zip(unsent, ranks.exchange(grads)[0], strict=True):
            mask.masked_fill_(result != 0, 0.0)
        left.append(int(_flat(unsent).sum()))
        if not left[-1]:
            return
    if left[-1] == left[UNSENT // 2]:
        raise AssertionError(
            f"{left[-1]} of {_flat(unsent).numel()} coordinates were never sent in {UNSENT} steps, although no other "
            f"had a gradient: select coordinates by magnitude, at random or in turn, not the same ones in each step"
        )


def _ledger(case: _Case) -> str | None:
    ranks = _Ranks(case)
    for seed in range(3):
        for contexts in ranks.contexts:
            for context in contexts:
                context.begin(ranks.step)
        declared = [ranks.compressors[0].payload_bytes(context) for context in ranks.contexts[0]]
        if None in declared:
            return "not declared"
        ranks.exchange(_gradients(case.size, seed))
        if ranks.sent[0] != sum(number or 0 for number in declared):
            raise AssertionError(f"{ranks.sent[0]} bytes were sent, but {declared} were declared")
    return None


def _settings(case: _Case) -> None:
    if repr(copy.deepcopy(case.compressor)) != repr(case.compressor):
        raise AssertionError(f"a copy has another repr, by which ranks compare settings: {case.compressor!r}")


def _training(case: _Case) -> None:
    # how memory is kept depends on the dtype of parameters, and not on the number of ranks
    for dtype in (torch.float32, torch.float16, torch.bfloat16) if case.size <= 2 else (torch.float32,):
        torch.manual_seed(1)
        model = nn.Sequential(nn.Linear(12, 40), nn.Tanh(), nn.Linear(40, 30), nn.Tanh(), nn.Linear(30, 5))
        model.to(case.device, dtype)
        models = [copy.deepcopy(model) for _ in range(case.size)]
        attach = functools.partial(DistributedOptimizer, bucket_mb=0.004, first_bucket_mb=0.001)
        optimizers = [
            attach(case.make(m.parameters()), m.named_parameters(), case.compressor, comm=comm)
            for m, comm in zip(models, simulated_world(case.size), strict=True)
        ]
        generator = torch.Generator().manual_seed(2)
        losses = []
        for _ in range(12):
            for mine, optimizer in zip(models, optimizers, strict=True):
                optimizer.zero_grad()
                loss = mine(torch.randn(6, 12, generator=generator).to(case.device, dtype)).float().square().mean()
                loss.backward()
                losses.append(loss.item())
            for optimizer in optimizers:
                optimizer.step()
        for rank, mine in enumerate(models):
            for (name, ours), first in zip(mine.named_parameters(), models[0].parameters(), strict=True):
                if not torch.equal(ours, first) or not ours.isfinite().all():
                    raise AssertionError(
                        f"rank {rank}: parameter {name!r} of {dtype} differs from rank 0's, or is not finite"
                    )
        if not max(losses) < 100 * losses[0]:
            raise AssertionError(
                f"with parameters of {dtype} the loss diverged from {losses[0]:.3g} to {losses[-1]:.3g}"
            )


_CHECKS: dict[str, Callable[[_Case], str | None]] = {
    "the same bits on all ranks, finite, in four dtypes": _finite,
    "zero, constant, tiny and huge gradients": _special,
    "a sum is size averages": _sum,
    "results of N ranks have the scale of one": _scale,
    "a step taken back leaves no trace": _void,
    "memory goes through a checkpoint": _resume,
    "memory moves to other buckets and ranks": _elsewhere,
    "nothing is lost": _conservation,
    "results follow every rank's gradient": _direction,
    "every coordinate has its turn": _everywhere,
    "bytes sent are those declared": _ledger,
    "settings can be compared and copied": _settings,
    "training with several buckets": _training,
}
