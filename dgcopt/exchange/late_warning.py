"""A warning that waits for an optimizer's next step, since a later call may make it pointless."""

from __future__ import annotations

import logging
from typing import Any

from torch.optim import Optimizer

__all__ = ["LateWarning"]

log = logging.getLogger("dgcopt")


class LateWarning:
    """At most one warning, ending in `remedy`, logged before the next step of `optimizer` unless cancelled first."""

    def __init__(self, optimizer: Optimizer, remedy: str) -> None:
        self._optimizer = optimizer
        self._remedy = remedy
        self._hook: Any = None

    def set(self, words: str, *args: object) -> None:
        """Warn before the next step, in place of an earlier warning."""
        self.cancel()

        def warn(*_: object) -> None:
            self.cancel()
            log.warning(f"{words} {self._remedy}", *args)

        self._hook = self._optimizer.register_step_pre_hook(warn)

    def cancel(self) -> None:
        """Do not warn."""
        if self._hook is not None:
            self._hook.remove()
            self._hook = None
