"""The predicted step of every candidate of `Auto` on these ranks: link and costs are measured, and agreed on."""

from __future__ import annotations

import copy
import itertools
import logging
import math
from collections.abc import Collection, Generator, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from ..collectives import AllReduce, Collective, Link
from ..comm import Comm
from . import clock
from .advise import Setting, in_words, rate
from .candidate import Candidate, Candidates
from .costs import Recipe, record_recipe
from .probe import LEAST, measurements, ranks_per_machine
from .profile import Profile
from .timeline import VOTE, Round, fill_buckets
from .wire import Fitted, wire_bytes

__all__ = ["Forecast", "grow", "largest", "probe_sizes", "shortlist", "shrink"]

log = logging.getLogger("dgcopt")

TRIED = 3
"""Candidates tried beside the fallback and the one in use."""
HOPELESS = 1.1
"""Candidates predicted to take more than this many times the fallback's step are not tried."""
LOSING = 1.5
"""Candidates predicted to take more than this many times the best one's step are not tried."""
PROBE_STEPS, PROBE_SECONDS = 16, 1.0
"""Seconds of the probe: those of so many steps, and the most."""
RECORDED = 2**22
"""Elements of the shapes on which costs are recorded; larger models are recorded at a fraction of their sizes."""


class Forecast:
    """Predictions of an `Auto` on one rank, the same on all.

    Args:
        auto: has the candidates.
        names: parameters and their names.
        comm: the wire.
        fixed_sizes: True if the user has set the sizes of buckets.

    Attributes:
        candidates: all candidates by name, once they are predicted.
        seconds: the predicted seconds of a step with each.
    """

    def __init__(self, auto: Candidates, names: Mapping[Tensor, str], comm: Comm, fixed_sizes: bool) -> None:
        self.auto, self.comm = auto, comm
        self.candidates: dict[str, Candidate] = {}
        self.seconds: dict[str, float] = {}
        self._names, self._fixed_sizes = names, fixed_sizes
        self._wire, self._local_size = Fitted(), 1
        self._recorded: tuple[Mapping[str, tuple[int, ...]], dict[tuple[str, bool], Recipe]] = ({}, {})

    def predict(
        self, profiles: Sequence[tuple[float, Mapping[str, float]]], watched: float
    ) -> Generator[Collective, Tensor, list[str]]:
        """Measure the link, predict all candidates, and return the names of the best.

        `profiles` are watched steps of this rank: seconds, and the times when gradients were ready. `watched` are the
        seconds of a whole step with the exchange in use, the same on all ranks.
        """
        auto, comm = self.auto, self.comm
        self._local_size = yield from ranks_per_machine(comm)
        shapes = {name: tuple(p.shape) for p, name in self._names.items() if p.requires_grad and p.numel()}
        by_name = {one.name: one for one in auto.candidates(self._local_size > 1, self._fixed_sizes)}
        if self._recorded[0] != shapes:
            self._recorded = shapes, self._record(shapes, list(by_name.values()))
            yield from self._agree_on_costs(self._recorded[1])
        recipes = self._recorded[1]
        dense = auto.fallback
        # a choice restored from a checkpoint of other machines is none of the candidates
        used = recipes.get((auto.choice.base, auto.choice.hierarchical), recipes[dense.base, dense.hierarchical])
        probed = probe_sizes(recipes.values(), used, comm.size, watched)
        seconds = min(PROBE_SECONDS, PROBE_STEPS * watched)
        self._wire = yield from measurements(comm, probed, seconds, next(iter(self._names)).device)
        model = (yield from self._agree_on_profile(shapes, profiles)).model("auto")
        setting = Setting(model, comm.size, self._wire, self._local_size)
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
        self.candidates = by_name
        self.seconds = found
        alone = auto.compressor is not None
        groups = {name: name if alone else (by_name[name].base, by_name[name].hierarchical) for name in found}
        return shortlist(found, groups, dense.name, watched if auto.choice == dense else 0.0)

    def _record(
        self, shapes: Mapping[str, tuple[int, ...]], candidates: Sequence[Candidate]
    ) -> dict[tuple[str, bool], Recipe]:
        """Record the costs of each compressor on this rank, without a network."""
        comm, found = self.comm, {}
        shrunk, factor = shrink(shapes, RECORDED)
        for key in dict.fromkeys((one.base, one.hierarchical) for one in candidates):
            with quiet(), torch.enable_grad():
                made = copy.deepcopy(self.auto.make(Candidate(*key)))
                recipe = record_recipe(
                    *(key[0], "", shrunk, made, (comm.size,)),
                    local_size=self._local_size,
                    link=comm.link or Link(),
                    device=next(iter(self._names)).device,
                    make_optimizer=self.auto.make_optimizer,
                    clock=clock.now,
                )
            found[key] = grow(recipe, factor)
        return found

    def _agree_on_costs(self, recipes: dict[tuple[str, bool], Recipe]) -> Generator[Collective, Tensor, None]:
        """Replace seconds by those of the slowest rank."""
        numbers = [n for one in recipes.values() for n in (one.low.encode, one.low.step, *one.low.decode)]
        agreed = iter((yield from largest(numbers, "costs of exchanges")))
        for key, recipe in recipes.items():
            low = recipe.low
            low = replace(low, encode=next(agreed), step=next(agreed), decode=[next(agreed) for _ in low.decode])
            recipes[key] = replace(recipe, low=low, high=low)

    def _agree_on_profile(
        self, shapes: Mapping[str, tuple[int, ...]], profiles: Sequence[tuple[float, Mapping[str, float]]]
    ) -> Generator[Collective, Tensor, Profile]:
        """Return the fastest watched step of the slowest rank, with the times when gradients were ready."""
        seconds, ready = min(profiles, key=lambda one: one[0], default=(0.0, {}))
        mine = [seconds, *(min(ready.get(name, seconds), seconds) for name in shapes)]
        compute, *times = yield from largest(mine, "times of gradients")
        return Profile(shapes, dict(zip(shapes, times, strict=True)), max(compute, 1e-9))

    def link(self) -> str:
        """Return the measured link in words."""
        one = self._wire.fits.get(("AllReduce", "world")) or next(iter(self._wire.fits.values()), None)
        if one is None:
            return "the link was not measured"
        return f"link: {in_words(one.alpha)} latency, {rate(1 / one.beta) if one.beta else 'any rate'}"


