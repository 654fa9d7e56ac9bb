"""Disk faults while a checkpoint is saved or loaded, at the n-th system call: ENOSPC, EIO, truncated files, death.

A save that fails says so, the checkpoint before it stays, and the next save works once the disk does again. What is
loaded is what was saved, bit for bit.
"""

from __future__ import annotations

import builtins
import errno
import io
import os
import random
import signal
import tempfile
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any
from unittest import mock

import torch

import dgcopt
from dgcopt.comm import LocalComm
from tests.distributed.faults.rules import Seen
from tests.distributed.faults.training import digest

KIND = "disk"
COUNT, QUICK = 140, 24
FAULTS = ("ENOSPC", "EIO", "kill", "cut", "EIO while loading", "full")
CALLS = ("open", "write", "flush", "fsync", "mkdir", "replace", "rename", "rmdir", "unlink")


def plan(seed: int, count: int) -> Iterator[dict[str, Any]]:
    for number in range(count):
        rng = random.Random(f"{seed} {KIND} {number}")
        yield {
            "how": FAULTS[number % len(FAULTS)],
            "place": rng.random(),
            "again": rng.random() < 0.3,
            "lasts": rng.random() < 0.5,
            "size": rng.choice([10, 3000, 70000]),
        }


def label(fault: dict[str, Any]) -> str:
    return "a disk that fails or fills up, or death, while saving or loading"


def describe(fault: dict[str, Any]) -> str:
    what = "saving step 2 again" if fault["again"] else "saving step 3"
    return f"{fault['how']}{' from then on' if fault['lasts'] else ''} at {fault['place']:.0%} of {what}"


def state_of(step: int, size: int) -> dict[str, Any]:
    weights = torch.randn(size, generator=torch.Generator().manual_seed(step))
    return {"weights": weights, "step": step}


def inject(fault: dict[str, Any]) -> Seen:
    seen, comm, how = Seen(), LocalComm(), fault["how"]
    old, new = state_of(2, fault["size"]), state_of(2 if fault["again"] else 3, fault["size"])
    step = new["step"]
    if fault["again"]:
        new["weights"] += 1

    def save(folder: Path, state: dict[str, Any]) -> None:
        dgcopt.checkpoint.save(folder, state, state["step"], comm)

    with tempfile.TemporaryDirectory(prefix="dgcopt-disk-") as name:
        trial, folder = Path(name) / "trial", Path(name) / "real"
        for place in (trial, folder):
            save(place, state_of(1, fault["size"]))
            save(place, old)
        if how == "EIO while loading":
            save(folder, new)
            save(trial, new)
            with Disk(trial).faulty() as disk:
                dgcopt.checkpoint.load(trial, comm)
            with Disk(folder, disk.count, fault).faulty() as disk:
                _check_loaded(folder, comm, [new, old, state_of(1, fault["size"])], seen, disk)
            _check_loaded(folder, comm, [new], seen, disk)
            return seen
        if how == "full":
            _fill(folder, new, save, seen, fault["place"])
            return seen
        with Disk(trial).faulty() as disk:
            save(trial, new)
        total = disk.count
        if how == "kill":
            disk = Disk(folder, total, fault)
            _in_child(disk, lambda: save(folder, new))
        else:
            with Disk(folder, total, fault).faulty() as disk:
                try:
                    save(folder, new)
                except Exception as error:
                    seen.add(0, error)
        possible = [new, old] if seen.raised or how in ("kill", "cut") else [new]
        if how == "cut" and fault["again"]:  # the disk has lost the newest one without a word: the one before it, then
            possible.append(state_of(1, fault["size"]))
        _check_loaded(folder, comm, possible, seen, disk)
        try:
            save(folder, state_of(step + 1, fault["size"]))
        except Exception as error:
            seen.lost.append(f"{disk.struck}: the next save fails although the disk works again: {error!r:.300}")
        else:
            _check_loaded(folder, comm, [state_of(step + 1, fault["size"])], seen, disk)
    return seen


def _fill(folder: Path, new: dict[str, Any], save: Callable[..., None], seen: Seen, place: float) -> None:
    """The disk has room for three checkpoints and a bit; foreign data take that until they are removed."""
    used = used_by(folder)
    disk = Disk(folder)
    disk.capacity = int(used * 1.5 * 1.1)
    ballast = folder / "ballast"
    ballast.write_bytes(bytes(disk.capacity - used - int(place * used * 0.45)))
    for room in ("no room", "room again"):
        disk.struck = room
        with disk.faulty():
            try:
                save(folder, new)
            except Exception as error:
                seen.add(0, error)
                if room == "room again":
                    seen.lost.append(f"a save fails although there is room again: {error!r:.300}")
            else:
                if room == "no room":
                    seen.struck = False
        ballast.unlink(missing_ok=True)
        new = {**new, "step": 10}
    _check_loaded(folder, LocalComm(), [new], seen, disk)


def used_by(folder: Path) -> int:
    """Bytes of all files in a folder."""
    return sum(path.stat().st_size for path in folder.rglob("*") if path.is_file())


