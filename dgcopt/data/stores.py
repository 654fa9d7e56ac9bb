"""Stores of cached samples: in this process, on this node's disk, or on Redis servers that all nodes share.

A store maps keys to bytes. A full store evicts nothing: an epoch visits every sample once, in a new order, so an
evicted sample would be missed as often as the sample that replaced it.
"""

from __future__ import annotations

import logging
import os
import random
import sqlite3
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from ..errors import CommError, ConfigError
from ..errors.checks import check_whole

__all__ = ["DiskStore", "MemoryStore", "RedisStore", "Store", "open_store"]

log = logging.getLogger("dgcopt")

GIGABYTE = 2**30


class Store:
    """A store of bytes by keys of bytes. `put` may keep nothing, and says why in the log, once for each reason.

    Attributes:
        outlives: True if its content outlives this process.
    """

    outlives: bool = True
    _said: frozenset[str] = frozenset()

    def get(self, key: bytes) -> bytes | None:
        """Return the stored value; None if there is none, or it was evicted."""
        raise NotImplementedError

    def put(self, key: bytes, value: bytes) -> None:
        """Store a value, in place of an earlier one."""
        raise NotImplementedError

    def clear(self) -> None:
        """Delete all values, those of other processes too."""
        raise NotImplementedError

    def __len__(self) -> int:
        """Return the number of keys."""
        raise NotImplementedError

    def warn(self, problem: str, kind: str = "") -> None:
        """Log a problem, once for each kind."""
        if kind not in self._said:
            self._said |= {kind}
            log.warning("dgcopt: %s", problem)


class MemoryStore(Store):
    """In this process: not shared with others, and in a DataLoader's workers only as long as they live.

    Args:
        capacity: bytes that it may hold.
    """

    outlives = False

    def __init__(self, capacity: int = 4 * GIGABYTE) -> None:
        self.capacity = check_whole(capacity, "capacity", 1)
        self._values: dict[bytes, bytes] = {}
        self._bytes = 0

    def get(self, key: bytes) -> bytes | None:
        return self._values.get(key)

    def put(self, key: bytes, value: bytes) -> None:
        more = len(value) - len(self._values.get(key, b""))
        if self._bytes + more > self.capacity:
            self.warn(
                f"the cache in memory is full ({len(self)} samples, {self._bytes} bytes): others are made anew", "full"
            )
            return
        self._values[key] = value
        self._bytes += more

    def clear(self) -> None:
        self._values.clear()
        self._bytes = 0

    def __len__(self) -> int:
        return len(self._values)


