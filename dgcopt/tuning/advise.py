"""The choice among exchanges: predicted seconds of each, and whether any of them pays."""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from ..compressors import BF16, DGC, QSGD, ByteGrad, Compressor, Hierarchical, NoCompression, OneBit, PowerSGD
from ..errors import ConfigError
from .costs import Recipe, conditions_of, ddp_recipes, record_recipe
from .models import Model
from .timeline import Timeline, break_even, fill_buckets, timeline
from .wire import Fitted, Network, Wire

__all__ = [
    "ACCURACY",
    "BASELINES",
    "CANDIDATES",
    "HIERARCHICAL",
    "Prediction",
    "Setting",
    "check_allowed",
    "check_candidates",
    "in_words",
    "local_steps",
    "predict",
    "rate",
    "recipes_of",
    "recommend",
    "table",
]

ACCURACY = ("exact", "rounded", "delayed", "lossy")
"""The effect of an exchange on gradients: none; each number is rounded, without bias or to 16 bits; part of them is
sent later (error feedback); part of them is lost."""

DENSE = "DDP bf16"
"""The exchange that others are compared with: bfloat16, in overlapped buckets."""
BASELINES = ("DDP fp32", DENSE)
MARGIN = 0.95
"""An exchange pays if its step takes at most this share of the dense ones': less is within the error of predictions."""
LANES = 2
"""Collectives that Gloo runs at once."""

CANDIDATES: Mapping[str, tuple[str, Callable[[], Compressor]]] = {
    "NoCompression()": ("exact", NoCompression),
    "BF16()": ("rounded", BF16),
    "ByteGrad()": ("rounded", ByteGrad),
    "QSGD()": ("rounded", QSGD),
    "PowerSGD(rank=4, start_step=0)": ("delayed", lambda: PowerSGD(rank=4, start_step=0)),
    "OneBit()": ("delayed", OneBit),
    "DGC(ratio=0.01, warmup=None)": ("delayed", lambda: DGC(ratio=0.01, warmup=None)),
    'DGC(ratio=0.01, warmup=None, reduce="owner")': (
        "delayed",
        lambda: DGC(ratio=0.01, warmup=None, reduce="owner"),
    ),
    "DGC.compact(warmup=None)": ("delayed", lambda: DGC.compact(warmup=None)),
    'DGC.compact(warmup=None, reduce="owner")': ("delayed", lambda: DGC.compact(warmup=None, reduce="owner")),
}
"""Exchanges beside the dense ones: accuracy class, and how to make the compressor."""

HIERARCHICAL = "Hierarchical(BF16())"


def check_candidates(names: Collection[str] | None) -> None:
    """Raise ConfigError for a name that is no candidate's."""
    known = [*BASELINES, *CANDIDATES, HIERARCHICAL]
    for name in names or ():
        if name not in known:
            raise ConfigError(f"unknown candidate {name!r}: choose from {', '.join(known)}")


def check_allowed(allow: Collection[str]) -> None:
    """Raise ConfigError for unknown accuracy classes, and for classes without a dense exchange."""
    for one in allow:
        if one not in ACCURACY:
            raise ConfigError(f"unknown accuracy class {one!r}: choose from {', '.join(ACCURACY)}")
    if not {*allow} & {"exact", "rounded"}:
        raise ConfigError("no dense exchange is allowed to compare with: allow 'exact' or 'rounded' too")


def recipes_of(
    shapes: Mapping[str, tuple[int, ...]],
    names: Collection[str] | None = None,
    sizes: Sequence[int] = (2, 4),
    local_size: int = 1,
    before: Callable[[str], None] = lambda name: None,
    **settings: Any,
) -> list[Recipe]:
    """Record the costs of all candidates on a model, or of those named; dense ones come first.

    Args:
        shapes: parameters by name.
        names: of CANDIDATES; None is all.
        sizes: numbers of ranks at which to record.
        local_size: ranks of a machine.
        before: called with each name before it is recorded.
        settings: others of `record`.
    """
    check_candidates(names)
    candidates = dict(CANDIDATES)
    if local_size > 1 and max(sizes) > local_size:
        candidates[HIERARCHICAL] = ("rounded", lambda: Hierarchical(BF16()))
    elif HIERARCHICAL in (names or ()):
        raise ConfigError(
            f"candidate {HIERARCHICAL!r} needs several machines of several ranks each, as many on all: leave it out, "
            f"or give advise --local-ranks 2 or more"
        )
    recorded = []
    for name, (accuracy, make) in candidates.items():
        if names is None or name in names:
            before(name)
            recorded.append(record_recipe(name, accuracy, shapes, make(), sizes, local_size=local_size, **settings))
    before(DENSE)
    bare = recorded or [record_recipe("", "", shapes, NoCompression(), sizes[:1], **settings)]
    step = min(min(recipe.low.step, recipe.high.step) for recipe in bare)
    own = {name: settings[name] for name in ("device", "before_step", "clock") if name in settings}
    conditions = conditions_of(shapes, local_size, settings.get("device"))
    return [replace(recipe, conditions=conditions) for recipe in (*ddp_recipes(shapes, step, **own), *recorded)]


