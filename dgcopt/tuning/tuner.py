"""The state machine of `Auto`: times steps, lets candidates take turns, changes to the fastest; alike on all ranks."""

from __future__ import annotations

import csv
import logging
import statistics
from collections.abc import Generator, Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ..collectives import Collective
from ..comm import Comm
from ..compressors.tuner import Change
from . import clock
from .candidate import Candidate, Candidates
from .forecast import Forecast, in_words, largest
from .trials import WINDOW, Phase, Trials

__all__ = ["AutoTuner"]

log = logging.getLogger("dgcopt")

COLUMNS = (
    *("step", "compressor", "hierarchical", "overlap", "bucket_mb", "first_bucket_mb"),
    *("predicted_seconds", "measured_seconds", "chosen"),
)
"""Columns of the file of trials."""


class AutoTuner:
    """The choice of an `Auto` on one rank; see `dgcopt.compressors.tuner.Tuner`."""

    def __init__(self, auto: Candidates, names: Mapping[Tensor, str], comm: Comm, fixed_sizes: bool) -> None:
        self.auto = auto
        self.comm = comm
        self.watching = False
        self._names = names
        self._candidates: dict[str, Candidate] = {}
        self._forecast = Forecast(auto, names, comm, fixed_sizes)
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
                (level,) = yield from largest([statistics.median(self._window)], "seconds of a step")
                self._window = []
                self._trials = before.window(level)
                if self._trials.phase is Phase.WATCH:
                    self._tell(
                        f"step {step}: a step takes {in_words(level)} with {before.chosen}, and took "
                        f"{in_words(before.level)}: the link is measured again"
                    )
            return None
        if before.phase is Phase.WATCH and not before.settling:
            self._note_profile()
        (seconds,) = yield from largest([seconds], "seconds of a step")
        self._trials = before.timed(seconds)
        if self._trials.phase is Phase.PREDICT:
            profiles, self._profiles = self._profiles, []
            names = yield from self._forecast.predict(profiles, self._trials.level)
            self._candidates |= self._forecast.candidates
            self._trials = self._trials.shortlisted(names, self._forecast.seconds)
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
        keeps_residual = all(
            auto.inner.residual_content(one) == made.residual_content(other) for one, other in kinds.values()
        )
        return Change(lambda: auto.use(candidate), keeps_residual)

    # -- the choice --------------------------------------------------------------------------------------------------

    def _decided(self, step: int) -> None:
        """Say the choice, and append it to the file of trials."""
        trials, predicted = self._trials, self._forecast.seconds
        tried = trials.seconds()
        plain, chosen = trials.fallback, trials.chosen
        others = ", ".join(
            f"{name} {in_words(seconds)}" for name, seconds in sorted(tried.items(), key=lambda one: one[1])
        )
        if not tried:
            best = min(predicted, key=lambda name: predicted[name])
            why = f"no other exchange is predicted to be faster: {best} {in_words(predicted[best])}"
        elif chosen == plain:
            why = f"none is 5% faster: {others} a step"
        else:
            why = f"{tried[plain] / tried[chosen]:.2f} times as fast as {plain}: {others} a step"
        self._tell(f"step {step}: uses {chosen}, as {why}; {self._forecast.link()}")
        if self.comm.rank == 0 and self.auto.trials is not None:
            _append_trials(Path(self.auto.trials), step, self._candidates, predicted, tried, chosen)

    def _tell(self, words: str) -> None:
        self.auto.explain(words)
        if self.comm.rank == 0:
            log.info("dgcopt: auto: %s", words)

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


def _append_trials(
    path: Path,
    step: int,
    candidates: Mapping[str, Candidate],
    predicted: Mapping[str, float],
    tried: Mapping[str, float],
    chosen: str,
) -> None:
    """Append a row for each candidate. A file that cannot be written is a warning: training goes on."""
    try:
        is_new = not path.exists() or not path.stat().st_size
        with path.open("a", newline="") as file:
            rows = csv.writer(file)
            if is_new:
                rows.writerow([*COLUMNS])
            for name, seconds in predicted.items():
                one = asdict(candidates[name])
                sizes = one.pop("sizes") or ("", "")
                rows.writerow([step, *one.values(), *sizes, seconds, tried.get(name, ""), name == chosen])
    except OSError as error:
        log.warning("dgcopt: auto: cannot write trials to %s: %s", path, error.strerror)
