"""Auto: compressor, buckets, overlap and hierarchy, chosen from the first steps and kept while they are fastest.

The first steps are those of DistributedDataParallel: dense, in its buckets. They are timed. Then the link is probed,
the candidates' costs are recorded on a copy of the parameters' shapes, and the cost model predicts their steps
(`dgcopt.tuning.timeline`). The best take turns with the dense exchange. Every rank takes the same numbers, the maxima
over ranks, through the same pure functions (`dgcopt.tuning.trials`), so all change at the same step. What one exchange
has not sent the next one sends, or it is sent whole in one more step.
"""

from __future__ import annotations

import copy
import csv
import logging
import statistics
from collections.abc import Generator, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, Literal, TypeAlias

import torch
from torch import Tensor
from torch.optim import Optimizer

from ..collectives import AllReduce, Collective, Link
from ..comm import Comm
from ..compressors import (
    Compressor,
    Context,
    GradientExchange,
    Hierarchical,
    NoCompression,
    ScheduledRatio,
    Sparse,
    Wrapper,
)
from ..compressors.base import NAMED
from ..compressors.tuner import Change
from ..errors import ConfigError
from ..flat.local_shard import is_sharded
from . import clock
from .advise import CANDIDATES, LANES, Setting, rate
from .costs import Recipe, record_recipe
from .probe import measurements
from .profile import Profile
from .timeline import fill_buckets
from .trials import WINDOW, Phase, Trials
from .wire import Fitted

__all__ = ["Auto", "Candidate"]

log = logging.getLogger("dgcopt")

Allowed: TypeAlias = Literal["exact", "rounded", "sparse", "delayed"]
"""Classes of exchanges by accuracy; "sparse" are those of "delayed" that send selected coordinates."""
ALLOWED = ("exact", "rounded", "sparse", "delayed")

DENSE = "NoCompression()"
DDP_SIZES = (25.0, 1.0)
"""Megabytes of DistributedDataParallel's buckets, and of the first one."""
SIZES = (None, (5.0, 1.0), (25.0, 1.0), (25.0, 25.0), (100.0, 100.0))
"""Megabytes per bucket and in the first one that are tried; None leaves them to the layout."""
TRIED = 3
"""Candidates tried beside the fallback and the one in use."""
HOPELESS = 1.1
"""Candidates predicted to take more than this many times the fallback's step are not tried."""
PROBE_SECONDS = 1.0
RECORDED = 2**22
"""Elements of the shapes on which costs are recorded; larger models are recorded at a fraction of their sizes."""


@dataclass(frozen=True)
class Candidate:
    """One exchange with its settings.

    Attributes:
        base: the compressor, as a user would write it.
        hierarchical: averages inside machines first, and exchanges between machines.
        overlap: launch buckets during backward; None leaves it to the compressor.
        sizes: megabytes per bucket, and of the first one; None leaves them to the layout.
    """

    base: str
    hierarchical: bool = False
    overlap: bool | None = None
    sizes: tuple[float, float] | None = None

    @property
    def name(self) -> str:
        """The exchange in words."""
        words = f"Hierarchical({self.base})" if self.hierarchical else self.base
        if self.sizes is not None:
            words += ", buckets of {:g} MB, the first of {:g}".format(*self.sizes)
        if self.overlap is not None:
            words += ", during backward" if self.overlap else ", after backward"
        return words


