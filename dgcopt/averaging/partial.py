"""SPARTA: frequent averaging of a small part of the weights."""

from __future__ import annotations

from collections.abc import Sequence
from fnmatch import fnmatchcase
from typing import Any, Literal

import torch
from torch import Tensor

from ..collectives import Exchange
from ..comm import Comm
from ..compressors.sparse.schedule import count_of
from ..errors import ConfigError
from ..errors.checks import check_flag, check_fraction, check_whole, is_number
from ..exchange.parameters import number
from ..kernels import BLOCK, chunks, sent
from .base import Averaging
from .weights import Weights, mean

__all__ = ["SPARTA"]

PATCH = 8 * BLOCK
"""Number of coordinates that "drift" measures and selects together."""


class SPARTA(Averaging):
    """Averages a small part of the weights after every local step, the same coordinates on all ranks.

        x_i <- x_i - step_i;  C: fraction * n coordinates;  x_i[C] <- mean_j x_j[C]

    All ranks know C, so an allreduce of the values suffices and no index is sent. Optimizer state stays local. Ranks
    stay close but never hold equal weights: evaluate within `optimizer.averaging.averaged()`, and end the training with
    `optimizer.averaging.average()`. With fraction 1 this is LocalSGD. Ranks without data (`dgcopt.join`) have no weight
    in the mean: the part of their last steps that was not averaged is lost, unless divide_by="all".

    Args:
        fraction: fraction of the weights to average in an exchange, in (0, 1]. Larger sends more and keeps ranks
            closer.
        choose: selection of coordinates. "random": drawn from `seed`, uniformly in each exchange. "strided": every
            (1/fraction)-th, shifted by one each time, so that each is averaged once in 1/fraction exchanges (rounded);
            the fastest. "drift": the patches of 512 neighbours that have moved most since they were last averaged, by
            the sum over the patch of mean_j (x_j - a)^2, where a is the result of that average.
        every: local steps between exchanges, 1 by default. Lower `fraction` first.
        budgets: fractions for some parameters, by shell patterns of their names, such as
            {"*.bias": 1.0, "head.*": 0.0}. The first match applies. With 0 a parameter stays local.
        seed: seed of "random"; the draws also depend on the step and the bucket.
        overlap: run an exchange during the next forward and backward pass. The gradient is then of the weights before
            the exchange and is applied to the weights after it.
        warmup_steps: number of first steps of dense data-parallel training.

    Costs an allreduce of 4 bytes per selected float32 coordinate, and at least one coordinate or patch per bucket.
    "strided" also sends gaps between parameters in their turn. "drift" adds an allreduce of 4 bytes per patch, 0.2% of
    the model, and keeps a copy of the weights (float32 for half precision).

    Raises ConfigError for settings out of range and for a pattern that matches no parameter name. Sources: Beton et
    al., "Improving the Efficiency of Distributed Training using Sparse Parameter Averaging", 2025 (SPARTA, Exo Labs):
    "random", with independent draws per coordinate there; "drift" is new here.
    """

    def __init__(
        self,
        fraction: float = 0.005,
        choose: Literal["random", "strided", "drift"] = "random",
        every: int = 1,
        budgets: dict[str, float] | None = None,
        seed: int = 0,
        overlap: bool = False,
        warmup_steps: int = 0,
    ) -> None:
        self.fraction = check_fraction(fraction, "fraction")
        self.choose = choose
        self.every = check_whole(every, "every", 1)
        self.budgets = _check_budgets({} if budgets is None else budgets)
        self.seed = check_whole(seed, "seed", 0)
        self.overlap = check_flag(overlap, "overlap")
        self.warmup_steps = check_whole(warmup_steps, "warmup_steps", 0)
        if choose not in ("random", "strided", "drift"):
            raise ConfigError(f'choose must be "random", "strided" or "drift", not {choose!r}')

    def check(self, comm: Comm, names: Sequence[str]) -> None:
        for pattern in self.budgets:
            if not any(fnmatchcase(name, pattern) for name in names):
                hint = " Give named_parameters=model.named_parameters() to use the model's names."
                raise ConfigError(
                    f"budgets: no parameter's name matches {pattern!r}; they are {', '.join(map(repr, names[:4]))}"
                    f"{' ...' if len(names) > 4 else ''}.{hint if names[0] == number(0, 0) else ''}"
                )

    def kind(self, name: str, param: Tensor) -> float:
        """Return the parameter's fraction, so that each bucket has one fraction."""
        matching = (fraction for pattern, fraction in self.budgets.items() if fnmatchcase(name, pattern))
        return next(matching, self.fraction)

    def due(self, step: int) -> bool:
        return step % self.every == 0

    def arrives_alike(self, step: int) -> bool:
        return True

    def start(self, x: Tensor, ctx: Weights) -> None:
        if self.choose == "drift" and ctx.kind:
            ctx.memory.hold("anchor", lambda segment: segment.view(x))

    def exchange(self, x: Tensor, ctx: Weights) -> Exchange:
        fraction = ctx.kind
        assert isinstance(fraction, float)
        if fraction == 0:
            return x
        chosen: Tensor | slice
        if self.choose == "random":
            chosen = sent(self._drawn(fraction, ctx), x.device)
        elif self.choose == "strided":
            chosen = self._next(fraction, ctx)
        else:
            chosen = yield from self._farthest(fraction, x, ctx)
        x[chosen] = yield from mean(x[chosen].contiguous(), ctx)
        return x

    def _drawn(self, fraction: float, ctx: Weights) -> Tensor:
        """Draw one coordinate from each of k spans of n / k neighbours, with k random numbers."""
        numels = torch.tensor([segment.numel for segment in ctx.segments])
        ends = numels.cumsum(0)
        n = int(ends[-1])
        k = count_of(fraction, n)
        cuts = torch.arange(k + 1) * n // k
        draws = torch.randint(2**62, (k + 1,), generator=ctx.generator(self.seed))
        # a random offset of the first span: coordinates of a shorter span would be drawn more often
        places = (cuts[:-1] + draws[:-1] % cuts.diff() + draws[-1]) % n
        gaps = torch.tensor([segment.start for segment in ctx.segments]) - (ends - numels)
        return places + gaps[torch.searchsorted(ends, places, right=True)]

    def _next(self, fraction: float, ctx: Weights) -> slice:
        """Return the coordinates whose turn it is."""
        period = min(round(1 / fraction), ctx.numel)
        return slice((ctx.step // self.every - 1) % period, None, period)

    def _farthest(self, fraction: float, x: Tensor, ctx: Weights) -> Exchange:
        """Return the k patches that have moved most since their last average; ties go to the first."""
        anchor = ctx.memory.hold("anchor")
        moved = [(x[i] - anchor[i]).square_().view(-1, BLOCK).sum(1) for i in chunks(0, ctx.numel, x.device)]
        width = PATCH // BLOCK
        blocks = torch.nn.functional.pad(torch.cat(moved), (0, -ctx.numel // BLOCK % width)).view(-1, width)
        drift = yield from mean(blocks.sum(1).float(), ctx)
        x[:1] += 0 * drift.sum()  # NaN or Inf that arrives here skips the round, too
        farthest = drift.argsort(descending=True, stable=True)[: count_of(fraction, len(drift))]
        chosen = (farthest.unsqueeze(1) * PATCH + torch.arange(PATCH, device=x.device)).view(-1)
        chosen = chosen[chosen < ctx.numel]
        ctx.memory.on_commit(lambda: anchor.index_copy_(0, chosen, x[chosen].to(anchor.dtype)))  # averaged by then
        return chosen


def _check_budgets(budgets: Any) -> dict[str, float]:
    """Return fractions by pattern. Raises ConfigError for anything else."""
    if not isinstance(budgets, dict) or not all(isinstance(pattern, str) for pattern in budgets):
        raise ConfigError(f'budgets must be fractions by pattern, such as {{"*.bias": 1.0}}, not {budgets!r}')
    for pattern, fraction in budgets.items():
        if not is_number(fraction) or not 0 <= fraction <= 1:
            raise ConfigError(f"budgets[{pattern!r}] must be a number from 0 to 1, not {fraction!r}")
    return {pattern: float(fraction) for pattern, fraction in budgets.items()}