@dataclass(frozen=True)
class Setting:
    """Everything of a training but its exchange.

    Attributes:
        model: parameters with their ready times, and seconds of forward and backward.
        size, local_size: ranks, and those of one machine.
        wire: the cost of collectives.
        speed: the processor's, relative to the one on which costs were recorded.
    """

    model: Model
    size: int
    wire: Wire
    local_size: int = 1
    speed: float = 1.0

    def step(self, recipe: Recipe, wire: Wire | None = None) -> Timeline:
        """Return the predicted step with an exchange."""
        buckets = fill_buckets(self.model.parameters(), recipe.bucket_mb, recipe.first_bucket_mb)
        method = recipe.method(self.size, self.speed)
        return timeline(
            *(buckets, method, wire or self.wire, self.size, self.model.seconds),
            local_size=self.local_size,
            lanes=LANES,
        )


@dataclass(frozen=True)
class Prediction:
    """One exchange in a setting.

    Attributes:
        name, accuracy: see `Recipe`.
        seconds: of a step; `exposed`, of them beyond forward, backward and the bare optimizer's step.
        sent: bytes of a rank.
        pays_below: bytes per second of the links below which it pays against the faster of the allowed dense ones; None
            if it never does or was not asked for, infinite if it always does.
    """

    name: str
    accuracy: str
    seconds: float
    exposed: float
    sent: float
    pays_below: float | None = None


def predict(
    setting: Setting,
    recipes: Sequence[Recipe],
    latency: float | None = None,
    *,
    limits: bool = True,
    allow: Collection[str] = ACCURACY,
) -> list[Prediction]:
    """Predict every exchange, fastest first.

    Args:
        setting: everything but the exchange.
        recipes: the exchanges, both dense ones among them. Those among machines are left out if there is only one.
        latency: seconds of a link's smallest message, for the break-even bandwidth, which is of links on paper. None
            takes it from the setting's wire.
        limits: also compute break-even bandwidths, which takes a hundred times as long.
        allow: accuracy classes of the dense exchanges that break-even bandwidths are of.
    """
    dense = [recipe for recipe in (_named(name, recipes) for name in BASELINES) if recipe.accuracy in allow]
    found = []
    for recipe in recipes:
        if recipe.name == HIERARCHICAL and setting.size <= setting.local_size:
            continue
        step = setting.step(recipe)
        below = None
        if limits and recipe.name not in BASELINES and setting.size > 1:
            below = _break_even(setting, recipe, dense, latency)
            loses = step.seconds > MARGIN * min(setting.step(one).seconds for one in dense)
            if below is not None and loses and isinstance(setting.wire, Fitted):  # paper says it pays, measurements not
                below = min(below, setting.wire.fastest("world"))
        bare = setting.model.seconds + recipe.low.step / setting.speed
        exposed = max(0.0, step.seconds - bare)
        found.append(Prediction(recipe.name, recipe.accuracy, step.seconds, exposed, step.sent, below))
    return sorted(found, key=lambda one: one.seconds)


def _named(name: str, recipes: Sequence[Recipe]) -> Recipe:
    found = next((recipe for recipe in recipes if recipe.name == name), None)
    if found is None:
        raise ConfigError(f"predictions are compared with {name!r}, whose costs are missing")
    return found