class DiskStore(Store):
    """A file on this node's disk, shared by all its processes, with SQLite, which comes with Python.

    A killed process or a crashed machine costs only its last samples. A file that fails or is damaged during training
    is not used for half a minute; meanwhile its samples are computed again. The file must not lie on a network file
    system.

    Args:
        path: a folder, made for this user alone if it is missing. None is `dgcopt` in $XDG_CACHE_HOME or
            ~/.cache.
        capacity: bytes that its file may grow to, as this process sees it.

    Raises ConfigError if the file is no store, or cannot be opened; `clear` and `len` also if it is damaged.
    """

    def __init__(self, path: str | os.PathLike[str] | None = None, capacity: int = 64 * GIGABYTE) -> None:
        if path is None:
            path = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "dgcopt"
        self.path = Path(path)
        self.capacity = check_whole(capacity, "capacity", 10 * PAGE)
        self._opened: tuple[int, sqlite3.Connection, threading.Lock] | None = None
        self._away_until = 0.0
        len(self)

    def get(self, key: bytes) -> bytes | None:
        found = self._ask("SELECT value FROM samples WHERE key = ?", key)
        return found[0][0] if found and isinstance(found[0][0], bytes) else None

    def put(self, key: bytes, value: bytes) -> None:
        if len(value) > LONGEST:  # SQLite would raise, and the store be left alone
            self.warn(f"a sample of {len(value)} bytes is too long for {self.file} and is made anew", "long")
            return
        self._ask("INSERT OR REPLACE INTO samples VALUES (?, ?)", key, value)

    def clear(self) -> None:
        self._run("DELETE FROM samples")

    def __len__(self) -> int:
        return int(self._run("SELECT count(*) FROM samples")[0][0])

    @property
    def file(self) -> Path:
        return self.path / "samples.sqlite"

    def __getstate__(self) -> dict[str, Any]:
        """Pickle without the open file: each process opens its own."""
        return {"path": self.path, "capacity": self.capacity, "_opened": None, "_away_until": 0.0}

    def _ask(self, command: str, *values: bytes) -> list[Any]:
        """Run as `_run` does, but return nothing for a file that fails; log that once."""
        if time.monotonic() < self._away_until:
            return []
        try:
            return self._run(command, *values)
        except ConfigError as error:
            if "full" in str(error.__cause__):
                self.warn(
                    f"the cache {self.file} is full (capacity {self.capacity} bytes): other samples are made anew",
                    "full",
                )
            else:
                self._opened, self._away_until = None, time.monotonic() + AWAY
                self.warn(f"{error}. Its samples are made anew", "failed")
            return []

    def _run(self, command: str, *values: bytes) -> list[Any]:
        if self._opened is None or self._opened[0] != os.getpid():
            if self._opened is not None:
                _inherited.append(self._opened)
            self._opened = os.getpid(), self._open(), threading.Lock()
        _, connection, lock = self._opened
        try:
            with lock:
                return connection.execute(command, values).fetchall()
        except sqlite3.Error as error:
            raise self._is_no_store(error) from error

    def _open(self) -> sqlite3.Connection:
        try:
            self.path.mkdir(mode=0o700, parents=True, exist_ok=True)
            connection = sqlite3.connect(self.file, timeout=PATIENCE, isolation_level=None, check_same_thread=False)
        except (OSError, ValueError, sqlite3.OperationalError) as error:  # ValueError: a NUL character in the path
            raise ConfigError(f"the cache {str(self.file)!r} cannot be opened ({error}): choose another path") from None
        try:
            connection.execute(f"PRAGMA page_size = {PAGE}")
            # readers do not wait for a writer, and only the last write can be lost
            _switch_to_wal(connection)
            connection.execute("PRAGMA synchronous = NORMAL")
            connection.execute(f"PRAGMA max_page_count = {self.capacity // PAGE}")
            # mapped into memory, a file that another program cuts short would end the process (SIGBUS)
            connection.execute("PRAGMA mmap_size = 0")
            connection.execute("CREATE TABLE IF NOT EXISTS samples (key BLOB PRIMARY KEY, value BLOB)")
        except sqlite3.Error as error:
            raise self._is_no_store(error) from error
        return connection

    def _is_no_store(self, error: Exception) -> ConfigError:
        return ConfigError(
            f"the cache {self.file} failed: it is damaged, or no store ({error}). Delete it, or choose another path"
        )


def _switch_to_wal(connection: sqlite3.Connection) -> None:
    """Set the journal mode of a file that other processes may open at the same moment.

    SQLite does not wait for them here: two that read and both want to write would wait for each other for ever.
    """
    end = time.monotonic() + PATIENCE
    while True:
        try:
            connection.execute("PRAGMA journal_mode = WAL")
            return
        except sqlite3.OperationalError as error:
            if "locked" not in str(error) or time.monotonic() > end:
                raise
        time.sleep(random.uniform(0.001, 0.01))


PAGE = 16384
"""Bytes of a page of SQLite's: few of them make a sample."""

LONGEST = 999_999_000
"""Bytes of a sample: a row of SQLite's has 10^9 at most, with its key."""

PATIENCE = 60.0
"""Seconds to wait for another process that writes."""

_inherited: list[Any] = []
"""Connections of the parent, which a forked process must neither use nor close."""


