"""Conformance kit of averaging algorithms, on simulated ranks."""

from __future__ import annotations

import contextlib
import copy
import functools
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any, TypeAlias

import torch
from torch import Tensor, nn
from torch.optim import SGD, Optimizer

from .. import AsyncAverage, Averaging, ConfigError, Context, join, simulated_world
from ..checkpoint import reshare
from ..collectives import Exchange, watched
from .borrowed import spoil_message
from .report import Report, checked

__all__ = ["check_averaging"]

Make: TypeAlias = Callable[[Iterable[Tensor]], Optimizer]

SIZES = (1, 2, 3)
DTYPES = (torch.float64, torch.float32, torch.float16, torch.bfloat16)
WITHIN = 50
"""Number of local steps after a warm-up that must contain an exchange."""

QUIET = 24
"""Number of exchanges without local steps that must bring ranks closer."""


def check_averaging(rule: Averaging, optimizer: Make | None = None, sizes: Sequence[int] = SIZES) -> Report:
    """Train a small network on simulated ranks, with weights that an algorithm averages.

    Checks for each world size in `sizes`: weights stay finite, in four dtypes; ranks with equal weights and no steps
    keep them; ranks with different weights and no steps approach each other, by half in 24 exchanges; each rank's steps
    change all other ranks' weights; all ranks hold the same bits if `identical` is true; memory is in `ctx`, for
    checkpoints, not in the algorithm; an exchange changes no memory before the round is committed, uses no message
    after a reduction, and leaves torch's random numbers alone; a checkpoint resumes bit for bit, also between two
    exchanges; another world size resumes from the mean; ranks may run out of data (`dgcopt.join`); a second run has the
    same bits; settings can be compared and copied.

    Args:
        rule: the algorithm with its settings, and an exchange within fifty steps (`every=2`); copied for each rank.
        optimizer: factory of the optimizer, with any lr; the lr is set to zero for ranks without steps. None is SGD
            with momentum 0.9. It must train parameters of half precision.
        sizes: world sizes; leave out those that the algorithm refuses (ConfigError).

    Returns the report. Raises ConformanceError with the report as its message if a check fails, and ConfigError for an
    algorithm that exchanges too rarely or in a thread.
    """
    if not isinstance(rule, Averaging):
        raise ConfigError(
            f"check_averaging needs an algorithm with its settings, such as LocalSGD(every=2), not {rule!r:.200}"
        )
    if isinstance(rule, AsyncAverage):
        raise ConfigError("AsyncAverage exchanges in a thread, and simulated ranks have none")
    if not any(rule.due(step) for step in range(1, WITHIN + 1)):
        raise ConfigError(f"{rule!r} makes no exchange within {WITHIN} steps. Give it a small `every`.")
    make = optimizer or functools.partial(SGD, lr=0.1, momentum=0.9)
    return checked(repr(rule), _CHECKS, [(size, _Case(rule, make, size)) for size in sizes])


@dataclass(frozen=True)
class _Case:
    rule: Averaging
    make: Make
    size: int


class _Ranks:
    """A simulated world of ranks with different data."""

    def __init__(self, case: _Case, dtype: torch.dtype = torch.float64, other: int | None = None) -> None:
        """Give the rank `other`, if any, other data after a warm-up."""
        self.other, self.warmup_steps = other, case.rule.warmup_steps
        torch.manual_seed(1)
        model = nn.Sequential(nn.Linear(12, 40), nn.Tanh(), nn.Linear(40, 30), nn.Tanh(), nn.Linear(30, 5)).to(dtype)
        self.dtype, self.steps = dtype, 0
        self.models = [copy.deepcopy(model) for _ in range(case.size)]
        self.optimizers: list[Any] = [
            case.rule.attach(case.make(mine.parameters()), mine.named_parameters(), comm)
            for mine, comm in zip(self.models, simulated_world(case.size), strict=True)
        ]

    def train(self, steps: int, active: Sequence[int] | None = None) -> None:
        """Make local steps on all ranks, or on those with data."""
        ranks = [
            (rank, mine, optimizer)
            for rank, (mine, optimizer) in enumerate(zip(self.models, self.optimizers, strict=True))
            if active is None or rank in active
        ]
        for _ in range(steps):
            self.steps += 1
            for rank, mine, optimizer in ranks:
                optimizer.zero_grad()
                is_other = rank == self.other and self.steps > self.warmup_steps
                generator = torch.Generator().manual_seed(100 * self.steps + rank + 50 * is_other)
                x = torch.randn(6, 12, generator=generator, dtype=torch.float64).to(self.dtype)
                (mine(x).float().square().mean() + mine(x).float().mean()).backward()
            for _, _, optimizer in ranks:
                optimizer.step()

    def rest(self, steps: int) -> None:
        """Make steps that change nothing."""
        for optimizer in self.optimizers:
            optimizer.state.clear()  # momentum
            for group in optimizer.param_groups:
                group.update({name: 0.0 for name in ("lr", "weight_decay") if name in group})
        self.train(steps)

    def commit(self) -> None:
        """Finish exchanges in flight."""
        for optimizer in self.optimizers:
            optimizer.averaging.finish_round()

    def states(self) -> list[dict[str, Any]]:
        """Return every rank's checkpoint."""
        return [
            copy.deepcopy({"model": mine.state_dict(), "optimizer": optimizer.state_dict()})
            for mine, optimizer in zip(self.models, self.optimizers, strict=True)
        ]

    def load(self, states: Sequence[dict[str, Any]], steps: int) -> None:
        """Resume from other ranks' checkpoints."""
        self.steps = steps
        for mine, optimizer, state in zip(self.models, self.optimizers, states, strict=True):
            mine.load_state_dict(state["model"])
            optimizer.load_state_dict(state["optimizer"])

    def average(self) -> None:
        """Average all weights."""
        for optimizer in self.optimizers:
            optimizer.averaging.average()

    def weights(self) -> Tensor:
        """Return the weights, one row per rank."""
        return torch.stack([nn.utils.parameters_to_vector(mine.parameters()).detach() for mine in self.models])

    def apart(self) -> float:
        """Return the distance of ranks from their mean."""
        rows = self.weights()
        return float((rows - rows.mean(0)).norm())


