"""Checks of single settings, with one way of saying what would have been right."""

from __future__ import annotations

import math
from typing import Any

from .errors import ConfigError

__all__ = ["check_flag", "check_fraction", "check_positive", "check_whole"]


def check_whole(value: Any, name: str, least: int) -> int:
    """A whole number of at least `least`. Raises ConfigError for others."""
    if isinstance(value, bool) or not isinstance(value, int) or value < least:
        raise ConfigError(f"{name} must be a whole number of at least {least}, not {value!r}")
    return value


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