def largest(numbers: Sequence[float], label: str) -> Generator[Collective, Tensor, list[float]]:
    """Return the largest of all ranks' numbers, each."""
    mine = torch.tensor(numbers, dtype=torch.float64)
    most = yield AllReduce(mine, op="max", group="control", label=label)
    return list(map(float, most.tolist()))


def shortlist(predicted: Mapping[str, float], groups: Mapping[str, Any], fallback: str, watched: float) -> list[str]:
    """Return the candidates to try beside the fallback, fastest first: the best one of each group.

    `watched` are measured seconds of the fallback, 0.0 if there are none: a machine with other work, of which the model
    knows nothing, is a reason to try more.
    """
    limit = min(HOPELESS * max(predicted[fallback], watched), LOSING * min(predicted.values()))
    best: dict[Any, str] = {}
    for name in sorted(predicted, key=lambda name: predicted[name]):
        if predicted[name] <= limit and name != fallback:
            best.setdefault(groups[name], name)
    return [*best.values()][:TRIED]


def probe_sizes(recipes: Collection[Recipe], used: Recipe, size: int, watched: float) -> dict[str, list[int]]:
    """Return the bytes of the messages to probe, by kind: the smallest, the largest that any recipe sends, one between.

    Between two sizes nothing is extrapolated, which noise of small messages would make meaningless. A step with the
    recipe in use has taken `watched` seconds: from its bytes follows the largest message that the probe has time for.
    """
    most: dict[str, float] = {"AllGather": VOTE}
    for sent in _rounds(recipes):
        most[sent.kind] = max(most.get(sent.kind, 0.0), sent.nbytes)
    rate = sum(wire_bytes(sent.kind, sent.nbytes, size) for sent in _rounds([used])) / watched
    affordable = rate * min(PROBE_SECONDS, PROBE_STEPS * watched) / len(most) / 4
    found = {}
    for kind, nbytes in most.items():
        largest = max(int(min(nbytes, affordable / wire_bytes(kind, 1, size))), 4 * LEAST)
        found[kind] = [LEAST, largest, int(math.sqrt(LEAST * largest))]
    return found


def _rounds(recipes: Collection[Recipe]) -> Iterator[Round]:
    """Yield the messages of recipes at the fewest ranks recorded."""
    for recipe in recipes:
        yield from itertools.chain(*recipe.low.rounds)


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
