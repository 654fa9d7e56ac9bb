"""Strike at the n-th line of dgcopt that a block of code executes."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType
from typing import Any

import dgcopt

PACKAGE = str(Path(dgcopt.__file__).parent)


class Lines:
    """Counts the lines of dgcopt that run, and calls `strike` in place of one of them.

    Attributes: `count`, lines so far; `place`, the file and line that was struck.
    """

    def __init__(self, target: int = -1, strike: Callable[[], None] = lambda: None) -> None:
        self.count, self.target, self.strike, self.place = 0, target, strike, ""

    def _line(self, frame: FrameType, event: str, arg: Any) -> Any:
        if event == "line":
            self.count += 1
            if self.count == self.target:
                file = frame.f_code.co_filename[len(PACKAGE) + 1 :]
                self.place = f"{file}:{frame.f_lineno} {frame.f_code.co_name}"
                self.strike()
        return self._line

    def _call(self, frame: FrameType, event: str, arg: Any) -> Any:
        return self._line if frame.f_code.co_filename.startswith(PACKAGE) else None

    @contextmanager
    def traced(self) -> Iterator[Lines]:
        before = sys.gettrace()
        sys.settrace(self._call)
        try:
            yield self
        finally:
            sys.settrace(before)


def raises(error: type[BaseException]) -> Callable[[], None]:
    """A strike that raises an exception, as an allocation, a signal or a call of the system would."""

    def strike() -> None:
        raise error("injected")

    return strike
