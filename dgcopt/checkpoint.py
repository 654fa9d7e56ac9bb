"""Checkpoints that hold every rank's memory, appear all at once or not at all, and are verified before they are used.

    directory/
      step-00000100/
        rank-0.pt  rank-1.pt ...     what each rank gave, `torch.save`d, read with `weights_only=True`
        manifest.json                step, number of ranks, SHA-256 of every file; written last

The directory must be shared by all machines.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import pickle
import shutil
from pathlib import Path
from typing import Any

import torch

from .collectives import AllGather, AllReduce, Broadcast
from .comm import Comm, current_comm
from .errors import CheckpointError, ConfigError

__all__ = ["load", "save"]

MANIFEST = "manifest.json"
FORMAT = 1


def save(directory: str | Path, state: dict[str, Any], step: int, comm: Comm | None = None, keep: int = 2) -> Path:
    """Write one checkpoint of all ranks; collective. Returns its folder.

    Args:
        directory: where checkpoints go, shared by all machines; made if missing.
        state: this rank's own: tensors, numbers, text, and lists or dicts of them, such as
            `{"model": model.state_dict(), "optimizer": optimizer.state_dict()}`.
        step: names the checkpoint; a later one must be larger.
        keep: how many valid checkpoints stay; older ones are deleted.

    An interrupted save leaves the previous checkpoint valid. Raises CheckpointError on every rank if any could not
    write (disk full, no permission, directory not shared).
    """
    if keep < 1:
        raise ConfigError(f"keep must be at least 1, or nothing would be left: {keep}")
    comm = current_comm() if comm is None else comm
    directory = Path(directory)
    final, unfinished = directory / f"step-{step:08d}", directory / f".step-{step:08d}.unfinished"
    problem = ""
    if comm.rank == 0:
        try:
            shutil.rmtree(unfinished, ignore_errors=True)
            unfinished.mkdir(parents=True)
        except OSError as error:
            problem = str(error)
    _agree(comm, problem, f"cannot make {unfinished}")
    digest = b""
    try:
        if not unfinished.is_dir():
            problem = f"{unfinished} was made by rank 0 but does not exist here; all machines must share the directory"
        else:
            digest = _write(unfinished / f"rank-{comm.rank}.pt", state)
    except (OSError, RuntimeError, pickle.PicklingError, AttributeError) as error:
        problem = str(error)
    _agree(comm, problem, f"cannot write a checkpoint to {directory}")
    mine = torch.frombuffer(bytearray(digest), dtype=torch.uint8)
    digests = comm.run(AllGather(comm.to_wire(mine), label="checksums of a checkpoint")).cpu()
    if comm.rank == 0:
        try:
            sums = [bytes(row.tolist()).hex() for row in digests]
            manifest = {"format": FORMAT, "step": step, "world_size": comm.size, "sha256": sums}
            _write_text(unfinished / MANIFEST, json.dumps(manifest, indent=1))
            if final.exists():
                shutil.rmtree(final)
            os.replace(unfinished, final)
            _flush_folder(directory)
            for old in _steps(directory)[keep:]:
                shutil.rmtree(directory / f"step-{old:08d}", ignore_errors=True)
        except OSError as error:
            problem = str(error)
    _agree(comm, problem, f"cannot complete the checkpoint {final}")
    return final


def load(directory: str | Path, comm: Comm | None = None) -> tuple[int, dict[str, Any]] | None:
    """The newest checkpoint that is valid on every rank, as `(step, this rank's state)`; collective.

    None if the directory holds no checkpoint. Damaged and half-written ones are passed over in favour of older ones.
    Raises CheckpointError if there are only damaged ones, saying what is wrong with the newest, or if the newest was
    made by another number of ranks.
    """
    comm = current_comm() if comm is None else comm
    directory = Path(directory)
    tried: list[str] = []
    below = 2**62
    while True:
        steps = [step for step in _steps(directory) if step < below] if comm.rank == 0 else []
        newest = torch.tensor([steps[0] if steps else -1], dtype=torch.int64)
        below = int(comm.run(Broadcast(comm.to_wire(newest), label="newest checkpoint")))
        if below < 0:
            if tried:
                raise CheckpointError(f"no checkpoint in {directory} can be used: {tried[0]}")
            return None
        state, problem = None, ""
        try:
            state = _read(directory / f"step-{below:08d}", comm)
        except _WrongWorld as error:
            problem = str(error)
            _agree(comm, problem, f"cannot resume from {directory}")
        except CheckpointError as error:
            problem = str(error)
        valid = torch.tensor([int(not problem)], dtype=torch.int32)
        if int(comm.run(AllReduce(comm.to_wire(valid), op="min", label="checkpoint is valid"))):
            assert state is not None
            return below, state
        tried.append(problem or f"another rank's part of step-{below:08d} is damaged")


class _WrongWorld(CheckpointError):
    """A whole checkpoint, of another number of ranks."""


def _read(folder: Path, comm: Comm) -> dict[str, Any]:
    try:
        manifest = json.loads((folder / MANIFEST).read_text())
        world_size, sums = int(manifest["world_size"]), list(manifest["sha256"])
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise CheckpointError(f"{folder / MANIFEST} is missing or damaged ({error})") from error
    if world_size != comm.size:
        raise _WrongWorld(
            f"{folder} was made by {world_size} ranks and this run has {comm.size}; start it with {world_size}"
        )
    path = folder / f"rank-{comm.rank}.pt"
    try:
        if _sha256(path).hex() != sums[comm.rank]:
            raise CheckpointError(f"{path} is damaged: its checksum is not the one in {MANIFEST}")
        return torch.load(path, map_location="cpu", weights_only=True)
    except (OSError, RuntimeError, EOFError, IndexError, pickle.UnpicklingError) as error:
        raise CheckpointError(f"{path} cannot be read ({str(error).splitlines()[0]})") from error


def _agree(comm: Comm, problem: str, what: str) -> None:
    """Go on only if no rank has a problem; otherwise raise on all, with the words of those who know them."""
    ranks = comm.run(AllGather(comm.to_wire(torch.tensor([int(bool(problem))])), label="checkpoint problems"))
    affected = ranks.flatten().nonzero().flatten().tolist()
    if problem:
        raise CheckpointError(f"rank {comm.rank}: {what}: {problem}")
    if affected:
        raise CheckpointError(f"rank {comm.rank}: {what}: rank(s) {affected} failed, and say why")


def _steps(directory: Path) -> list[int]:
    """Steps of the finished checkpoints, newest first."""
    names = [path.name for path in directory.glob("step-*")] if directory.is_dir() else []
    return sorted((int(name[5:]) for name in names if name[5:].isdigit()), reverse=True)


def _write(path: Path, state: dict[str, Any]) -> bytes:
    """Write to disk for good and return the checksum."""
    with path.open("wb") as file:
        torch.save(state, file)
        file.flush()
        os.fsync(file.fileno())
    return _sha256(path)


def _write_text(path: Path, text: str) -> None:
    with path.open("w") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())


def _sha256(path: Path) -> bytes:
    digest = hashlib.sha256()
    with path.open("rb") as file:
        while part := file.read(1 << 20):
            digest.update(part)
    return digest.digest()


def _flush_folder(path: Path) -> None:
    with contextlib.suppress(OSError):  # not every file system lets a folder be opened
        handle = os.open(path, os.O_RDONLY)
        os.fsync(handle)
        os.close(handle)
