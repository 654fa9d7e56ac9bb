"""Saving: all ranks write, rank 0 publishes by a rename, and older checkpoints are deleted."""

from __future__ import annotations

import os
import secrets
from collections.abc import Generator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ..collectives import AllGather, AllReduce, Broadcast, Collective
from ..comm import Comm, current_comm
from ..errors import CheckpointError, ConfigError
from ..errors.checks import check_whole
from .directory import (
    FINISHED,
    LARGEST_STEP,
    REPLACED,
    check_directory,
    check_sole_writer,
    clear_leftovers,
    finished_checkpoints,
    has_manifest,
    known_identities,
    remove_checkpoint,
    unfinished_folder,
)
from .files import (
    MANIFEST,
    RankFiles,
    flush_folder,
    identity_text,
    manifest_text,
    rank_file,
    read_checksums,
    write_state,
    write_text,
)


def save(directory: str | Path, state: dict[str, Any], step: int, comm: Comm | None = None, keep: int = 2) -> Path:
    """Write one checkpoint of all ranks; collective. Returns its folder.

    Args:
        directory: the folder for checkpoints, shared by all machines; made if missing.
        state: this rank's state: tensors, numbers, text, and lists or dicts of them, such as
            `{"model": model.state_dict(), "optimizer": optimizer.state_dict()}`.
        step: names the checkpoint; a later one must be larger, and the same one again replaces it.
        comm: the wire; None is that of `dgcopt.init()`.
        keep: number of checkpoints to keep, this one included. Only those with intact checksums count; each rank
            verifies its share. Older ones are deleted. Folders without a manifest of dgcopt, and other files in a
            checkpoint's folder, are not.

    An interrupted save leaves the previous checkpoint valid; the next save deletes its leftovers. Raises
    CheckpointError on every rank if any could not write (disk full, no permission, directory not shared); if the
    directory has a valid checkpoint of a later step, such as an earlier run's, which would be loaded in place of this
    one (damaged ones do not count); if the folder of this step is not a checkpoint of dgcopt; and if another run has
    written to the directory since this one first used it or last loaded from it.
    """
    check_directory(directory)
    if not isinstance(state, dict):
        raise ConfigError(f"state must be a dict, such as {{'model': model.state_dict()}}, not {state!r:.200}")
    keep, step = check_whole(keep, "keep", 1), check_whole(step, "step", 0)
    if step > LARGEST_STEP:
        raise ConfigError(f"step must be at most {LARGEST_STEP}, not {step}: number steps from 0")
    comm = current_comm(comm)
    return comm.drive(_save(Path(directory), state, step, comm, keep))


def _save(
    directory: Path, state: dict[str, Any], step: int, comm: Comm, keep: int
) -> Generator[Collective, Tensor, Path]:
    # rank 0's number is the identity; all ranks know it before the first write, as any may be rank 0 after a loss
    mine = torch.tensor([secrets.randbits(63)])
    numbers = yield AllGather(comm.to_wire(mine), label="checkpoint.save, which all ranks call")
    number = int(numbers.flatten()[0])
    known_identities(directory).add(identity_text(number))
    final, unfinished, problem = directory / f"{FINISHED}{step:08d}", unfinished_folder(directory, step, number), ""
    if comm.rank == 0:
        try:
            _check_can_write(directory, step)
            clear_leftovers(directory)
            _announce(unfinished, step, comm.size, number)
            check_sole_writer(directory)
        except (OSError, CheckpointError) as error:
            problem = str(error)
    yield from _agree(comm, problem, f"cannot make {final}")
    digest = b""
    try:
        if not unfinished.is_dir():
            problem = (
                f"{unfinished} was made by rank 0 but does not exist here; all ranks must give the same step, and one "
                f"directory, which all machines must share"
            )
        else:
            digest = write_state(unfinished / rank_file(comm.rank), state)
    except Exception as error:  # of any kind: the other ranks wait for this one's answer
        problem = str(error) or type(error).__name__
    yield from _agree(comm, problem, f"cannot write a checkpoint to {directory}")
    mine = torch.frombuffer(bytearray(digest), dtype=torch.uint8)
    digests = (yield AllGather(comm.to_wire(mine), label="checksums of a checkpoint")).cpu()
    older: list[int] = []
    if comm.rank == 0:
        try:
            sums = [bytes(row.tolist()).hex() for row in digests]
            check_sole_writer(directory)
            write_text(unfinished / MANIFEST, manifest_text(step, comm.size, number, sums))
            flush_folder(unfinished)
            _publish(unfinished, final, directory / f"{REPLACED}{step:08d}")
            finished = finished_checkpoints(directory)
            older = [other for other, folder in finished.items() if other < step and has_manifest(folder)]
        except (OSError, CheckpointError) as error:
            problem = str(error)
    yield from _agree(comm, problem, f"cannot complete the checkpoint {final}")
    yield from _prune(directory, older, keep, comm)
    return final