def _first_exchange(rule: Averaging) -> int:
    return next(step for step in range(1, WITHIN + 1) if rule.due(step)) + rule.warmup_steps


def _due_after(step: int, exchanges: int, rule: Averaging) -> list[int]:
    """Return the local steps of the next exchanges after a local step; fewer if they are too rare."""
    return [later for later in range(step + 1, step + exchanges * WITHIN + 1) if rule.due(later)][:exchanges]


# -- the checks: each raises AssertionError or returns an outcome ------------------------------------------------------


def _finite(case: _Case) -> None:
    for dtype in DTYPES:
        ranks = _Ranks(case, dtype)
        ranks.train(2 * _first_exchange(case.rule) + 1)
        ranks.commit()
        if any(optimizer.averaging.telemetry.skipped for optimizer in ranks.optimizers):
            raise AssertionError(f"results of {dtype} are not finite, so rounds were skipped")
        if not ranks.weights().isfinite().all():
            raise AssertionError(f"weights of {dtype} are not finite after an exchange")


def _at_rest(case: _Case) -> None:
    ranks = _Ranks(case)
    before = ranks.weights()
    ranks.rest(2 * _first_exchange(case.rule) + 1)
    ranks.commit()
    gap = float((ranks.weights() - before).abs().max())
    if not gap < 1e-9:
        raise AssertionError(f"weights that all ranks have alike, and no step has changed, were moved by {gap:g}")


def _together(case: _Case) -> str | None:
    if case.size == 1:
        return None
    ranks = _Ranks(case)
    ranks.train(_first_exchange(case.rule) + 1)  # a warm-up keeps ranks equal
    if ranks.apart() == 0:
        ranks.train(1)
    before = ranks.apart()
    local = ranks.steps - case.rule.warmup_steps
    due = _due_after(local, QUIET, case.rule)
    if not due:
        raise AssertionError(f"no exchange is due in the {QUIET * WITHIN} steps after step {local}")
    ranks.rest(due[-1] - local)
    ranks.commit()
    if not ranks.apart() <= before / 2:
        raise AssertionError(f"ranks were {before:.3g} apart, and are {ranks.apart():.3g} after {len(due)} exchanges")
    return None


def _mutual(case: _Case) -> None:
    steps = case.rule.warmup_steps + _due_after(0, 2 * case.size + 2, case.rule)[-1]

    def weights(other: int | None) -> Tensor:
        ranks = _Ranks(case, other=other)
        ranks.train(steps)
        ranks.commit()
        return ranks.weights()

    before = weights(None)
    for other in range(case.size if case.size > 1 else 0):
        after = weights(other)
        same = [rank for rank in range(case.size) if before[rank].equal(after[rank])]
        if same:
            raise AssertionError(
                f"after {steps} steps, weights of rank(s) {same} do not depend on the steps of rank {other}"
            )


def _identical(case: _Case) -> str | None:
    ranks, rule = _Ranks(case), case.rule
    says_so = False
    for _ in range(3 * _first_exchange(rule)):
        ranks.train(1)
        local = ranks.steps - rule.warmup_steps
        if local > 0 and rule.due(local) and rule.identical(local) and not rule.overlap:
            says_so = True
            rows = ranks.weights()
            if not bool((rows == rows[:1]).all()):
                raise AssertionError(f"ranks have other bits after step {local}, but identical({local}) is true")
    return None if says_so else "not declared"


def _nothing_in_itself(case: _Case) -> None:
    ranks = _Ranks(case)
    rules = [optimizer.averaging.rule for optimizer in ranks.optimizers]
    before = [dict(vars(rule)) for rule in rules]
    ranks.train(2 * _first_exchange(case.rule) + 1)
    for rule, settings in zip(rules, before, strict=True):
        changed = [name for name, value in vars(rule).items() if name not in settings or value is not settings[name]]
        if changed:
            raise AssertionError(f"training has changed its attribute(s) {', '.join(changed)}: keep memory in ctx")


