"""Checks of received messages, with outcomes on the device until all of a step are read at once."""

from __future__ import annotations

from collections.abc import Callable, Iterable

import torch
from torch import Tensor

from ..errors import PayloadError

__all__ = ["Checks", "expect", "read_checks"]


class Checks:
    """Outcomes of checks, and other numbers, that nobody has waited for; `read_checks` reads them."""

    def __init__(self) -> None:
        self._pending: list[tuple[Tensor, Callable[[int], object]]] = []

    @property
    def are_pending(self) -> bool:
        """True if any number is yet to be read."""
        return bool(self._pending)

    def when_read(self, number: Tensor, use: Callable[[int], object]) -> None:
        """Call `use` with a number, of no dimension, once it is read."""
        self._pending.append((number, use))

    def expect(self, right: Tensor, problem: Callable[[], str]) -> None:
        """Raise PayloadError of `problem()`, once it is read, unless `right`, of no dimension, is true."""

        def use(number: int) -> None:
            if not number:
                raise PayloadError(problem())

        self.when_read(right, use)

    def clear(self) -> None:
        """Read none of them: the step is aborted."""
        self._pending = []

    def take(self) -> list[tuple[Tensor, Callable[[int], object]]]:
        """Take all unread numbers, with the functions that use them."""
        taken, self._pending = self._pending, []
        return taken


def expect(checks: Checks | None, right: Tensor, problem: Callable[[], str]) -> None:
    """`Checks.expect`; without any, wait for the device and raise at once."""
    if checks is not None:
        checks.expect(right, problem)
    elif not right:
        raise PayloadError(problem())


def read_checks(checks: Iterable[Checks]) -> None:
    """Read the numbers of several exchanges at once, which waits once for each device.

    Raises PayloadError for the first check that fails.
    """
    pending = [each for one in checks for each in one.take()]
    by_device: dict[torch.device, list[Tensor]] = {}
    for number, _ in pending:
        by_device.setdefault(number.device, []).append(number)
    numbers = {device: iter(torch.stack(some).tolist()) for device, some in by_device.items()}
    for number, use in pending:
        use(int(next(numbers[number.device])))
