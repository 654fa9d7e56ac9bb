"""Collectives in flight."""

from __future__ import annotations

from abc import ABC, abstractmethod

from torch import Tensor

from ..collectives import Collective

__all__ = ["Finished", "Handle"]


class Handle(ABC):
    """A collective in flight."""

    collective: Collective

    @abstractmethod
    def done(self) -> bool:
        """Return True if the result has arrived. Never blocks; lets the library make progress if it needs calls."""

    @abstractmethod
    def result(self) -> Tensor:
        """Return the result, as the collective's docstring defines it. Call it only once `done()`."""


class Finished(Handle):
    """A collective that is complete at its start."""

    def __init__(self, collective: Collective, result: Tensor) -> None:
        self.collective = collective
        self._result = result

    def done(self) -> bool:
        return True

    def result(self) -> Tensor:
        return self._result
