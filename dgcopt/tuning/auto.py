"""Auto: compressor, buckets, overlap and hierarchy, chosen from the first steps and kept while they are fastest.

Every rank takes the same numbers, the maxima over ranks, through the same pure functions (`dgcopt.tuning.trials`), so
all change at the same step. What one exchange has not sent the next one sends, or it is sent whole in one more step.
"""

from __future__ import annotations

import copy
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Literal, TypeAlias, get_args

from torch import Tensor
from torch.optim import SGD, AdamW, Optimizer

from ..comm import Comm
from ..compressors import (
    Compressor,
    Context,
    GradientExchange,
    NoCompression,
    OneBit,
    ScheduledRatio,
    Sparse,
    Wrapper,
)
from ..compressors.base import NAMED
from ..compressors.from_ddp import DDPHook
from ..compressors.own_step import updates_add_up
from ..errors import ConfigError
from ..flat.local_shard import is_sharded
from .advise import CANDIDATES
from .candidate import DDP_SIZES, DENSE, SIZES, Candidate
from .costs import LR
from .tuner import AutoTuner

__all__ = ["Auto", "Candidate"]

Allowed: TypeAlias = Literal["exact", "rounded", "sparse", "delayed"]
"""Classes of exchanges by accuracy; "sparse" are those of "delayed" that send selected coordinates."""
ALLOWED = get_args(Allowed)


