"""The exchange to use for a model on the ranks that are running: everything is measured here, each step predicted."""

from __future__ import annotations

import json
import zlib
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn

from ..collectives import AllGather, AllReduce, Barrier, Link
from ..comm import Comm
from ..errors import ConfigError, MismatchError
from . import clock
from .advise import (
    ACCURACY,
    BASELINES,
    CANDIDATES,
    Prediction,
    Setting,
    check_candidates,
    local_steps,
    predict,
    recipes_of,
)
from .costs import Recipe, Recording
from .models import Model, tensors_of
from .probe import probe, ranks_per_machine
from .profile import GradientMarks, Profile
from .wire import Fitted

__all__ = ["Diagnosis", "Profile", "diagnose", "profile_model"]

STEPS = 3
"""Measured steps of forward and backward, of which the fastest counts, after one that allocates memory."""


def profile_model(model: nn.Module, inputs: Sequence[Tensor], steps: int = STEPS) -> Profile:
    """Measure forward and backward of a model on inputs, with the mean square of its outputs as loss.

    A parameter without a gradient counts as ready at the end. Raises ConfigError if the model does not take the inputs.
    """
    named = {name: param for name, param in model.named_parameters() if param.requires_grad}
    device = next(iter(named.values())).device
    arrivals = GradientMarks(named, device)
    found: list[tuple[float, dict[str, float]]] = []
    try:
        for _ in range(1 + steps):
            model.zero_grad()
            arrivals.clear()
            start = clock.mark(device)
            outputs = [tensor for tensor in tensors_of(model(*inputs)) if tensor.requires_grad]
            if not outputs:
                raise ConfigError(
                    "the model's output does not depend on a trained parameter: return a tensor that does, or a dict, "
                    "list, tuple or dataclass of such"
                )
            torch.stack([tensor.float().square().mean() for tensor in outputs]).sum().backward()
            seconds = clock.between(start, clock.mark(device))
            found.append((seconds, arrivals.since(start)))
    except ConfigError:
        raise
    except Exception as error:  # of the model: an index of a token beyond its vocabulary, a key, an assertion
        shapes = ", ".join(str(tuple(tensor.shape)) for tensor in inputs)
        said = " ".join([f"{type(error).__name__}:", *str(error).strip().splitlines()[:1]])
        remedy = "Correct --batch, --input or --vocab"
        if "positional argument" in said:
            remedy = "Name a callable that builds a model of one tensor, or measure a training script by --script"
        raise ConfigError(f"the model does not take an input of shape {shapes}: {said}. {remedy}") from error
    finally:
        arrivals.remove()
        model.zero_grad()
    seconds, ready = min(found[1:], key=lambda one: one[0])
    shapes_of = {name: tuple(param.shape) for name, param in named.items()}
    return Profile(shapes_of, {name: min(ready.get(name, seconds), seconds) for name in named}, seconds)


def _mean(values: Sequence[float], comm: Comm, label: str) -> list[float]:
    """Return the mean over ranks of some numbers."""
    mine = torch.tensor(list(values), dtype=torch.float64)
    return list(map(float, comm.run(AllReduce(comm.to_wire(mine), op="average", label=label)).tolist()))


def _mean_recipe(recipe: Recipe, comm: Comm) -> Recipe:
    """Return a recipe with the mean of all ranks' seconds."""

    def shared(recording: Recording) -> Recording:
        mine = [recording.encode, recording.step, *recording.decode]
        encode, step, *decode = _mean(mine, comm, f"costs of {recipe.name}")
        return replace(recording, encode=encode, step=step, decode=decode)

    low = shared(recipe.low)
    return replace(recipe, low=low, high=low if recipe.high is recipe.low else shared(recipe.high))


def check_alike(comm: Comm, settings: Mapping[str, Any], deadline: float) -> None:
    """Raise MismatchError on all ranks if a setting differs; it names the setting and the first rank that differs."""
    mine = [zlib.crc32(json.dumps(value, sort_keys=True).encode()) for value in settings.values()]
    rows = comm.run(AllGather(comm.to_wire(torch.tensor(mine)), label="settings of dgcopt doctor"), deadline).tolist()
    for rank, row in enumerate(rows):
        for name, value, own in zip(settings, row, rows[0], strict=True):
            if value != own:
                raise MismatchError(
                    f"rank {comm.rank}: ranks 0 and {rank} were given different {name}. Give all ranks the same"
                )


@dataclass(frozen=True)
class Diagnosis:
    """Measurements of the ranks, and the predictions made from them; `local_steps` is a line of them for a user."""

    model: Model
    wire: Fitted
    recipes: Sequence[Recipe]
    predictions: Sequence[Prediction]
    local_steps: str = ""


def diagnose(
    comm: Comm,
    name: str,
    profile: Profile,
    *,
    names: Collection[str] | None = None,
    allow: Collection[str] = ACCURACY,
    seconds: float = 8.0,
    deadline: float = 60.0,
    device: torch.device | None = None,
    before: Callable[[str], None] = lambda name: None,
) -> Diagnosis:
    """Measure the link and the cost of every candidate on all ranks at once, and predict their steps; collective.

    Args:
        comm: the wire.
        name: of the model.
        profile: this rank's step without exchange; ranks take the mean.
        names: candidates, see `recipes_of`.
        allow: accuracy classes, see `predict`.
        seconds, deadline: of the probe.
        device: where gradients are; the CPU by default.
        before: called with each name before it is recorded.

    Raises ConfigError for a single rank or an unknown candidate, MismatchError if ranks were given different candidates
    or models.
    """
    if comm.size < 2:
        raise ConfigError(
            "dgcopt doctor measures the link between ranks, and this process is the only one: start several, as by "
            "`torchrun --nproc-per-node 2 -m dgcopt doctor ...`, or use `dgcopt advise`, which needs none"
        )
    check_candidates(names)
    wanted = sorted(CANDIDATES if names is None else names)
    shapes = {one: list(shape) for one, shape in profile.shapes.items()}
    check_alike(comm, {"candidates": wanted, "models": shapes, "seconds": seconds}, deadline)
    device = torch.device("cpu") if device is None else device
    mine = [profile.seconds, *(profile.ready[one] for one in profile.shapes)]
    compute, *ready = _mean(mine, comm, "seconds of a step")
    model = Profile(profile.shapes, dict(zip(profile.shapes, ready, strict=True)), compute).model(name)
    wire = probe(comm, seconds=seconds, deadline=deadline, device=device)
    local_size = comm.drive(ranks_per_machine(comm))
    link = Link(min(wire.fits["AllGather", "world"].seconds), 1 / max(wire.fits["SendRecv", "world"].beta, 1e-12))
    recorded = recipes_of(
        profile.shapes,
        [one for one in wanted if one not in BASELINES],
        (comm.size,),
        local_size,
        before,
        link=link,
        device=device,
        before_step=lambda: comm.run(Barrier(label="before a recorded step")),
    )
    recipes = [_mean_recipe(recipe, comm) for recipe in recorded]
    setting = Setting(model, comm.size, wire, local_size)
    return Diagnosis(model, wire, recipes, predict(setting, recipes, allow=allow), local_steps(setting, recipes))
