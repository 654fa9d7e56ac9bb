"""The key-value store in which ranks that survive each other meet: torch's TCPStore, which outlives each of them."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator
from datetime import timedelta

import torch.distributed as dist

from ..errors import CommError
from .base import DEADLINE
from .sockets import end_waits_after

__all__ = ["PAUSE", "TCPKeyValueStore"]

PAUSE = 0.005
"""Seconds between two polls of the store by an idle rank."""


class TCPKeyValueStore:
    """torch's TCPStore with the interface of the membership protocol. Raises CommError once the store is gone."""

    def __init__(self, host: str, port: int, deadline: float = DEADLINE) -> None:
        self.host, self.port, self.deadline = host, port, deadline
        try:
            self.tcp = dist.TCPStore(
                host, port, is_master=False, timeout=timedelta(seconds=deadline), wait_for_workers=False
            )
        except RuntimeError as error:
            raise self._lost(error) from error
        end_waits_after(deadline, port)

    def another(self) -> TCPKeyValueStore:
        """Return a further connection to the store, for a thread: torch blocks other threads while one waits.

        Keep it: torch's store looks up the name of each client, and serves nobody meanwhile, for seconds if no name
        server answers.
        """
        return TCPKeyValueStore(self.host, self.port, self.deadline)

    def get(self, key: str) -> str | None:
        with self._reaching():
            return self.tcp.get(key).decode() if self.tcp.check([key]) else None

    def set(self, key: str, value: str) -> None:
        with self._reaching():
            self.tcp.set(key, value)

    def compare_set(self, key: str, value: str) -> str:
        with self._reaching():
            return bytes(self.tcp.compare_set(key, "", value)).decode()

    def wait(self, key: str, seconds: float) -> str | None:
        # torch's own wait logs two lines at each timeout, and blocks other threads' access to the store meanwhile
        end, pause = time.monotonic() + seconds, PAUSE / 4
        while (value := self.get(key)) is None and time.monotonic() < end:
            time.sleep(pause)
            pause = min(2 * pause, 4 * PAUSE)
        return value

    @contextlib.contextmanager
    def _reaching(self) -> Iterator[None]:
        try:
            yield
        except RuntimeError as error:
            raise self._lost(error) from error

    def _lost(self, error: Exception) -> CommError:
        reason = (str(error).strip().splitlines() or [type(error).__name__])[0]
        return CommError(
            f"the store at {self.host}:{self.port} does not answer ({reason:.200}). It is hosted by the first agent of "
            f"`dgcopt run --survive`; without it no rank can go on. Start the job anew from a checkpoint."
        )