class Auto(Wrapper):
    """Chooses the fastest exchange of those allowed, and the dense one in DDP's buckets where none is faster.

        dgcopt.DistributedOptimizer(optimizer, model.named_parameters(), "auto")
        dgcopt.DistributedOptimizer(optimizer, model.named_parameters(), dgcopt.Auto(allow=("exact", "sparse")))

    The first steps are dense. Then a second goes into a probe of the link and some into recording costs; up to three
    candidates take turns with the dense exchange, six steps at a time. One that takes 95% of its time or less is kept.
    Every 64 steps the seconds of a step are compared: after a change by a quarter, twice in a row, all of this is done
    anew, at most after 4, 8, 16, ... times 64 steps. A log line says the choice and its reason; `reason` keeps it.

    Args:
        allow: classes of exchanges by their effect on gradients. "exact": none; "rounded": numbers of fewer bits, all
            sent in this step; "sparse": selected coordinates now, the rest in later steps; "delayed": these, and others
            with error feedback.
        compressor: the only compressor to use: buckets, overlap and hierarchy are chosen then. None chooses it too.
        trials: a CSV file to which rank 0 appends a row for each candidate of each choice.

    Candidates that send updates in place of gradients, as sparse ones do in front of Adam, are left out: after a change
    the optimizer's state would differ between ranks.

    Costs, beside the chosen exchange's, 8 bytes by allreduce per step while candidates are tried, and every 64 steps
    afterwards. Raises ConfigError for an unknown class, for sharded parameters, for ranks that may be lost
    (`dgcopt.init(survive=True)`), and where no tuner runs: in DDP's hook, in averaging, or inside another compressor.
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
        self.allow = tuple(allow)
        self.compressor = compressor
        self.trials = trials
        self.reason = ""
        """The last choice and its reason, as logged."""
        self.choice = Candidate(DENSE, sizes=DDP_SIZES) if compressor is None else Candidate(repr(compressor))
        """The exchange in use."""
        self.sizes = self.choice.sizes
        self._optimizer: Optimizer | None = None
        self._names: Mapping[Tensor, str] = {}
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
        for name in self.bases():
            for within in (False, True) if hierarchical else (False,):
                one = self.make(Candidate(name, within))
                if one.sends == "update":
                    continue
                for overlap in (None,) if one.whole_model else (True, False):
                    found += [Candidate(name, within, overlap, sizes) for sizes in (None,) if fixed_sizes]
                    found += [Candidate(name, within, overlap, sizes) for sizes in SIZES if not fixed_sizes]
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
            base = copy.deepcopy(base)
            made = Hierarchical(base) if candidate.hierarchical else base
            if candidate.overlap is not None:
                for part in made.parts():
                    part.overlap = candidate.overlap
            if self._optimizer is not None:
                made.see_parameters(self._names)
                made.attach(self._optimizer)
            if self._steps_per_epoch is not None:
                made.set_steps_per_epoch(self._steps_per_epoch)
            self._made[key] = made
        return self._made[key]

    def use(self, candidate: Candidate) -> None:
        """Exchange by a candidate from now on."""
        self.inner, self.choice, self.sizes = self.make(candidate), candidate, candidate.sizes
        self._follow()

    # -- as the compressor in use ------------------------------------------------------------------------------------

    def see_parameters(self, names: Mapping[Tensor, str], others: Any = ()) -> None:
        self._names = names
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


class AutoTuner:
    """The choice of an `Auto` on one rank; see `dgcopt.compressors.tuner.Tuner`."""

    def __init__(self, auto: Auto, names: Mapping[Tensor, str], comm: Comm, fixed_sizes: bool) -> None:
        self.auto = auto
        self.comm = comm
        self.watching = False
        self._names = names
        self._fixed_sizes = fixed_sizes
        self._candidates: dict[str, Candidate] = {}
        self._predicted: dict[str, float] = {}
        self._wire = Fitted()
        self._recorded: tuple[Mapping[str, tuple[int, ...]], dict[tuple[str, bool], Recipe]] = ({}, {})
        self._begin(auto.choice)

    def _begin(self, candidate: Candidate) -> None:
        """Watch the steps of a candidate, and choose then."""
        self._candidates |= {one.name: one for one in (self.auto.fallback, candidate)}
        self._trials = Trials(self.auto.fallback.name, candidate.name)
        self._window: list[float] = []
        self._profiles: list[tuple[float, dict[str, float]]] = []
        self._since: float | None = None
        self._start: Any = None
        self._end: Any = None
        self._arrivals: dict[str, Any] = {}
        self.watching = self.comm.size > 1

    # -- during a step -----------------------------------------------------------------------------------------------

    @property
    def _device(self) -> torch.device:
        return next(iter(self._names)).device

    def arrived(self, param: Tensor) -> None:
        self._arrivals[self._names[param]] = clock.mark(param.device)

    def synchronizing(self) -> None:
        self._end = clock.mark(self._device)

    def _note_profile(self) -> None:
        """Keep the times of this step's gradients."""
        if self._start is not None and self._end is not None and self._arrivals:
            seconds = clock.between(self._start, self._end)
            ready = {name: clock.between(self._start, one) for name, one in self._arrivals.items()}
            self._profiles.append((seconds, ready))

    def stepped(self, step: int) -> Generator[Collective, Tensor, Change | None]:
        if self.comm.size == 1:
            return None
        change = yield from self._stepped(step)
        self.watching = self._trials.phase is Phase.WATCH
        self._since, self._arrivals, self._end = clock.now(), {}, None
        self._start = clock.mark(self._device) if self.watching else None
        return change

    def _stepped(self, step: int) -> Generator[Collective, Tensor, Change | None]:
        if self._since is None:  # the first step, before which nothing was timed
            return None
        seconds, before = clock.now() - self._since, self._trials
        if before.phase is Phase.KEEP:
            self._window.append(seconds)
            if len(self._window) == WINDOW:
                (level,) = yield from self._most([statistics.median(self._window)], "seconds of a step")
                self._window = []
                self._trials = before.window(level)
                if self._trials.phase is Phase.WATCH:
                    self._tell(
                        f"step {step}: a step takes {_time(level)} with {before.chosen}, and took "
                        f"{_time(before.level)}: the link is measured again"
                    )
            return None
        if before.phase is Phase.WATCH and not before.settling:
            self._note_profile()
        (seconds,) = yield from self._most([seconds], "seconds of a step")
        self._trials = before.timed(seconds)
        if self._trials.phase is Phase.PREDICT:
            names = yield from self._predict()
            self._trials = self._trials.shortlisted(names, self._predicted)
        elif self._trials.phase is Phase.WATCH and before.phase is Phase.TRY:
            self._tell(f"step {step}: the link has changed while exchanges were tried; they are tried again")
        if self._trials.phase is Phase.KEEP:
            self._decided(step)
        return self._change()

    def _change(self) -> Change | None:
        """Return the change to the candidate of the next steps, if it is not in use."""
        candidate, auto = self._candidates[self._trials.running], self.auto
        if candidate == auto.choice:
            return None
        made = auto.make(candidate)
        kinds = {name: (auto.inner.kind(name, p), made.kind(name, p)) for p, name in self._names.items()}
        moves = all(auto.inner.holds_back(one) == made.holds_back(other) for one, other in kinds.values())
        return Change(lambda: auto.use(candidate), moves)

    def _most(self, numbers: Sequence[float], label: str) -> Generator[Collective, Tensor, list[float]]:
        """Return the largest of all ranks' numbers, each."""
        mine = torch.tensor(numbers, dtype=torch.float64)
        most = yield AllReduce(mine, op="max", group="control", label=label)
        return list(map(float, most.tolist()))

    # -- the choice --------------------------------------------------------------------------------------------------

    def _predict(self) -> Generator[Collective, Tensor, list[str]]:
        """Measure the link, predict all candidates, and return the names of the best."""
        auto, comm = self.auto, self.comm
        shapes = {name: tuple(p.shape) for p, name in self._names.items() if p.requires_grad and p.numel()}
        by_name = {one.name: one for one in auto.candidates(self._has_machines(), self._fixed_sizes)}
        if self._recorded[0] != shapes:
            self._recorded = shapes, self._record(shapes, list(by_name.values()))
            yield from self._agree_on_costs(self._recorded[1])
        recipes = self._recorded[1]
        kinds = {one.kind for recipe in recipes.values() for place in recipe.low.rounds for one in place}
        largest = 4 * sum(torch.Size(shape).numel() for shape in shapes.values())
        kinds |= {"AllGather"}  # of votes
        self._wire = yield from measurements(comm, sorted(kinds), PROBE_SECONDS, self._device, largest)
        model = (yield from self._agree_on_profile(shapes)).model("auto")
        local = comm.local_size if self._has_machines() else 1
        setting = Setting(model, comm.size, self._wire, local, lanes=LANES)
        found: dict[str, float] = {}
        seen: dict[Any, str] = {}  # the first candidate of those that send the same buckets at the same time
        for name, one in by_name.items():
            recipe = recipes[one.base, one.hierarchical]
            sizes = one.sizes or (recipe.bucket_mb, recipe.first_bucket_mb)
            overlap = recipe.overlap if one.overlap is None else one.overlap
            buckets = [bucket.numel for bucket in fill_buckets(model.parameters(), *sizes)]
            if seen.setdefault((one.base, one.hierarchical, overlap, *buckets), name) == name:
                as_set = replace(recipe, bucket_mb=sizes[0], first_bucket_mb=sizes[1], overlap=overlap)
                found[name] = setting.step(as_set).seconds
        self._candidates |= by_name
        self._predicted = found
        limit = HOPELESS * found[auto.fallback.name]
        best: dict[Any, str] = {}  # of each compressor, or of each way to send it if there is one only
        for name in sorted(found, key=lambda name: found[name]):
            one = by_name[name]
            key = name if auto.compressor is not None else (one.base, one.hierarchical)
            if found[name] <= limit and name != auto.fallback.name:
                best.setdefault(key, name)
        return [*best.values()][:TRIED]

    def _has_machines(self) -> bool:
        """True if there are several machines with several ranks each, as many on all."""
        comm = self.comm
        return comm.nodes > 1 and comm.local_size > 1 and comm.size == comm.nodes * comm.local_size

    def _record(
        self, shapes: Mapping[str, tuple[int, ...]], candidates: Sequence[Candidate]
    ) -> dict[tuple[str, bool], Recipe]:
        """Record the costs of each compressor on this rank, without a network."""
        comm, found = self.comm, {}
        shrunk, factor = shrink(shapes, RECORDED)
        local = comm.local_size if self._has_machines() else 1
        for key in dict.fromkeys((one.base, one.hierarchical) for one in candidates):
            with quiet(), torch.enable_grad():
                made = copy.deepcopy(self.auto.make(Candidate(*key)))
                recipe = record_recipe(
                    *(key[0], "", shrunk, made, (comm.size,)),
                    local_size=local,
                    link=comm.link or Link(),
                    device=self._device,
                    clock=clock.now,
                )
            found[key] = grow(recipe, factor)
        return found

    def _agree_on_costs(self, recipes: dict[tuple[str, bool], Recipe]) -> Generator[Collective, Tensor, None]:
        """Replace seconds by those of the slowest rank."""
        numbers = [n for one in recipes.values() for n in (one.low.encode, one.low.step, *one.low.decode)]
        agreed = iter((yield from self._most(numbers, "costs of exchanges")))
        for key, recipe in recipes.items():
            low = recipe.low
            low = replace(low, encode=next(agreed), step=next(agreed), decode=[next(agreed) for _ in low.decode])
            recipes[key] = replace(recipe, low=low, high=low)

    def _agree_on_profile(self, shapes: Mapping[str, tuple[int, ...]]) -> Generator[Collective, Tensor, Profile]:
        """Return the fastest watched step of the slowest rank, with the times when gradients were ready."""
        seconds, ready = min(self._profiles, key=lambda one: one[0], default=(0.0, {}))
        self._profiles = []
        mine = [seconds, *(min(ready.get(name, seconds), seconds) for name in shapes)]
        compute, *times = yield from self._most(mine, "times of gradients")
        return Profile(shapes, dict(zip(shapes, times, strict=True)), max(compute, 1e-9))

    def _decided(self, step: int) -> None:
        """Say the choice, and append it to the file of trials."""
        trials, predicted = self._trials, self._predicted
        tried = trials.seconds()
        plain, chosen = trials.fallback, trials.chosen
        others = ", ".join(
            f"{name} {_time(seconds)}" for name, seconds in sorted(tried.items(), key=lambda one: one[1])
        )
        if not tried:
            best = min(predicted, key=lambda name: predicted[name])
            why = f"no other exchange is predicted to be faster: {best} {_time(predicted[best])}"
        elif chosen == plain:
            why = f"none is 5% faster: {others} a step"
        else:
            why = f"{tried[plain] / tried[chosen]:.2f} times as fast as {plain}: {others} a step"
        self._tell(f"step {step}: uses {chosen}, as {why}; {self._link()}")
        if self.comm.rank == 0 and self.auto.trials is not None:
            self._append(Path(self.auto.trials), step, tried)

    def _link(self) -> str:
        """Return the measured link in words."""
        one = self._wire.fits.get(("AllReduce", "world")) or next(iter(self._wire.fits.values()), None)
        if one is None:
            return "the link was not measured"
        return f"link: {_time(one.alpha)} latency, {rate(1 / one.beta) if one.beta else 'any rate'}"

    def _tell(self, words: str) -> None:
        self.auto.explain(words)
        if self.comm.rank == 0:
            log.info("dgcopt: auto: %s", words)

    def _append(self, path: Path, step: int, tried: Mapping[str, float]) -> None:
        """Append a row for each candidate. A file that cannot be written is a warning: training goes on."""
        try:
            is_new = not path.exists() or not path.stat().st_size
            with path.open("a", newline="") as file:
                rows = csv.writer(file)
                if is_new:
                    rows.writerow([*COLUMNS])
                for name, seconds in self._predicted.items():
                    one = asdict(self._candidates[name])
                    sizes = one.pop("sizes") or ("", "")
                    rows.writerow(
                        [step, *one.values(), *sizes, seconds, tried.get(name, ""), name == self._trials.chosen]
                    )
        except OSError as error:
            log.warning("dgcopt: auto: cannot write trials to %s: %s", path, error.strerror)

    # -- checkpoints -------------------------------------------------------------------------------------------------

    def state(self) -> dict[str, Any]:
        trials = self._trials
        is_settled = trials.phase is Phase.KEEP and trials.chosen == self.auto.choice.name
        return {
            "choice": asdict(self.auto.choice),
            "level": trials.level if is_settled else 0.0,
            "pause": trials.pause,
            "size": self.comm.size,
        }

    def restore(self, state: dict[str, Any] | None) -> None:
        if state is None:
            self.auto.use(self.auto.fallback)
            self._begin(self.auto.choice)
            return
        saved = state["choice"]
        sizes = saved["sizes"]
        candidate = Candidate(**{**saved, "sizes": None if sizes is None else tuple(sizes)})
        self.auto.use(candidate)
        self._begin(candidate)
        if state["level"] and state["size"] == self.comm.size:
            self._trials = self._trials.kept(state["level"], state["pause"])
            self.watching = False


