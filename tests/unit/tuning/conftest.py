"""Time that tests of measurements control: the machine may be busy."""

import time
from collections.abc import Callable

import pytest


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Callable[[], float]:
    """Seconds that pass only in `time.sleep`, which returns at once."""
    seconds = [0.0]
    monkeypatch.setattr(time, "sleep", lambda pause: seconds.append(seconds[-1] + pause))
    monkeypatch.setattr("dgcopt.tuning.clock.now", lambda: seconds[-1])
    return lambda: seconds[-1]