def _check_loaded(folder: Path, comm: Any, possible: list[dict[str, Any]], seen: Seen, disk: Disk) -> None:
    try:
        loaded = dgcopt.checkpoint.load(folder, comm)
    except dgcopt.CheckpointError as error:
        if not disk.lasts:
            seen.lost.append(f"{disk.struck}: no checkpoint can be loaded: {error!r:.300}")
        return
    except Exception as error:
        seen.add(0, error)
        return
    if loaded is None:
        seen.lost.append(f"{disk.struck}: no checkpoint is found")
    elif (loaded[0], digest(loaded[1])) not in [(state["step"], digest(state)) for state in possible]:
        seen.lost.append(f"{disk.struck}: step {loaded[0]} is loaded, with other bits or of another step than saved")


def _in_child(disk: Disk, call: Callable[[], None]) -> None:
    pid = os.fork()
    if pid == 0:
        try:
            with disk.faulty():
                call()
        finally:
            os._exit(0)
    os.waitpid(pid, 0)


class Disk:
    """Counts the system's calls on files of a folder, and lets one of them fail, or it and all that follow.

    Attributes: `count`, calls so far; `struck`, the call that failed; `capacity`, bytes that there is room for, if any.
    """

    def __init__(self, folder: Path, total: int = 0, fault: dict[str, Any] | None = None) -> None:
        self.folder, self.fault, self.count, self.struck = str(folder), fault or {}, 0, ""
        self.capacity = 0
        self.target = 1 + int(self.fault["place"] * total) if fault else -1
        self.lasts = bool(self.fault.get("lasts")) and self.fault["how"] in ("ENOSPC", "EIO", "EIO while loading")

    def call(self, name: str, path: Any, undo: Callable[[], None] = lambda: None) -> None:
        if not str(path).startswith(self.folder):
            return
        self.count += 1
        if self.count == self.target or (self.lasts and self.struck and self._can_fail(name)):
            self.struck = self.struck or f"{self.fault['how']} at call {self.count}, {name} of {Path(path).name}"
            if self.fault["how"] == "kill":
                undo()
                os.kill(os.getpid(), signal.SIGKILL)
            if self.fault["how"] == "cut":
                undo()
                return
            number = errno.ENOSPC if self.fault["how"] == "ENOSPC" else errno.EIO
            raise OSError(number, os.strerror(number), str(path))

    def _can_fail(self, name: str) -> bool:
        """A full disk still lets files be removed and renamed."""
        return self.fault["how"] != "ENOSPC" or name in ("open", "write", "flush", "fsync", "mkdir")

    @contextmanager
    def faulty(self) -> Iterator[Disk]:
        """Within it, the system's calls go through this disk."""

        def through(name: str, original: Callable[..., Any]) -> Callable[..., Any]:
            def called(path: Any, *args: Any, **kwargs: Any) -> Any:
                where = path
                if isinstance(path, int):
                    where = os.readlink(f"/proc/self/fd/{path}")
                self.call(name, where)
                return original(path, *args, **kwargs)

            return called

        def opened(path: Any, mode: str = "r", *args: Any, **kwargs: Any) -> Any:
            if isinstance(path, int) or not str(path).startswith(self.folder):
                return original_open(path, mode, *args, **kwargs)
            self.call("open", path)
            return File(original_open(path, mode, *args, **kwargs), str(path), self)

        original_open = builtins.open
        with ExitStack() as patches:
            for name in CALLS:
                if hasattr(os, name):
                    original = getattr(os, name)
                    if name not in ("open", "write"):
                        patches.enter_context(mock.patch.object(os, name, through(name, original)))
            patches.enter_context(mock.patch.object(io, "open", opened))
            patches.enter_context(mock.patch.object(builtins, "open", opened))
            yield self


class File:
    """A file whose reads and writes a disk may let fail."""

    def __init__(self, file: Any, path: str, disk: Disk) -> None:
        self._file, self._path, self._disk = file, path, disk

    def write(self, data: Any) -> int:
        def half() -> None:
            self._file.write(data[: len(data) // 2])
            self._file.flush()

        self._disk.call("write", self._path, half)
        if self._disk.capacity:
            self._file.flush()
            if used_by(Path(self._disk.folder)) + len(data) > self._disk.capacity:
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), self._path)
        if self._disk.fault.get("how") == "cut" and self._disk.struck.endswith(Path(self._path).name):
            return len(data)  # a disk that says that all is well
        return self._file.write(data)

    def read(self, *size: int) -> Any:
        self._disk.call("read", self._path)
        return self._file.read(*size)

    def readinto(self, buffer: Any) -> Any:
        self._disk.call("read", self._path)
        return self._file.readinto(buffer)

    def flush(self) -> None:
        self._disk.call("flush", self._path)
        self._file.flush()

    def __enter__(self) -> File:
        return self

    def __exit__(self, *error: Any) -> None:
        self._file.close()

    def __iter__(self) -> Any:
        return iter(self._file)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._file, name)