class Auto(Wrapper):
    """Chooses the fastest exchange of those allowed, and the dense one in DDP's buckets where none is faster.

        dgcopt.DistributedOptimizer(optimizer, model.named_parameters(), "auto")
        dgcopt.DistributedOptimizer(optimizer, model.named_parameters(), dgcopt.Auto(allow=("exact", "sparse")))

    The first steps are dense. Then the link is probed for the time of 16 steps, at most a second, and costs are
    recorded. Up to three candidates, predicted to take at most 1.5 times as long as the best one, take turns with the
    dense exchange, six steps at a time. A candidate that takes 95% of its time or less is kept. Every 64 steps the
    seconds of a step are compared: after a change by a quarter, twice in a row, the choice is repeated, at the earliest
    after 4, 8, 16, ... times 64 steps. A log line names the choice and its reason; `reason` keeps it.

    Args:
        allow: classes of exchanges by their effect on gradients. "exact": none; "rounded": numbers of fewer bits, all
            sent in this step; "sparse": selected coordinates now, the rest in later steps; "delayed": these, and others
            with error feedback.
        compressor: a fixed compressor, for which buckets, overlap and hierarchy are chosen. None chooses it too.
        trials: a CSV file to which rank 0 appends a row for each candidate of each choice.

    Not tried: candidates that send updates in place of gradients, as sparse ones do in front of Adam, because after a
    change the optimizer's state would differ between ranks; and `OneBit` in front of Adam and other optimizers that
    scale each coordinate, because their second moment would be that of rounded gradients (Tang et al., "1-bit Adam",
    arXiv:2102.02888).

    Costs the cost of the chosen exchange, and an allreduce of 8 bytes per step while candidates are tried, and every 64
    steps afterwards. Raises ConfigError for an unknown class, for sharded parameters, for
    `dgcopt.init(survive=True)`, for a hook with state (`from_ddp_hook`), and where no tuner runs: in DDP's hook, in
    averaging, or inside another compressor.
    """

    def __init__(
        self,
        allow: Sequence[Allowed] = ("exact", "rounded"),
        compressor: Compressor | None = None,
        trials: str | None = None,
    ) -> None:
        if isinstance(allow, str) or not allow or any(one not in ALLOWED for one in allow):
            raise ConfigError(f"allow must hold some of {', '.join(map(repr, ALLOWED))}, not {allow!r}")
        if compressor is not None and (not isinstance(compressor, Compressor) or isinstance(compressor, Auto)):
            raise ConfigError(f"compressor must be a dgcopt.Compressor such as dgcopt.DGC(), not {compressor!r}")
        if compressor is not None and any(isinstance(part, DDPHook) and part.has_memory for part in compressor.parts()):
            raise ConfigError(
                "Auto records costs with gradients of its own, which would enter the state of a DDP hook: give "
                "from_ddp_hook(...) without Auto"
            )
        self.allow = tuple(allow)
        self.compressor = compressor
        self.trials = trials
        self.reason = ""
        """The last choice and its reason, as logged."""
        self.choice = self.fallback
        """The exchange in use."""
        self.sizes = self.choice.sizes
        self._optimizer: Optimizer | None = None
        self._names: Mapping[Tensor, str] = {}
        self._others: list[str] = []
        self._steps_per_epoch: int | None = None
        self._made: dict[tuple[str, bool, bool | None], Compressor] = {}
        self._has_tuner = False
        super().__init__(self.make(self.choice))

    def explain(self, reason: str) -> None:
        """Set the reason of the last choice."""
        self.reason = reason

    def __repr__(self) -> str:
        fixed = "" if self.compressor is None else f", compressor={self.compressor!r}"
        return f"Auto(allow={self.allow}{fixed}) with {self.choice.name}"

    def __deepcopy__(self, memo: dict[int, Any]) -> Auto:
        """A copy attaches to its own optimizer, and starts from the same choice."""
        twin = Auto(self.allow, copy.deepcopy(self.compressor, memo), self.trials)
        if self._steps_per_epoch is not None:
            twin.set_steps_per_epoch(self._steps_per_epoch)
        twin.use(self.choice)
        return twin

    # -- candidates --------------------------------------------------------------------------------------------------

    @property
    def fallback(self) -> Candidate:
        """The exchange that others must be faster than."""
        if self.compressor is not None:
            return Candidate(repr(self.compressor))
        return Candidate(DENSE, sizes=DDP_SIZES)

    def bases(self) -> dict[str, Compressor]:
        """Return the compressors allowed, by name."""
        if self.compressor is not None:
            return {repr(self.compressor): self.compressor}
        found: dict[str, Compressor] = {}
        for name, (accuracy, build) in CANDIDATES.items():
            made = build()
            is_sparse = accuracy == "delayed" and isinstance(made, Sparse | ScheduledRatio)
            if accuracy in self.allow or (is_sparse and "sparse" in self.allow):
                found[name] = made
        return found

    def candidates(self, hierarchical: bool, fixed_sizes: bool) -> list[Candidate]:
        """Return all candidates; `hierarchical` ones too if machines have several ranks each."""
        found = [self.fallback]
        is_adaptive = self._optimizer is not None and updates_add_up(self._optimizer)
        for name, base in self.bases().items():
            if self.compressor is None and is_adaptive and isinstance(base, OneBit):
                continue
            for within in (False, True) if hierarchical else (False,):
                one = self.make(Candidate(name, within))
                if one.sends == "update":
                    continue
                for overlap in (None,) if one.whole_model else (True, False):
                    found += [Candidate(name, within, overlap, sizes) for sizes in ((None,) if fixed_sizes else SIZES)]
        return found

    def make(self, candidate: Candidate) -> Compressor:
        """Return the compressor of a candidate, attached to the optimizer if there is one."""
        key = (candidate.base, candidate.hierarchical, candidate.overlap)
        if key not in self._made:
            base = NoCompression() if candidate.base == DENSE else self.bases().get(candidate.base)
            if base is None:
                raise ConfigError(
                    f"the choice {candidate.base} is none of {self!r:.200}: give the same allow and compressor as the "
                    f"run that saved it"
                )
            made = candidate.built_on(copy.deepcopy(base))
            if self._optimizer is not None:
                made.see_parameters(self._names, self._others)
                made.attach(self._optimizer)
            if self._steps_per_epoch is not None:
                made.set_steps_per_epoch(self._steps_per_epoch)
            self._made[key] = made
        return self._made[key]

    def make_optimizer(self, params: Iterable[Tensor]) -> Optimizer:
        """Return an optimizer to record costs with: like the attached one, as far as compressors ask for one."""
        assert self._optimizer is not None
        group = self._optimizer.param_groups[0]
        if "betas" in group and updates_add_up(self._optimizer):
            return AdamW(params, lr=LR)
        return SGD(params, lr=LR, momentum=0.9 if group.get("momentum") else 0.0)

    def use(self, candidate: Candidate) -> None:
        """Exchange by a candidate from now on."""
        self.inner, self.choice, self.sizes = self.make(candidate), candidate, candidate.sizes
        self._follow()

    # -- as the compressor in use ------------------------------------------------------------------------------------

    def see_parameters(self, names: Mapping[Tensor, str], others: Any = ()) -> None:
        self._names = names
        self._others += others
        for made in self._made.values():
            made.see_parameters(names, others)

    def attach(self, optimizer: Optimizer) -> None:
        self._optimizer = optimizer
        for made in self._made.values():
            made.attach(optimizer)
        self._follow()

    def set_steps_per_epoch(self, steps: int) -> None:
        self._steps_per_epoch = steps
        for made in self._made.values():
            made.set_steps_per_epoch(steps)

    @property
    def conserves(self) -> bool:
        return self.inner.conserves

    @property
    def mixes(self) -> bool:
        return self.inner.mixes

    def adds_up(self, kind: Any) -> bool:
        return self.inner.adds_up(kind)

    def exchange(self, grad: Tensor, ctx: Context) -> GradientExchange:
        if not self._has_tuner:
            raise ConfigError(
                "Auto chooses at the steps of DistributedOptimizer, and is given as its compression. DDP's hook, "
                "averaging and other compressors need a compressor that does not change: `dgcopt doctor` recommends one"
            )
        return (yield from self.inner.exchange(grad, ctx))

    def tuner(self, names: Mapping[Tensor, str], comm: Comm, fixed_sizes: bool) -> AutoTuner:
        if comm.survives:
            raise ConfigError(
                "Auto cannot choose where ranks may be lost, as newcomers do not know the choice: give a compressor in "
                "place of Auto, or leave out dgcopt.init(survive=True)"
            )
        if comm.joins_replicas or any(map(is_sharded, names)):
            raise ConfigError("Auto cannot choose for sharded parameters: give a compressor in place of it")
        self._has_tuner = True
        return AutoTuner(self, names, comm, fixed_sizes)


NAMED["auto"] = Auto