COLUMNS = (
    *("step", "compressor", "hierarchical", "overlap", "bucket_mb", "first_bucket_mb"),
    *("predicted_seconds", "measured_seconds", "chosen"),
)
"""Columns of the file of trials."""


def shrink(shapes: Mapping[str, tuple[int, ...]], most: int) -> tuple[dict[str, tuple[int, ...]], float]:
    """Return shapes of about `most` elements in all, of shorter first dimensions, and the factor to the given ones."""
    total = sum(torch.Size(shape).numel() for shape in shapes.values())
    if total <= most:
        return dict(shapes), 1.0
    found = {
        name: (max(1, round(shape[0] * most / total)), *shape[1:]) if len(shape) > 1 else shape
        for name, shape in shapes.items()
    }
    return found, total / sum(torch.Size(shape).numel() for shape in found.values())


def grow(recipe: Recipe, factor: float) -> Recipe:
    """Return the recipe of a model `factor` times as large."""
    low = recipe.low
    rounds = [[replace(one, nbytes=one.nbytes * factor) for one in place] for place in low.rounds]
    decode = [seconds * factor for seconds in low.decode]
    low = replace(low, rounds=rounds, encode=low.encode * factor, decode=decode, step=low.step * factor)
    return replace(recipe, low=low, high=low)


@contextmanager
def quiet() -> Iterator[None]:
    """Context in which optimizers that are only recorded log nothing."""
    before = log.level
    log.setLevel(logging.ERROR)
    try:
        yield
    finally:
        log.setLevel(before)


def _time(seconds: float) -> str:
    return f"{seconds:.3g} s" if seconds >= 1 else f"{1e3 * seconds:.3g} ms"
