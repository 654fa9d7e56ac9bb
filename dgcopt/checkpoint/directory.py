"""The directory of checkpoints: finished and interrupted ones, their writers, and deletion."""

from __future__ import annotations

import contextlib
import json
import os
import re
import socket
from pathlib import Path
from typing import Any

from ..errors import CheckpointError, ConfigError
from .files import MANIFEST, identity_text

FINISHED, REPLACED, UNFINISHED = "step-", ".replaced-step-", ".unfinished-step-"
LARGEST_STEP = 2**63 - 1
"""Ranks exchange steps as int64."""
_known: dict[str, set[str]] = {}
"""Identities of known checkpoints by directory: found by this process, or saved with its ranks."""


def check_directory(directory: Any) -> None:
    if not isinstance(directory, str | os.PathLike):
        raise ConfigError(f"directory must be a path of checkpoints, not {directory!r:.200}")
    if "\0" in str(directory):
        raise ConfigError(f"directory {str(directory)!r:.200} contains a NUL character: give a path without it")
    path = Path(directory)
    try:
        found = "a file" if path.is_file() else "one checkpoint" if (path / MANIFEST).exists() else ""
    except PermissionError:  # perhaps on this rank only; the load or save ends with an error of all
        return
    if found:
        raise ConfigError(f"{directory} is {found}: give the directory of checkpoints, here maybe {path.parent}")


def check_readable(directory: Path) -> None:
    """Raise CheckpointError for a directory that cannot be listed: `glob` finds nothing in it, as in an empty one."""
    try:
        os.listdir(directory)
    except (FileNotFoundError, NotADirectoryError):  # the error of a later save names the path
        return
    except OSError as error:
        raise CheckpointError(
            f"{directory} cannot be read ({error.strerror}), so its checkpoints cannot be found. Give this user the "
            f"right to read it, or load from another directory"
        ) from error


def unfinished_folder(directory: Path, step: int, number: int) -> Path:
    return directory / f"{UNFINISHED}{step:08d}-{identity_text(number)}"


def check_sole_writer(directory: Path) -> None:
    """Raise CheckpointError if another run has written here, or is about to."""
    known = known_identities(directory)
    for identity, (folder, writer) in read_identities(directory).items():
        if identity not in known:
            raise CheckpointError(
                f"{folder} is of another run ({writer}), which writes to {directory} at the same time as this one "
                f"(process {os.getpid()} on {socket.gethostname()}): each would delete and load the other's "
                f"checkpoints. Give each run its own directory, or end the other run and restart this one"
            )


def clear_leftovers(directory: Path) -> None:
    """Delete the folders of interrupted saves, to free their space."""
    leftovers = [*directory.glob(UNFINISHED + "*")]
    leftovers += [
        path for path in directory.glob(REPLACED + "*") if path not in finished_checkpoints(directory).values()
    ]
    for path in leftovers:
        if has_manifest(path):
            remove_checkpoint(path)


def remove_checkpoint(folder: Path) -> None:
    """Delete the files of a save, the manifest last, and the folder if it is empty then."""
    with contextlib.suppress(OSError):
        for path in folder.iterdir():
            if re.fullmatch(r"rank-\d+\.pt", path.name):
                path.unlink()
        (folder / MANIFEST).unlink(missing_ok=True)
        folder.rmdir()


def has_manifest(folder: Path) -> bool:
    """Return True if a folder has a manifest of dgcopt, even a damaged one."""
    try:
        return b'"dgcopt"' in (folder / MANIFEST).read_bytes()
    except OSError:
        return False


def read_identities(directory: Path) -> dict[str, tuple[Path, str]]:
    """Return the folder and the writer of every checkpoint, finished or not, by its identity."""
    found: dict[str, tuple[Path, str]] = {}
    paths: list[Path] = []
    with contextlib.suppress(PermissionError):  # perhaps on this rank only; the load or save ends with an error of all
        paths += [path for prefix in (FINISHED, REPLACED, UNFINISHED) for path in directory.glob(prefix + "*")]
    for path in paths:
        with contextlib.suppress(OSError, ValueError, RecursionError, AttributeError):
            manifest = json.loads((path / MANIFEST).read_text())
            if isinstance(identity := manifest.get("identity"), str):
                found[identity] = path, str(manifest.get("writer"))
    return found


def known_identities(directory: Path) -> set[str]:
    """Return the identities that this process knows in a directory; at first all."""
    place = os.path.realpath(directory)
    if place not in _known:
        _known[place] = {*read_identities(directory)}
    return _known[place]


def finished_checkpoints(directory: Path) -> dict[int, Path]:
    """Return the folders of the finished checkpoints by step, newest first."""
    found: dict[int, Path] = {}
    for prefix in (REPLACED, FINISHED):  # the latter is newer if there are both
        for path in directory.glob(prefix + "*") if directory.is_dir() else ():
            step = path.name[len(prefix) :]
            if step.isdecimal() and int(step) <= LARGEST_STEP:
                found[int(step)] = path
    return dict(sorted(found.items(), reverse=True))
