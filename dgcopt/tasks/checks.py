"""Checks of train.py: settings, models, data and optimizers that cannot train together end in one line."""

from __future__ import annotations

import contextlib
import dataclasses
import inspect
import math
import traceback
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, get_args, get_type_hints

from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from ..errors import ConfigError, DGCError
from ..errors.checks import check_group_settings

__all__ = [
    "COUNTED",
    "GivenSettings",
    "building",
    "check_optimizer",
    "check_run",
    "check_settings",
    "fitting",
    "print_changed",
    "scheduling",
    "writing",
]

OF_GRADIENTS = ("op", "bucket_mb", "first_bucket_mb", "clip_norm", "check_replicas_every", "trace_steps")
"""Settings that have no meaning where weights are averaged."""

COUNTED = ("seed", "batch_size", "batches_per_step", "scheduler_interval")
"""Settings that give a position in an epoch and in a schedule its meaning."""


def check_settings(settings: Any) -> None:
    """Raise ConfigError for settings that cannot be, or not together.

    Null where a value is needed, which parsers take from files; data without samples; an endless warm-up; settings of
    gradients where weights are averaged.
    """
    hints, fields = get_type_hints(type(settings)), {field.name: field for field in dataclasses.fields(settings)}
    for name in fields:
        if getattr(settings, name) is None and type(None) not in get_args(hints[name]):
            raise ConfigError(f"{name} is null, and needs a value: give one, or leave the line out")
    for name in ("train_data", "test_data"):
        if not len(getattr(settings, name)):
            raise ConfigError(f"{name} is empty, and must have samples")
    if settings.warmup_epochs == math.inf:
        raise ConfigError("warmup_epochs is inf, and must be finite: lr would stay that of one worker")
    if settings.averaging is None:
        return
    no_compression: Any = fields["compressor"].default_factory
    if not isinstance(settings.compressor, no_compression):
        raise ConfigError("compressor is for gradients. Set the compressor of averaging in its init_args (compression)")
    if given := [name for name in OF_GRADIENTS if getattr(settings, name) != fields[name].default]:
        raise ConfigError(f"for averaged gradients only: {', '.join(given)}. Leave out with averaging")


def check_run(config: Any, is_named: bool, is_elastic: bool) -> None:
    """Raise ConfigError for a run without a folder, for one that later workers would not find, and for a huge seed."""
    if not config.output:
        raise ConfigError("output is empty, and must name a folder")
    if is_elastic and not (is_named and (config.resume or config.evaluate)):
        raise ConfigError(
            "under Horovod Elastic, workers that come later find the run by its checkpoints: say --output and "
            "--resume, for a run that begins too"
        )
    if not abs(config.seed) < 2**62:  # ranks and epochs are added to it
        raise ConfigError(f"seed is {config.seed:.6g}, and must lie within 62 bits")


def summary(error: Exception) -> str:
    """Return the kind of an error, its first line and its place outside of packages, train.py and this file."""
    frames = [
        frame
        for frame in traceback.extract_tb(error.__traceback__)
        if "site-packages" not in frame.filename and Path(frame.filename).name not in ("train.py", Path(__file__).name)
    ]
    place = f" (at {frames[-1].filename}:{frames[-1].lineno})" if frames else ""
    return " ".join([f"{type(error).__name__}:", *str(error).strip().splitlines()[:1]]) + place


@contextlib.contextmanager
def building() -> Iterator[None]:
    """Context in which settings become objects. Raises ConfigError if they do not fit."""
    try:
        yield
    except (ImportError, OSError, ValueError) as error:
        raise ConfigError(str(error)) from error
    except Exception as error:  # of a class that was chosen, by its settings
        if isinstance(error, DGCError):
            raise
        raise ConfigError(f"settings do not fit: {summary(error)}") from error


@contextlib.contextmanager
def writing() -> Iterator[None]:
    """Context of a run. Raises ConfigError if a file of its output cannot be written."""
    try:
        yield
    except OSError as error:
        if error.filename is None:
            raise
        raise ConfigError(f"{error.filename}: {error.strerror}. Correct it, or choose another --output") from error