def _alone(case: _Case) -> None:
    ranks, watching = _Ranks(case), _Ranks(replace(case, rule=_watching(case.rule)))
    for each in (ranks, watching):
        drawn = torch.get_rng_state()
        each.train(2 * _first_exchange(case.rule) + 1)
        each.commit()
        if not drawn.equal(torch.get_rng_state()):
            raise AssertionError("it has changed torch's random numbers: draw from ctx.generator(seed)")
    if not torch.equal(ranks.weights(), watching.weights()):
        raise AssertionError("it reads a message after the reduction, which not every wire overwrites with the result")


def _watching(rule: Averaging) -> Averaging:
    """Return a copy whose exchanges overwrite their messages, and fail if memory changes before the commit."""

    class Watching(type(rule)):  # type: ignore[misc]  # a class that is known only now
        def exchange(self, x: Tensor, ctx: Context) -> Exchange:
            before = {kind: held.clone() for kind, held in ctx.memory.items()}
            result = yield from watched(super().exchange(x, ctx), spoil_message)
            for kind, held in before.items():
                if kind not in ctx.memory or not torch.equal(held, ctx.memory[kind]):
                    raise AssertionError(
                        f"ctx.memory[{kind!r}] changes before the round is committed: change a copy, and put it into "
                        f"memory in ctx.memory.on_commit"
                    )
            return result

    watching = copy.copy(rule)
    watching.__class__ = Watching
    return watching


def _resume(case: _Case) -> None:
    for more in (0, 1):
        straight, resumed = _Ranks(case), _Ranks(case)
        straight.train(_first_exchange(case.rule) + more)
        resumed.load(straight.states(), straight.steps)
        for ranks in (straight, resumed):
            ranks.train(2 * _first_exchange(case.rule))
            ranks.commit()
        if not torch.equal(straight.weights(), resumed.weights()):
            raise AssertionError(f"saved {more} step(s) after an exchange and loaded, it continues differently")


def _reshared(case: _Case) -> None:
    old = _Ranks(case)
    old.train(_first_exchange(case.rule) + 1)
    states, center = old.states(), old.weights().mean(0)
    for size in {1, 2, case.size + 1} - {case.size}:
        new = _Ranks(replace(case, size=size))
        new.load([reshare(states, rank, size) for rank in range(size)], old.steps)
        new.average()
        gap = float((new.weights() - center).abs().max())
        if not gap < 1e-9:
            raise AssertionError(f"{size} rank(s) resume {gap:g} away from the mean of the saved weights")
        new.train(2 * _first_exchange(case.rule))


def _uneven(case: _Case) -> str | None:
    if case.rule.warmup_steps:
        return "not declared"  # join does not support a warm-up
    if not any(map(case.rule.reaches_all, _due_after(0, QUIET, case.rule))):
        raise AssertionError("reaches_all() is never true, so a rank without data serves the others' rounds for ever")
    ranks = _Ranks(case)
    lengths = [_first_exchange(case.rule) + 2 * rank for rank in range(case.size)]
    with contextlib.ExitStack() as stack:
        own = [stack.enter_context(contextlib.ExitStack()) for _ in lengths]
        for each, optimizer in zip(own, ranks.optimizers, strict=True):
            each.enter_context(join(optimizer))
        for step in range(max(lengths)):
            for each, length in zip(own, lengths, strict=True):
                if step >= length:
                    each.close()
            ranks.train(1, [rank for rank, length in enumerate(lengths) if step < length])
    steps = sorted({optimizer.averaging.step for optimizer in ranks.optimizers})
    if len(steps) > 1:
        raise AssertionError(f"after ranks have run out of data they are at different steps, {steps}")
    return None


def _again(case: _Case) -> None:
    ranks, others = _Ranks(case), _Ranks(case)
    for each in (ranks, others):
        each.train(2 * _first_exchange(case.rule) + 1)
    if not torch.equal(ranks.weights(), others.weights()):
        raise AssertionError("a second run of the same batches has other weights: derive random numbers from ctx.step")


def _settings(case: _Case) -> None:
    if repr(copy.deepcopy(case.rule)) != repr(case.rule):
        raise AssertionError(f"a copy has another repr, by which ranks compare settings: {case.rule!r}")


_CHECKS: dict[str, Callable[[_Case], str | None]] = {
    "weights are finite, in four dtypes": _finite,
    "at rest and alike, nothing moves": _at_rest,
    "at rest and apart, ranks come together": _together,
    "each rank's steps reach the others": _mutual,
    "the same bits if it is identical": _identical,
    "memory is in ctx, none in itself": _nothing_in_itself,
    "an exchange changes nothing by itself": _alone,
    "a checkpoint goes on bit for bit": _resume,
    "other numbers of ranks go on from the mean": _reshared,
    "ranks may run out of data": _uneven,
    "another run has the same bits": _again,
    "settings can be compared and copied": _settings,
}