def _break_even(setting: Setting, recipe: Recipe, dense: Sequence[Recipe], latency: float | None) -> float | None:
    """Return the bytes per second of links below which an exchange pays against the fastest dense one."""
    alpha = setting.wire.cost("SendRecv", 4, 2).latency if latency is None else latency
    algorithm = setting.wire.algorithm if isinstance(setting.wire, Network) else "ring"

    def at(one: Recipe, bandwidth: float) -> float:
        return setting.step(one, Network(alpha, bandwidth, setting.local_size, algorithm=algorithm)).seconds

    return break_even(
        lambda bandwidth: at(recipe, bandwidth), lambda bandwidth: MARGIN * min(at(one, bandwidth) for one in dense)
    )


def local_steps(setting: Setting, recipes: Sequence[Recipe], every: Sequence[int] = (10, 50)) -> str:
    """Return one line: seconds of a step of `LocalSGD`, which sends float32 weights every H steps and overlaps nothing.

    It is no choice among the exchanges of a gradient, as the loss after as many steps is another one.
    """
    dense = _named(BASELINES[0], recipes)
    bare = setting.model.seconds + dense.low.step / setting.speed
    average = setting.step(replace(dense, overlap=False)).seconds - bare
    times = ", ".join(f"LocalSGD(every={steps}) {in_words(bare + average / steps)}" for steps in every)
    return f"local steps: {times} a step, at another loss per step (docs/averaging.md)."


def recommend(predictions: Sequence[Prediction], allow: Collection[str] = ACCURACY) -> tuple[Prediction, str]:
    """Return the exchange to use, and one line that says why.

    The fastest of the allowed accuracy classes, if its step takes at most MARGIN of the best dense one of them; else
    the dense one. Raises ConfigError as `check_allowed`.
    """
    check_allowed(allow)
    allowed = [one for one in predictions if one.accuracy in allow]
    best = min(allowed, key=lambda one: one.seconds)
    plain = _fastest_dense(predictions, allow)
    if best.name in BASELINES or best.seconds > MARGIN * plain.seconds:
        others = [one for one in allowed if one.name not in BASELINES]
        limit = max((one.pays_below for one in others if one.pays_below is not None), default=0.0)
        enough = f"{rate(limit)} is enough for this model; " if 0 < limit < math.inf else ""
        line = f"does not pay: {enough}{plain.name} takes {in_words(plain.seconds)} a step, "
        line += f"{in_words(plain.exposed)} exposed"
        if others:
            runner = min(others, key=lambda one: one.seconds)
            line += f", {runner.name} {in_words(runner.seconds)}"
        return plain, line + "."
    line = f"use {best.name} ({best.accuracy}): {in_words(best.seconds)} a step, "
    line += f"{plain.seconds / best.seconds:.2f} times as fast as {plain.name}"
    if best.pays_below is not None and best.pays_below < math.inf:
        line += f"; pays below {rate(best.pays_below)}"
    return best, line + "."


def _fastest_dense(predictions: Sequence[Prediction], allow: Collection[str]) -> Prediction:
    """Return the dense exchange that others are compared with."""
    dense = [one for one in predictions if one.name in BASELINES and one.accuracy in allow]
    return min(dense, key=lambda one: one.seconds)


def table(predictions: Sequence[Prediction], allow: Collection[str] = ACCURACY) -> str:
    """Return a line for each exchange, fastest first; the fastest dense one allowed is what they are compared with."""
    width = max(len(one.name) for one in predictions)
    dense = _fastest_dense(predictions, allow)
    lines = [f"{'exchange':{width}}  {'accuracy':8} {'s per step':>10} {'exposed s':>10} {'vs ' + dense.name:>11} "
             f"{'bytes sent':>14}  pays below"]  # fmt: skip
    for one in predictions:
        below = "" if one.name in BASELINES else "never" if one.pays_below is None else rate(one.pays_below)
        lines.append(
            f"{one.name:{width}}  {one.accuracy:8} {one.seconds:10.4f} {one.exposed:10.4f} "
            f"{one.seconds / dense.seconds:10.2f}x {one.sent:14,.0f}  {below}"
        )
    return "\n".join(lines)


def rate(bandwidth: float) -> str:
    """Return bytes per second as a link's rate."""
    if bandwidth == math.inf:
        return "any rate"
    bits = 8 * bandwidth
    return f"{bits / 1e9:.3g} Gbit/s" if bits >= 1e9 else f"{bits / 1e6:.3g} Mbit/s"


def in_words(seconds: float) -> str:
    """Return seconds as a user reads them."""
    return f"{seconds:.3g} s" if seconds >= 1 else f"{1e3 * seconds:.3g} ms"
