"""Checks of single settings, with uniform error messages."""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Callable, Iterable, Mapping
from numbers import Integral, Real
from types import NoneType, UnionType
from typing import Any, Literal, Union, get_args, get_origin, get_type_hints

from . import ConfigError

__all__ = [
    "MAY_BE_INFINITE",
    "check_flag",
    "check_fraction",
    "check_group_settings",
    "check_positive",
    "check_settings",
    "check_whole",
    "is_number",
    "is_rank",
]

MAY_BE_INFINITE = {"infinite": True}
"""Metadata of a dataclass field for `check_settings`: infinity is a value of this number."""


def is_number(value: Any, kind: Any = Real) -> bool:
    """True for a finite number, also one of numpy; False for flags, NaN and Inf."""
    return isinstance(value, kind) and not isinstance(value, bool) and bool(-math.inf < value < math.inf)


def is_rank(value: Any, size: int) -> bool:
    """True for a whole number from 0 to below `size`."""
    return is_number(value, Integral) and 0 <= value < size


def check_whole(value: Any, name: str, least: int) -> int:
    """Return a whole number of at least `least`. Raises ConfigError for others."""
    if not is_number(value, Integral) or value < least:
        raise ConfigError(f"{name} must be a whole number of at least {least}, not {value!r}")
    return int(value)


def check_flag(value: Any, name: str) -> bool:
    """Return True or False. Raises ConfigError for others."""
    if not isinstance(value, bool):
        raise ConfigError(f"{name} must be True or False, not {value!r}")
    return value


def check_positive(value: Any, name: str) -> float:
    """Return a positive, finite number. Raises ConfigError for others."""
    if not is_number(value) or value <= 0:
        raise ConfigError(f"{name} must be a positive number, not {value!r}")
    return float(value)


def check_fraction(value: Any, name: str) -> float:
    """Return a number above 0 and at most 1. Raises ConfigError for others."""
    if not is_number(value) or not 0 < value <= 1:
        raise ConfigError(f"{name} must be above 0 and at most 1, not {value!r}")
    return float(value)


def check_group_settings(groups: Iterable[Mapping[str, Any]], place: str) -> None:
    """Raise ConfigError for a setting of an optimizer's groups that is NaN or Inf, and for a flag as learning rate."""
    for group in groups:
        for name, value in group.items():
            numbers = [one for one in (value if isinstance(value, tuple) else (value,)) if isinstance(one, float)]
            is_flag = name == "lr" and isinstance(value, bool)
            if is_flag or not all(map(math.isfinite, numbers)):
                raise ConfigError(f"{place}: {name} is {value}, and must be finite. Correct it")


def check_settings(of: Any) -> None:
    """Check the fields of a dataclass against annotations of numbers, strings, flags and classes.

    Numbers of numpy become Python's, as ranks compare settings by their words. Raises ConfigError for others.
    """
    for name, kinds in _kinds_of_fields(of.__class__).items():
        value = getattr(of, name)
        if not any(_is(value, kind) for kind in kinds):
            raise ConfigError(f"{name} must be {' or '.join(map(_in_words, kinds))}, not {value!r}")
        if is_number(value) and type(value) not in (int, float):
            object.__setattr__(of, name, int(value) if isinstance(value, Integral) else float(value))


@functools.cache
def _kinds_of_fields(kind: Any) -> dict[str, tuple[Any, ...]]:
    """Return the types of each field; unknown for annotations with names of type checkers only."""
    try:
        hints = get_type_hints(kind)
    except NameError:
        return {}
    found: dict[str, tuple[Any, ...]] = {}
    for field in dataclasses.fields(kind):
        hint = hints[field.name]
        kinds = get_args(hint) if get_origin(hint) in (Union, UnionType) else (hint,)
        found[field.name] = (*kinds, math.inf) if field.metadata.get("infinite") else kinds
    return found


def _is(value: Any, kind: Any) -> bool:
    if kind == math.inf:
        return isinstance(value, float) and value == kind
    if get_origin(kind) is Literal:
        return any(type(value) is type(word) and value == word for word in get_args(kind))
    if kind in (int, float):
        return is_number(value, Integral if kind is int else Real)
    if get_origin(kind) is Callable:
        return callable(value)
    return not isinstance(kind, type) or isinstance(value, kind)


def _in_words(kind: Any) -> str:
    if kind == math.inf:
        return "inf"
    if get_origin(kind) is Literal:
        *first, last = (f'"{word}"' for word in get_args(kind))
        return f"{', '.join(first)} or {last}" if first else last
    if get_origin(kind) is Callable:
        return "a function"
    words = {NoneType: "None", bool: "True or False", int: "a whole number", float: "a number"}
    return words.get(kind) or f"a {kind.__module__.partition('.')[0]}.{kind.__qualname__}"
