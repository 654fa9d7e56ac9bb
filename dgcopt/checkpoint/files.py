"""The files of one checkpoint: a file per rank, verified by SHA-256, and a manifest."""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import pickle
import re
import socket
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from ..errors import CheckpointError
from ..version import FORMAT, __version__

MANIFEST = "manifest.json"


def manifest_text(step: int, size: int, number: int, sums: list[str] | None = None) -> str:
    """Return the text of a manifest; without checksums, that of a save in progress."""
    written = time.strftime("%Y-%m-%d %H:%M:%S UTC", time.gmtime())
    writer = f"process {os.getpid()} on {socket.gethostname()}, {written}"
    # first, so that a truncated manifest is still recognised
    fields: dict[str, Any] = {"dgcopt": __version__, "torch": torch.__version__, "format": FORMAT, "step": step}
    fields |= {"world_size": size, "identity": identity_text(number), "writer": writer}
    return json.dumps(fields if sums is None else fields | {"sha256": sums}, indent=1)


def identity_text(number: int) -> str:
    return f"{number:016x}"


class RankFiles(Sequence[dict[str, Any]]):
    """The ranks' states, by rank. Each file is verified and read on access, so one at a time is in memory."""

    def __init__(self, folder: Path, sums: list[str]) -> None:
        self.folder, self.sums = folder, sums

    def __len__(self) -> int:
        return len(self.sums)

    def check(self, rank: int) -> Path:
        """Return a rank's file. Raises CheckpointError if it is damaged."""
        path = self.folder / rank_file(rank)
        try:
            intact = sha256_of(path).hex() == self.sums[rank]
        except OSError as error:
            raise CheckpointError(f"{path} cannot be read ({error})") from error
        if not intact:
            raise CheckpointError(f"{path} is damaged: its checksum is not the one in {MANIFEST}")
        return path

    def __getitem__(self, rank: Any) -> Any:
        path = self.check(rank)
        try:
            return torch.load(path, map_location="cpu", weights_only=True)
        except Exception as error:  # torch.load raises errors of many kinds
            reason = (str(error) or type(error).__name__).splitlines()[0]
            raise CheckpointError(f"{path} cannot be read ({reason})") from error


def read_checksums(folder: Path, step: int) -> list[str]:
    """Return the SHA-256 of every rank's file from the manifest. Raises CheckpointError for an invalid manifest."""
    path = folder / MANIFEST
    try:
        manifest = json.loads(path.read_text())
    except (OSError, ValueError, RecursionError) as error:
        raise CheckpointError(f"{path} is missing or damaged ({error})") from error
    fields = manifest if isinstance(manifest, dict) else {}
    numbers = [fields.get(name) for name in ("format", "step", "world_size")]
    sums = fields.get("sha256")
    if not isinstance(sums, list) or not sums or any(type(number) is not int for number in numbers):
        raise CheckpointError(f"{path} is damaged: it lacks format, step, world_size or sha256")
    if numbers[0] != FORMAT:
        raise CheckpointError(
            f"{path} has format {numbers[0]}, written by dgcopt {fields.get('dgcopt')}; dgcopt {__version__} reads "
            f"format {FORMAT}. Load it with the version that wrote it, or save to another directory and start anew"
        )
    if numbers[1:] != [step, len(sums)] or any(not isinstance(digest, str) for digest in sums):
        raise CheckpointError(f"{path} is damaged: its entries contradict each other, or the name of its folder")
    return sums


def rank_file(rank: int) -> str:
    return f"rank-{int(rank)}.pt"


def write_state(path: Path, state: dict[str, Any]) -> bytes:
    """Write, fsync, and return the SHA-256."""
    with path.open("wb") as file:
        try:
            torch.save(state, file)
        except RuntimeError as error:  # of torch's writer, which hides a full disk
            if isinstance(error.__context__, OSError):
                raise error.__context__ from None
            raise
        file.flush()
        os.fsync(file.fileno())
    try:
        torch.load(path, map_location="cpu", weights_only=True, mmap=True)  # which reads no tensors
    except pickle.UnpicklingError as error:
        named = re.search(r"GLOBAL (\S+)", str(error))
        raise CheckpointError(
            f"the state holds {named[1] if named else 'something'}, which could not be loaded again: it may hold "
            f"tensors, numbers, text, and lists or dicts of them. Give state_dict()s in place of objects, such as "
            f"model.state_dict()"
        ) from error
    except Exception as error:  # torch.load raises errors of many kinds
        reason = (str(error) or type(error).__name__).splitlines()[0]
        raise CheckpointError(f"{path} cannot be read back after it was written ({reason}): check the disk") from error
    return sha256_of(path)


def write_text(path: Path, text: str) -> None:
    with path.open("w") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())


def sha256_of(path: Path) -> bytes:
    digest = hashlib.sha256()
    with path.open("rb") as file:
        while part := file.read(1 << 20):
            digest.update(part)
    return digest.digest()


def flush_folder(path: Path) -> None:
    with contextlib.suppress(OSError):  # not every file system lets a folder be opened
        handle = os.open(path, os.O_RDONLY)
        try:
            os.fsync(handle)
        finally:
            os.close(handle)