def _check_can_write(directory: Path, step: int) -> None:
    """Raise CheckpointError if a save to this directory would conflict with other folders.

    Conflicts are another run that writes here, a valid checkpoint of a later step, which `load` would prefer, and a
    folder of this step that is not dgcopt's.
    """
    check_sole_writer(directory)
    for later, folder in finished_checkpoints(directory).items():
        if later <= step:
            break
        try:
            parts = RankFiles(folder, read_checksums(folder, later))
            for rank in range(len(parts)):
                parts.check(rank)
        except CheckpointError:
            continue
        raise CheckpointError(
            f"{folder} is of a later step than {step}, and would be loaded in its place: load it to continue from it, "
            f"delete it, or use another directory"
        )
    for name in (f"{FINISHED}{step:08d}", f"{REPLACED}{step:08d}"):
        if (directory / name).exists() and not has_manifest(directory / name):
            raise CheckpointError(
                f"{directory / name} is there and has no manifest of dgcopt, so it is not replaced: move or delete "
                f"it, or use another directory"
            )


def _announce(unfinished: Path, step: int, size: int, number: int) -> None:
    """Make the folder of a save in progress, with a manifest that names its writer."""
    missing = [folder for folder in unfinished.parents if not folder.exists()]
    unfinished.mkdir(parents=True)
    for folder in missing:  # a machine that goes down must not lose the new folder around a flushed checkpoint
        flush_folder(folder.parent)
    try:
        write_text(unfinished / MANIFEST, manifest_text(step, size, number))
    except BaseException:  # such as a full disk: without a manifest, no later save may delete it
        (unfinished / MANIFEST).unlink(missing_ok=True)
        unfinished.rmdir()
        raise


def _publish(unfinished: Path, final: Path, replaced: Path) -> None:
    """Rename the new checkpoint into place. The replaced one can be loaded under its REPLACED name until then."""
    if final.exists():
        remove_checkpoint(replaced)
        os.replace(final, replaced)
    os.replace(unfinished, final)  # fails if another run has made the same folder since
    flush_folder(final.parent)
    remove_checkpoint(replaced)


def _prune(directory: Path, older: list[int], keep: int, comm: Comm) -> Generator[Collective, Tensor, None]:
    """Delete the `older` checkpoints of rank 0's list, newest first, that are older than `keep` valid ones.

    The new checkpoint is one of these. Ranks verify the others together, each its share of files, and only if there
    are more than `keep` in all.
    """
    kept = 1
    while True:
        if comm.rank == 0 and kept >= keep:
            folders = finished_checkpoints(directory)
            for folder in [folders[step] for step in older if step in folders]:
                remove_checkpoint(folder)
            older = []
        verify = older.pop(0) if kept + len(older) > keep else -1
        told = yield Broadcast(comm.to_wire(torch.tensor([verify])), label="checkpoint that may be kept")
        if (step := int(told)) < 0:
            return
        valid = torch.tensor([int(_share_is_valid(directory, step, comm))], dtype=torch.int32)
        kept += int((yield AllReduce(comm.to_wire(valid), op="min", label="checkpoint is kept")))


def _share_is_valid(directory: Path, step: int, comm: Comm) -> bool:
    """Return True if this rank's share of a checkpoint's files, `rank`, `rank + size`, ..., is undamaged."""
    try:
        folder = finished_checkpoints(directory)[step]
        parts = RankFiles(folder, read_checksums(folder, step))
        for rank in range(comm.rank, len(parts), comm.size):
            parts.check(rank)
    except (CheckpointError, KeyError):
        return False
    return True


def _agree(comm: Comm, problem: str, task: str) -> Generator[Collective, Tensor, None]:
    """Raise CheckpointError on every rank if any rank has a problem; that rank's error describes it."""
    ranks = yield AllGather(
        comm.to_wire(torch.tensor([int(bool(problem))])), label="checkpoint.save, which all ranks call"
    )
    affected = ranks.flatten().nonzero().flatten().tolist()
    if problem:
        raise CheckpointError(f"rank {comm.rank}: {task}: {problem}")
    if affected:
        raise CheckpointError(f"rank {comm.rank}: {task}: rank(s) {affected} failed; their errors name the reason")