class RedisStore(Store):
    """Redis servers, shared by all nodes; each key is on one of them.

    A server's own `maxmemory` and `maxmemory-policy` say how much it keeps. One that fails is left alone for half a
    minute, in which its samples are made anew: training goes on.

    Args:
        urls: of servers, in the same order everywhere: `redis://[[user]:password@]host[:port][/database]`, `rediss://`
            with TLS, or `unix://`.

    Raises ConfigError if the package redis is missing, or for other URLs; CommError if a server does not answer.
    """

    def __init__(self, urls: str | Sequence[str]) -> None:
        self.urls = [urls] if isinstance(urls, str) else list(urls)
        if not self.urls:
            raise ConfigError("a RedisStore needs the URL of a server at least")
        for url in self.urls:
            if urlsplit(url).scheme not in ("redis", "rediss", "unix"):
                raise ConfigError(
                    f"a URL of a Redis server begins with redis://, rediss:// or unix://, not {_named(url)}"
                )
        self._connect()
        for place, client in enumerate(self._clients):
            try:
                client.ping()
            except self._failures as error:
                raise CommError(f"the Redis server {_named(self.urls[place])} does not answer: {error}") from None

    def _connect(self) -> None:
        try:
            import redis
        except ImportError:
            raise ConfigError("a store on Redis servers needs the package redis: pip install redis") from None
        self._clients = [
            redis.Redis.from_url(url, socket_timeout=ANSWER, socket_connect_timeout=ANSWER) for url in self.urls
        ]
        self._failures, self._lost = redis.RedisError, (redis.ConnectionError, redis.TimeoutError)
        self._away_until = [0.0] * len(self.urls)

    def get(self, key: bytes) -> bytes | None:
        found = self._ask(key, lambda client: client.get(PREFIX + key))
        return found if isinstance(found, bytes) else None

    def put(self, key: bytes, value: bytes) -> None:
        self._ask(key, lambda client: client.set(PREFIX + key, value))

    def clear(self) -> None:
        for client in self._clients:
            keys = list(client.scan_iter(PREFIX + b"*", count=1000))
            for start in range(0, len(keys), 1000):
                client.delete(*keys[start : start + 1000])

    def __len__(self) -> int:
        return sum(1 for client in self._clients for _ in client.scan_iter(PREFIX + b"*", count=1000))

    def __getstate__(self) -> dict[str, Any]:
        """Pickle without the connection: each process opens its own."""
        return {"urls": self.urls}

    def __setstate__(self, state: dict[str, Any]) -> None:
        vars(self).update(state)
        self._connect()

    def _ask(self, key: bytes, question: Callable[[Any], Any]) -> Any:
        place = int.from_bytes(key[-4:], "little") % len(self._clients)
        if time.monotonic() < self._away_until[place]:
            return None
        try:
            return question(self._clients[place])
        except self._failures as error:
            if isinstance(error, self._lost):
                self._away_until[place] = time.monotonic() + AWAY
            self.warn(
                f"the Redis server {_named(self.urls[place])} failed, its samples are made anew: {error}",
                f"{place} {type(error).__name__}",
            )
            return None


PREFIX = b"dgcopt:"
"""Of all keys on a Redis server, which may hold others."""

ANSWER = 5.0
"""Seconds within which a server is to answer."""

AWAY = 30.0
"""Seconds for which a server that has failed is not asked."""


def _named(url: str) -> str:
    """Return a URL without its password."""
    parts = urlsplit(url)
    return f"{parts.scheme}://{parts.netloc.rpartition('@')[2]}{parts.path}"


def open_store(store: str | Sequence[str] | Store, capacity: int | None = None) -> Store:
    """Return the store of a name: "memory", "disk", "disk:PATH", or one or several URLs of Redis servers.

    Raises ConfigError for others, and for a capacity if the store has its own.
    """
    if isinstance(store, Store):
        if capacity is not None:
            raise ConfigError("a store that is given as an object has its own capacity: set it there")
        return store
    size = {} if capacity is None else {"capacity": capacity}
    if store == "memory":
        return MemoryStore(**size)
    if store == "disk" or (isinstance(store, str) and store.startswith("disk:")):
        return DiskStore(store.removeprefix("disk").removeprefix(":") or None, **size)
    urls = [store] if isinstance(store, str) else store
    if not isinstance(urls, Sequence) or not all(isinstance(url, str) and "://" in url for url in urls):
        raise ConfigError(f'store must be "memory", "disk", "disk:PATH", or URLs of Redis servers, not {store!r}')
    if capacity is not None:
        raise ConfigError("a Redis server's capacity is its own setting, maxmemory")
    return RedisStore(store)
