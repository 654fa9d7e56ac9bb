"""The report of a conformance kit."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import TypeVar

__all__ = ["ConformanceError", "Report", "checked"]

Case = TypeVar("Case")


class ConformanceError(AssertionError):
    """A compressor or an averaging algorithm breaks a promise; the message is the report."""


@dataclass
class Report:
    """The outcome of all checks; `failures` is empty if every promise is kept."""

    subject: str
    lines: list[tuple[str, str]]
    """The outcome of each check: "ok", "not declared" or the failure."""

    @property
    def failures(self) -> list[str]:
        """The checks that failed."""
        return [name for name, outcome in self.lines if outcome not in ("ok", "not declared")]

    def __str__(self) -> str:
        width = max(len(name) for name, _ in self.lines)
        return "\n".join([self.subject, *(f"  {name:{width}}  {outcome}" for name, outcome in self.lines)])


def checked(
    subject: str, checks: Mapping[str, Callable[[Case], str | None]], cases: Iterable[tuple[int, Case]]
) -> Report:
    """Run each check for each world size, up to its first failure.

    Raises ConformanceError with the report as its message if a check fails.
    """
    lines, cases = [], list(cases)
    for name, check in checks.items():
        outcome = "ok"
        for size, case in cases:
            try:
                outcome = check(case) or "ok"
            except Exception as error:
                outcome = f"with {size} rank(s): {type(error).__name__}: {error}"
                break
        lines.append((name, outcome))
    report = Report(subject, lines)
    if report.failures:
        raise ConformanceError(str(report))
    return report
