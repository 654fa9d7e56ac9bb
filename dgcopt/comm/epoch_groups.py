"""The Gloo groups of an epoch, a period in which the ranks stay the same: built, watched, and closed at its end."""

from __future__ import annotations

import contextlib
import json
import os
import socket
import threading
import time
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import torch.distributed as dist

from ..errors import CommError
from .base import Channel
from .membership import Epoch, failed_key, gone_key, noticed_key
from .sockets import listening, shut_down
from .tcp_store import TCPKeyValueStore

__all__ = ["EpochGroups", "machines_of"]

LOOK = 0.2
"""Seconds between two polls: of rank 0 for processes that ask to join, and of every rank for the end of an epoch."""

BUILD = 20.0
"""Longest seconds for building the groups of an epoch; all members are known to be waiting for it."""


class EpochGroups:
    """One rank's Gloo groups, of one epoch after the other, and the thread that watches the epoch.

    Args:
        store: where the ranks meet.
        member: the name of this process.

    Attributes:
        where: machine of this process and its address there, for `Epoch.where`.
    """

    def __init__(self, store: TCPKeyValueStore, member: str) -> None:
        self._store = store
        self._member = member
        self._device, self._address = _device()
        self.where = json.dumps([os.environ.get("DGCOPT_NODE") or socket.gethostname(), *self._address])
        self._peers: set[tuple[str, int]] = set()
        self._live = threading.Lock()
        self._for_groups: TCPKeyValueStore | None = None
        self._for_watching: TCPKeyValueStore | None = None
        self._connected: int | None = None  # epoch of the open connections
        self._watcher: threading.Thread | None = None

    def is_open(self, epoch: Epoch) -> bool:
        """True until some rank has left the epoch."""
        return self._connected == epoch.number

    def open(self, epoch: Epoch, look: Callable[[Epoch, TCPKeyValueStore], None]) -> None:
        """Watch an epoch that begins, in a thread; while it is open, `look` is called there every LOOK seconds."""
        self._peers = {(host, port) for _, host, port in map(json.loads, epoch.where)} - {self._address}
        with self._live:
            self._connected = epoch.number
        name = "dgcopt watches the ranks"
        self._watcher = threading.Thread(target=self._watch, args=(epoch, look), name=name, daemon=True)
        self._watcher.start()

    def build(self, epoch: Epoch, prefix: str, channels: dict[Channel, list[str]]) -> dict[Channel, Any]:
        """Build a group of the members of each channel.

        Raises CommError or RuntimeError if they do not all come, at once if one is known to have ended: Gloo does not
        notice that. The attempt is then left to a thread.
        """
        built: dict[Channel, Any] = {}
        failures: list[Exception] = []

        def build() -> None:
            try:
                store, self._for_groups = self._for_groups or self._store.another(), None
                for channel, members in channels.items():
                    built[channel] = self._group(store, f"{epoch.number}/{prefix}{channel}", members)
                self._for_groups = store  # unless it waits in vain: the next groups then need another one
            except Exception as error:  # raised below, in the thread that waits
                failures.append(error)

        thread = threading.Thread(target=build, name="dgcopt builds groups", daemon=True)
        thread.start()
        thread.join(LOOK)
        everyone = {one for members in channels.values() for one in members}
        while thread.is_alive():
            gone = [one for one in everyone if self._store.get(gone_key(one)) is not None]
            if gone or not self.is_open(epoch):
                raise CommError(
                    f"{' and '.join(gone) or 'a rank'} has left epoch {epoch.number} before its groups were built"
                )
            thread.join(LOOK)
        if failures:
            raise failures[0]
        if not self.is_open(epoch):  # another rank has left it meanwhile; its thread may still have built
            raise CommError(f"a rank has left epoch {epoch.number} while its groups were built")
        return built

    def _group(self, store: TCPKeyValueStore, name: str, members: list[str]) -> dist.ProcessGroupGloo:
        options: Any = dist.ProcessGroupGloo._Options()  # type: ignore[attr-defined]
        options._devices = [self._device]
        options._timeout = timedelta(seconds=min(self._store.deadline, BUILD))
        place = members.index(self._member)
        prefixed = dist.PrefixStore(f"dgcopt/groups/{name}", store.tcp)
        group = dist.ProcessGroupGloo(prefixed, place, len(members), options)
        group._set_default_timeout(timedelta(seconds=self._store.deadline))
        return group

    def _watch(self, epoch: Epoch, look: Callable[[Epoch, TCPKeyValueStore], None]) -> None:
        """Close this rank's connections once another rank has left the epoch."""
        with contextlib.suppress(CommError):
            store = self._for_watching = self._for_watching or self._store.another()
            while True:
                time.sleep(LOOK)
                if not self.is_open(epoch):
                    return
                look(epoch, store)
                if store.get(failed_key(epoch)) is not None:
                    self.close(epoch)
                    store.set(noticed_key(epoch.number, self._member), "")
                    return

    def close(self, epoch: Epoch) -> None:
        """Shut down the connections of an epoch, so that every wait in them fails at once, here and elsewhere."""
        with self._live:
            if self._connected == epoch.number:
                shut_down(self._address, self._peers)
                self._connected = None

    def leave(self) -> None:
        """Leave the last epoch permanently; its connections end with the process."""
        with self._live:
            self._connected = None
        if self._watcher is not None:
            self._watcher.join(self._store.deadline)  # Python aborts if it ends while a thread is in torch's store


def machines_of(epoch: Epoch) -> list[str]:
    """Return the machine of each rank."""
    return [json.loads(where)[0] for where in epoch.where]


def _device() -> tuple[object, tuple[str, int]]:
    """Make Gloo's device for this process; return it with the address at which it listens."""
    before = listening()
    interface = os.environ.get("GLOO_SOCKET_IFNAME", "").split(",")[0]
    make = dist.ProcessGroupGloo
    device = make.create_device(interface=interface) if interface else make.create_default_device()
    addresses = listening() - before
    if len(addresses) != 1:
        raise CommError(f"Gloo listens at {len(addresses)} new addresses of this process, not at one: {addresses}")
    return device, addresses.pop()
