"""Checks of train.py: settings, models, data and optimizers that cannot train together end in one line."""

from __future__ import annotations

import contextlib
import dataclasses
import inspect
import math
import traceback
from collections.abc import Iterator
from pathlib import Path
from typing import Any, get_args, get_type_hints

from torch.optim import Optimizer

from ..errors import ConfigError
from ..errors.checks import check_group_settings

__all__ = ["check_optimizer", "check_settings", "fitting", "summary"]


def check_settings(settings: Any) -> None:
    """Raise ConfigError for null where a value is needed, which parsers take from files, and for an endless warm-up."""
    hints = get_type_hints(type(settings))
    for field in dataclasses.fields(settings):
        if getattr(settings, field.name) is None and type(None) not in get_args(hints[field.name]):
            raise ConfigError(f"{field.name} is null, and needs a value: give one, or leave the line out")
    if settings.warmup_epochs == math.inf:
        raise ConfigError("warmup_epochs is inf, and must be finite: lr would stay that of one worker")


def summary(error: Exception) -> str:
    """Return the kind of an error, its first line and its place outside of installed packages and train.py."""
    frames = [frame for frame in traceback.extract_tb(error.__traceback__) if Path(frame.filename).name != "train.py"]
    frames = [frame for frame in frames if "site-packages" not in frame.filename]
    place = f" (at {frames[-1].filename}:{frames[-1].lineno})" if frames else ""
    return " ".join([f"{type(error).__name__}:", *str(error).strip().splitlines()[:1]]) + place


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
