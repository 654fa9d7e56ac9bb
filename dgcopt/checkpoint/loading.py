"""Loading: the newest checkpoint that is valid on every rank."""

from __future__ import annotations

import logging
from collections.abc import Generator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ..collectives import AllGather, Broadcast, Collective
from ..comm import Comm, current_comm
from ..errors import CheckpointError
from .directory import (
    FINISHED,
    LARGEST_STEP,
    check_directory,
    check_readable,
    finished_checkpoints,
    known_identities,
    read_identities,
)
from .files import RankFiles, read_checksums
from .resharding import reshare

log = logging.getLogger("dgcopt")

NONE_LEFT, UNREADABLE = -1, -2
"""Answers of rank 0 in place of the newest checkpoint's step."""


def load(directory: str | Path, comm: Comm | None = None) -> tuple[int, dict[str, Any]] | None:
    """Return the newest checkpoint that is valid on every rank as `(step, this rank's state)`; collective.

    None if the `directory` holds no checkpoint, or is missing. Damaged and half-written ones are skipped in favour of
    older ones, with a log warning. At the same world size every rank gets its own state, bit for bit; at another, see
    `reshare`. `comm` is the wire; None is that of `dgcopt.init()`. Raises CheckpointError, with the newest one's fault,
    if all are damaged, or if rank 0 may not read the directory; ConfigError for a file, or the folder of one
    checkpoint.
    """
    check_directory(directory)
    comm = current_comm(comm)
    return comm.drive(_load(Path(directory), comm))


def _load(directory: Path, comm: Comm) -> Generator[Collective, Tensor, tuple[int, dict[str, Any]] | None]:
    tried: list[str] = []
    below = LARGEST_STEP + 1
    known_identities(directory).update(read_identities(directory))
    while True:
        newest, fault = NONE_LEFT, None
        if comm.rank == 0:
            try:
                check_readable(directory)
                newest = next((step for step in finished_checkpoints(directory) if step < below), NONE_LEFT)
            except CheckpointError as error:
                newest, fault = UNREADABLE, error
        told = torch.tensor([newest], dtype=torch.int64)
        below = int((yield Broadcast(comm.to_wire(told), label="checkpoint.load, which all ranks call")))
        if below == UNREADABLE:
            raise fault or CheckpointError(f"rank 0 cannot read {directory}: its error names the reason")
        if below == NONE_LEFT:
            if tried:
                raise CheckpointError(f"no checkpoint in {directory} can be used: {tried[0]}")
            return None
        state, problem = {}, ""
        try:
            state = _read(directory, below, comm)
        except CheckpointError as error:
            problem = str(error)
        except Exception as error:  # of any kind: the other ranks wait for this one's answer
            problem = f"step-{below:08d} cannot be read ({type(error).__name__}: {error})"
        damaged = yield AllGather(comm.to_wire(torch.tensor([int(bool(problem))])), label="checkpoint is damaged")
        ranks = damaged.flatten().nonzero().flatten().tolist()
        if not ranks:
            return below, state
        tried.append(problem or f"{FINISHED}{below:08d} cannot be used by rank(s) {ranks}, which say why")
        if problem or comm.rank == 0:
            log.warning("dgcopt: rank %d passes over %s%08d: %s", comm.rank, FINISHED, below, tried[-1])


def _read(directory: Path, step: int, comm: Comm) -> dict[str, Any]:
    folder = finished_checkpoints(directory).get(step)
    if folder is None:
        raise CheckpointError(f"{directory / FINISHED}{step:08d} is not seen by rank {comm.rank}")
    parts = RankFiles(folder, read_checksums(folder, step))
    return parts[comm.rank] if len(parts) == comm.size else reshare(parts, comm.rank, comm.size)
