"""The states of a choice among exchanges: pure values, advanced by numbers that all ranks have agreed on.

WATCH     steps with the exchange in use are timed
PREDICT   the cost model makes a shortlist
TRY       the candidates of the shortlist take turns, in this order and then in the reverse one
KEEP      the fastest stays, until the seconds of a step drift
"""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from enum import Enum

__all__ = ["DRIFT", "MARGIN", "MEASURED", "SETTLING", "WINDOW", "Phase", "Trials"]

SETTLING = 2
"""First steps of a turn that do not count: buckets are laid out, and memory is allocated."""
MEASURED = 4
"""Steps of a turn that count."""
WINDOW = 64
"""Steps between two looks at the seconds of a step, once a candidate is chosen."""
MARGIN = 0.95
"""A candidate replaces another one if its step takes at most this share of the other's."""
DRIFT = 1.25
"""Ratio of two windows' seconds beyond which the link, or the model, is taken to have changed."""
UNSTEADY = 1.5
"""Ratio of a candidate's seconds in its two turns beyond which the link has changed while it was tried, if each step of
one turn was slower than each of the other."""
RESTARTS = 2
"""Number of times that trials start anew because the link changed meanwhile; then the later turns decide."""
TOO_SLOW = 3.0
"""A turn ends early once a step takes this many times as long as the fallback's."""
PAUSE, LONGEST_PAUSE = 4, 1024
"""Windows from one tuning to the next: doubled each time, so that tuning takes an ever smaller share of the time."""


class Phase(Enum):
    """The purpose of the next steps."""

    WATCH = "watch"
    PREDICT = "predict"
    TRY = "try"
    KEEP = "keep"


@dataclass(frozen=True)
class Trials:
    """A choice among candidates, which are known by name; the same on all ranks.

    Attributes:
        fallback: the candidate that is always among those tried: the exchange of DistributedDataParallel.
        chosen: the candidate of the last choice.
        phase: see the module.
        order: candidates in the order of their turns.
        turns: seconds of the steps of each turn so far; the last one is under way.
        settling: steps that do not count before the next one that does.
        level: seconds of a step with the chosen one, when it was watched or when the choice was made; 0.0 before.
        drifted: windows in a row that were off this level.
        windows: since the choice.
        pause: windows after which trials may start again.
        restarts: because the link changed during trials.
    """

    fallback: str
    chosen: str
    phase: Phase = Phase.WATCH
    order: tuple[str, ...] = ()
    turns: tuple[tuple[float, ...], ...] = ((),)
    settling: int = SETTLING
    level: float = 0.0
    drifted: int = 0
    windows: int = 0
    pause: int = PAUSE
    restarts: int = 0

    @property
    def running(self) -> str:
        """The candidate of the next steps."""
        return self.order[len(self.turns) - 1] if self.phase is Phase.TRY else self.chosen

    def watch(self) -> Trials:
        """Start over with the candidate in use."""
        return replace(self, phase=Phase.WATCH, order=(), turns=((),), settling=SETTLING, drifted=0)

    def timed(self, seconds: float) -> Trials:
        """Count the seconds of one step of the slowest rank, while watching or trying."""
        if self.settling:
            return replace(self, settling=self.settling - 1)
        turn = (*self.turns[-1], seconds)
        after = replace(self, turns=(*self.turns[:-1], turn))
        first = self.order[:1] == (self.fallback,) and len(self.turns) > 1
        too_slow = first and seconds > TOO_SLOW * statistics.median(self.turns[0])
        if len(turn) < MEASURED and not too_slow:
            return after
        if self.phase is Phase.WATCH:
            return replace(after, phase=Phase.PREDICT, turns=((),), settling=SETTLING, level=statistics.median(turn))
        if len(self.turns) < len(self.order):
            return replace(after, turns=(*after.turns, ()), settling=SETTLING)
        return after._decided()

    def shortlisted(self, names: Sequence[str], predicted: Mapping[str, float]) -> Trials:
        """Try some candidates, the fallback and the one in use; keep the one in use if there is no other."""
        tried = [*dict.fromkeys([self.fallback, self.chosen, *names])]
        if len(tried) == 1:
            return self._keeping(self.chosen, predicted.get(self.chosen, 0.0))
        return replace(self, phase=Phase.TRY, order=(*tried, *reversed(tried)), turns=((),), settling=SETTLING)

    def seconds(self, later: bool = False) -> dict[str, float]:
        """Return the median seconds of each candidate's steps: of both turns, or of the later one."""
        found: dict[str, list[float]] = {}
        half = len(self.order) // 2
        for place, (name, turn) in enumerate(zip(self.order, self.turns, strict=False)):
            if turn and (place >= half or not later):
                found.setdefault(name, []).extend(turn)
        return {name: statistics.median(seconds) for name, seconds in found.items()}

    def steady(self) -> bool:
        """Return True if every candidate took about as long in its second turn as in the first.

        Other work on a machine slows down some steps of a turn, another link all of them.
        """
        for turns in zip(self.turns, reversed(self.turns), strict=True):
            fast, slow = sorted(turns, key=statistics.median)
            if statistics.median(slow) > UNSTEADY * statistics.median(fast) and min(slow) > max(fast):
                return False
        return True

    def _decided(self) -> Trials:
        """Choose, or start anew if the link has changed meanwhile."""
        steady = self.steady()
        if not steady and self.restarts < RESTARTS:
            return replace(self.watch(), restarts=self.restarts + 1)
        found = self.seconds(later=not steady)
        best, plain, held = min(found, key=lambda name: found[name]), self.fallback, self.chosen
        if found[best] > MARGIN * found[plain]:
            best = plain
        elif held != plain and found[held] < MARGIN * found[plain] and found[best] > MARGIN * found[held]:
            best = held
        return self._keeping(best, found[best])

    def kept(self, level: float, pause: int) -> Trials:
        """Return the state after a choice that was made before, as a checkpoint tells."""
        return replace(self._keeping(self.chosen, level), pause=pause, windows=1)

    def _keeping(self, name: str, level: float) -> Trials:
        return replace(
            self, phase=Phase.KEEP, chosen=name, level=level, drifted=0, windows=0, restarts=0, settling=SETTLING
        )

    def window(self, seconds: float) -> Trials:
        """Count a window of steps with the chosen candidate, by their median seconds; watch again after a drift.

        Two windows in a row must be off. The first window sets the level of a choice that no trial was needed for.
        """
        if not self.windows and not self.order:
            return replace(self, level=seconds, windows=1)
        off = max(seconds, self.level) > DRIFT * min(seconds, self.level)
        after = replace(self, windows=self.windows + 1, drifted=self.drifted + 1 if off else 0)
        if after.drifted >= 2 and after.windows >= self.pause:
            return replace(after.watch(), pause=min(2 * self.pause, LONGEST_PAUSE))
        return after
