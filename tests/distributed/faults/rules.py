"""The one table of rules by which the outcome of every injected fault is classified."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from enum import Enum
from typing import Any


class Outcome(Enum):
    """A column of the table."""

    HANDLED = "handled"
    HANG = "hang"
    LOST = "lost"
    BARE = "bare"


@dataclass
class Raised:
    """An exception that reached the caller on one rank: names of its classes, most special first, and its message."""

    rank: int
    kinds: list[str]
    said: str

    @staticmethod
    def of(rank: int, error: BaseException) -> Raised:
        return Raised(rank, [kind.__name__ for kind in type(error).__mro__], str(error))

    @property
    def is_ours(self) -> bool:
        return "DGCError" in self.kinds


@dataclass
class Seen:
    """Everything observed of one fault.

    Attributes:
        raised: exceptions that reached callers.
        injected: class of the injected exception, which may reach the caller as it is; empty if none may.
        late: why the run counts as hanging; empty if it ended in time.
        lost: state that is torn, lost or apart without an error.
        unsaid: facts that an error should have named.
        struck: the fault took place.
    """

    raised: list[Raised] = field(default_factory=list)
    injected: str = ""
    late: str = ""
    lost: list[str] = field(default_factory=list)
    unsaid: list[str] = field(default_factory=list)
    struck: bool = True

    def as_dict(self) -> dict[str, Any]:
        return asdict(self)

    @staticmethod
    def from_dict(facts: dict[str, Any]) -> Seen:
        return Seen(**{**facts, "raised": [Raised(**raised) for raised in facts["raised"]]})

    def add(self, rank: int, error: BaseException) -> None:
        self.raised.append(Raised.of(rank, error))


PLACE = re.compile(r"rank|parameter|bucket|checkpoint|step-|group|directory")
"""An error names a place: a rank, a parameter, a bucket or a file."""


def _foreign(seen: Seen) -> str:
    found = [error for error in seen.raised if not error.is_ours and seen.injected not in error.kinds]
    return "; ".join(f"rank {error.rank}: {error.kinds[0]}: {error.said[:200]}" for error in found)


def _placeless(seen: Seen) -> str:
    return "; ".join(
        f"rank {error.rank}: {error.kinds[0]} names no place: {error.said[:200]}"
        for error in seen.raised
        if error.is_ours and not PLACE.search(error.said)
    )


RULES: list[tuple[Outcome, Callable[[Seen], str]]] = [
    (Outcome.HANG, lambda seen: seen.late),
    (Outcome.LOST, lambda seen: "; ".join(seen.lost)),
    (Outcome.BARE, _foreign),
    (Outcome.BARE, _placeless),
    (Outcome.BARE, lambda seen: "; ".join(seen.unsaid)),
]
"""The first rule that has something to say decides; handled if none has."""


def classify(seen: Seen) -> tuple[Outcome, str]:
    """The outcome of a fault, and the words of the rule that decided it."""
    for outcome, finds in RULES:
        if words := finds(seen):
            return outcome, words
    return Outcome.HANDLED, ""