@contextlib.contextmanager
def scheduling(scheduler: Any, step: int) -> Iterator[None]:
    """Context in which a scheduler moves on. Raises ConfigError for one that has ended, or cannot be."""
    try:
        yield
    except (ArithmeticError, TypeError, ValueError) as error:
        raise ConfigError(
            f"scheduler: {type(scheduler).__name__} cannot go on after step {step}: {summary(error)}. Correct its "
            f"init_args or scheduler_interval"
        ) from error


@contextlib.contextmanager
def fitting(inputs: Any, targets: Any) -> Iterator[None]:
    """Context of a forward pass and its loss. Raises ConfigError if model, data and loss do not fit each other."""
    try:
        yield
    except Exception as error:
        if type(error).__module__ != "builtins":  # of a wire, of Horovod Elastic, or out of memory
            raise
        shapes = " with targets of ".join(str(tuple(getattr(one, "shape", "?"))) for one in (inputs, targets))
        raise ConfigError(
            f"model and loss do not take a batch of inputs of {shapes}: {summary(error)}. Correct model or data: "
            f"sizes, classes, vocabulary"
        ) from error


def check_optimizer(optimizer: Optimizer) -> None:
    """Raise ConfigError for an optimizer that cannot train: a setting that is not finite, or a closure for its step."""
    check_group_settings(optimizer.param_groups, "optimizer")
    closure = inspect.signature(optimizer.step).parameters.get("closure")
    if closure is not None and closure.default is inspect.Parameter.empty:
        raise ConfigError(f"optimizer: {type(optimizer).__name__} needs a closure, and has none here. Choose another")


def settings_of(group: dict[str, Any]) -> dict[str, Any]:
    """Return the settings of an optimizer's group, with a scheduler's first lr, without others that it moves."""
    moved = ("momentum", "betas") if "base_momentum" in group else ()
    plain = {name: group[name] for name in group if isinstance(group[name], int | float | tuple) and name not in moved}
    return plain | ({"lr": plain["initial_lr"]} if "initial_lr" in plain else {})


class GivenSettings:
    """The settings of an optimizer and a scheduler as a run was given them, before it loads a checkpoint."""

    def __init__(self, optimizer: Optimizer, scheduler: LRScheduler | None) -> None:
        self.optimizer, self.scheduler = optimizer, scheduler
        self.groups = [settings_of(group) for group in optimizer.param_groups]
        self.keys = {*scheduler.state_dict()} if scheduler else set()

    def print_overruled(self) -> None:
        """Print which settings of the checkpoint hold in place of those given, and which are of another scheduler."""
        more = sorted({*(self.scheduler.state_dict() if self.scheduler else ())} - self.keys)
        if more:
            kind = type(self.scheduler).__name__
            print(f"the checkpoint is of another scheduler than {kind}, with {', '.join(more)}")
        for given, group in zip(self.groups, self.optimizer.param_groups, strict=True):
            kept = settings_of(group)
            for name in sorted(given.keys() & kept.keys()):
                if kept[name] != given[name]:
                    print(f"the optimizer's {name} is {kept[name]}, as in the checkpoint, not {given[name]}")


def print_changed(before: Mapping[str, Any], now: Mapping[str, Any], seen: int) -> None:
    """Print which settings of COUNTED, and number of samples, are not those of the checkpoint, and the consequences.

    `seen` are the samples of the epoch before the checkpoint.
    """
    order = "later epochs have another order"
    if seen:
        order = f"another order begins after {seen} samples: of this epoch some are read twice, and some not at all"
    batches = "the rest of the epoch and warm-ups follow; a scheduler that moves on each step keeps counting steps"
    consequences = {"seed": order, "samples": order, "batch_size": batches, "batches_per_step": batches}
    consequences["scheduler_interval"] = "the scheduler takes its earlier count for one of these, so that lr may jump"
    for name, value in now.items():
        if value != before[name]:
            print(f"{name} is {value}, and in the checkpoint {before[name]}: {consequences[name]}")
