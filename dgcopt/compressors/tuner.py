"""The interface of a state machine that changes a compressor between steps."""

from __future__ import annotations

from collections.abc import Callable, Generator
from dataclasses import dataclass
from typing import Any, Protocol

from torch import Tensor

from ..collectives import Collective

__all__ = ["Change", "Tuner"]


@dataclass(frozen=True)
class Change:
    """Another compressor from the next step on.

    Attributes:
        apply: puts it in place.
        keeps_residual: True if the other compressor can send unsent memory as it is. False sends all of it in one more
            step, whole, before the change.
    """

    apply: Callable[[], None]
    keeps_residual: bool


class Tuner(Protocol):
    """Changes a compressor between steps, alike on all ranks.

    Attributes:
        watching: True if `arrived` must be called for each gradient.
    """

    watching: bool

    def arrived(self, param: Tensor) -> None:
        """Note that a parameter's gradient is complete, while `watching`."""

    def synchronizing(self) -> None:
        """Note that backward is over, and the step begins."""

    def stepped(self, step: int) -> Generator[Collective, Tensor, Change | None]:
        """Note that all ranks have committed a step, agree with them, and return the change to make, if any."""

    def state(self) -> dict[str, Any]:
        """Return a checkpointable copy of the choice."""

    def restore(self, state: dict[str, Any] | None) -> None:
        """Restore a `state`, or start anew if a checkpoint has none."""
