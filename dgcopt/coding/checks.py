"""Checks of received messages, with outcomes on the device until all of a step are read at once."""

from __future__ import annotations

from collections.abc import Callable, Iterable

import torch
from torch import Tensor

from ..errors import PayloadError

__all__ = ["Checks", "expect", "read_checks"]


class Checks:
    """Received data to verify before a step commits, and outcomes that nobody has waited for; `read_checks` reads them.

    Attributes:
        to_check: received tensors that may hold NaN or Inf, see `check_finite`.
        by_sender: decoded messages with a row per rank, to name the senders of NaN or Inf.
        refused: ranks with NaN or Inf in their messages; see `refuse`.
    """

    def __init__(self) -> None:
        self.clear()

    @property
    def are_pending(self) -> bool:
        """True if any number is yet to be read."""
        return bool(self._pending)

    def when_read(self, number: Tensor, use: Callable[[int], object]) -> None:
        """Call `use` with a 0-dim number once it is read."""
        self._pending.append((number, use))

    def expect(self, right: Tensor, problem: Callable[[], str]) -> None:
        """Raise PayloadError of `problem()`, once it is read, unless `right`, a 0-dim tensor, is true."""

        def use(number: int) -> None:
            if not number:
                raise PayloadError(problem())

        self.when_read(right, use)

    def check_finite(self, arrived: Tensor, by_sender: Tensor | None = None) -> None:
        """Abort the step on all ranks if a tensor that all have received holds NaN or Inf.

        For tensors that are small compared with the gradient; a SparseSum is checked in any case. `by_sender` holds the
        same data with a row per rank, so that the error can name the senders.
        """
        self.to_check.append(arrived)
        if by_sender is not None:
            self.by_sender.append(by_sender)

    def refuse(self, ranks: Iterable[int]) -> None:
        """Abort the step because messages of `ranks` hold NaN or Inf; all ranks must call it alike."""
        self.refused.update(ranks)

    def clear(self) -> None:
        """Read none of them: the step has ended."""
        self._pending: list[tuple[Tensor, Callable[[int], object]]] = []
        self.to_check: list[Tensor] = []
        self.by_sender: list[Tensor] = []
        self.refused: set[int] = set()

    def take(self) -> list[tuple[Tensor, Callable[[int], object]]]:
        """Take all unread numbers, with the functions that use them."""
        taken, self._pending = self._pending, []
        return taken


def expect(checks: Checks | None, right: Tensor, problem: Callable[[], str]) -> None:
    """Check as `Checks.expect` does; without `checks`, wait for the device and raise at once."""
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
