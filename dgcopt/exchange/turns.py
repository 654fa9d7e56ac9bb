"""The order of several optimizers on one wire; one of them may launch during backward."""

from __future__ import annotations

import threading
import weakref
from typing import Any, Generic, TypeVar
from weakref import WeakKeyDictionary

from ..comm import Comm

__all__ = ["Turns", "turns_over"]

Stepper = TypeVar("Stepper")


class Turns(Generic[Stepper]):
    """The order in which the optimizers of one wire step, the same on all ranks.

    Ranks may fill buckets in different orders, because each fills them with its own gradients, but wires match
    collectives by order. So only one of several optimizers launches during backward: the one that stepped next the last
    time. If another optimizer steps, all ranks first cancel the exchanges of the expected one. An optimizer that was
    replaced by a new one may be alive on some ranks only, and must not launch there.

    Attributes:
        lock: held while a gradient is recorded, because autograd runs a thread for each device and threads may call
            backward concurrently. Reentrant, because simulated ranks advance each other.
        are_shared: True once there is a second optimizer.
        sent: number of buckets that the expected optimizer has launched, also after it is freed; None if not known.
    """

    def __init__(self) -> None:
        self.lock = threading.RLock()
        self.are_shared = False
        self.sent: int | None = None
        self._is_known = True
        self._expected: weakref.ref[Stepper] | None = None
        self._last: weakref.ref[Stepper] | None = None
        self._after: WeakKeyDictionary[Stepper, weakref.ref[Stepper]] = WeakKeyDictionary()
        self._added: WeakKeyDictionary[Stepper, int] = WeakKeyDictionary()
        self._count = 0

    def share(self, stepper: Stepper) -> None:
        """Add an optimizer to those of the wire, and learn the order anew from the next step on."""
        self.are_shared = self._last is not None
        self._is_known = not self.are_shared
        self._after.clear()
        self._added[stepper], self._count = self._count, self._count + 1
        if not self.are_shared:
            self._expected = self._last = weakref.ref(stepper)

    @property
    def expected(self) -> Stepper | None:
        """The optimizer whose step should come next; None before the first."""
        return None if self._expected is None else self._expected()

    def is_next(self, stepper: Stepper) -> bool:
        """Return True if all ranks know that the step of an optimizer should come next."""
        return self._is_known and self.expected is stepper

    @property
    def last(self) -> Stepper | None:
        """The optimizer that has stepped last; the first one before any step."""
        return None if self._last is None else self._last()

    def added_after(self, stepper: Stepper) -> list[Stepper]:
        """Return the living optimizers of the wire that were added after another one."""
        return [other for other, place in self._added.items() if place > self._added[stepper]]

    def unlearn(self) -> None:
        """Learn the order anew from the next step on: one has failed, perhaps on this rank only."""
        self._is_known = False

    def count_sent(self, buckets: int) -> None:
        """Set how many buckets the expected optimizer has launched."""
        self.sent = buckets

    def came(self, stepper: Stepper) -> None:
        """Record the step of an optimizer."""
        self.sent = 0
        this, last = weakref.ref(stepper), self.last
        if last is not None:
            self._after[last] = this
        self._last, self._expected, self._is_known = this, self._after.get(stepper, this), True


_OF: WeakKeyDictionary[Comm, Turns[Any]] = WeakKeyDictionary()


def turns_over(comm: Comm) -> Turns[Any]:
    """Return the turns of a wire: the same object for all of its optimizers."""
    return _OF.setdefault(comm, Turns())
