"""Checks of single settings, with one way of saying what would have been right."""

from __future__ import annotations

import math
from typing import Any

from .errors import ConfigError

__all__ = ["check_flag", "check_fraction", "check_period", "check_positive", "check_whole"]


def check_whole(value: Any, name: str, least: int) -> int:
    """A whole number of at least `least`. Raises ConfigError for others."""
    if isinstance(value, bool) or not isinstance(value, int) or value < least:
        raise ConfigError(f"{name} must be a whole number of at least {least}, not {value!r}")
    return value


def check_period(every: Any, default: int, name: str = "every", **older: Any) -> int:
    """A number of steps by its name, or by its older one, but not by both.

    Raises ConfigError for both, and for anything but a whole number of at least 1.
    """
    ((other, value),) = older.items()
    if every is not None and value is not None:
        raise ConfigError(
            f"{other} is an older name of {name}: give one of them, not {name}={every!r}, {other}={value!r}"
        )
    if value is not None:
        return check_whole(value, other, 1)
    return check_whole(default if every is None else every, name, 1)


def check_flag(value: Any, name: str) -> bool:
    """True or False. Raises ConfigError for others."""
    if not isinstance(value, bool):
        raise ConfigError(f"{name} must be True or False, not {value!r}")
    return value


def check_positive(value: Any, name: str) -> float:
    """A positive, finite number. Raises ConfigError for others."""
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value < math.inf:
        raise ConfigError(f"{name} must be a positive number, not {value!r}")
    return float(value)


def check_fraction(value: Any, name: str) -> float:
    """A number above 0, and at most 1. Raises ConfigError for others."""
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value <= 1:
        raise ConfigError(f"{name} must be above 0 and at most 1, not {value!r}")
    return float(value)
